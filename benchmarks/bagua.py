"""Bagua's algorithms: steps per second beside ddp, and loss, bytes and speed over a slow link.

The link joins two namespaces of the network, one for each of two ranks, and ``tc`` limits it, which needs root.  Bytes
are those that the interface has counted, headers of packets included.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figure import Figure, medians_of, ratio_of
from job import HERE, run_job, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

LENGTHS = {"mlp": 24, "tiny": 400}
ALGORITHMS = (
    "ddp",
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "decentralized",
    "low_precision_decentralized",
    "async",
)
DEVICE = "bagua0"
"""Name of the interface in each namespace."""
MEGABITS = 100
LOSS_STEPS, LINK_STEPS = 100, 20
_PATIENCE = 900.0


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure all."""
    yield from _steps_beside_ddp(settings)
    yield from _link_figures(settings)


def _steps_beside_ddp(settings: Settings) -> Iterator[Figure]:
    for workload, steps in LENGTHS.items():
        with tempfile.TemporaryDirectory() as folder:
            out, repeats = Path(folder, "samples.json"), 5 if settings.quick else 25
            arguments = [f"--workload={workload}", f"--steps={steps}", f"--repeats={repeats}", f"--out={out}"]
            run_job(torchrun(2, "steps_rank.py", *arguments, "--strategies", "ddp", "bagua"), patience=_PATIENCE)
            samples = json.loads(out.read_text())
        for kind, unit, goal in (("steps/s", "steps/s", 0.95), ("cpu", "ms", None)):
            found, measured = samples[kind], "steps/s" if goal else "computing per step"
            yield Figure(
                name=f"gradient_allreduce on 2 ranks, {measured} over ddp ({workload})",
                value=ratio_of(found, "bagua", over="ddp"),
                goal=goal,
                better="larger",
                medians=medians_of(found),
                arm_unit=unit,
                samples=found,
                note=f"a second arm of ddp has {ratio_of(found, 'ddp again', over='ddp'):.3f}",
            )


def _link_figures(settings: Settings) -> Iterator[Figure]:
    with _two_namespaces() as namespaces:
        limit = f"rate {MEGABITS}mbit burst 64kb latency 50ms".split()
        for namespace in namespaces:
            _ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        limited = {name: _train(namespaces, name, LINK_STEPS) for name in ALGORITHMS}
        for namespace in namespaces:
            _ip("netns", "exec", namespace, "tc", "qdisc", "del", "dev", DEVICE, "root")
        unlimited = {name: _train(namespaces, name, 60 if settings.quick else LOSS_STEPS) for name in ALGORITHMS}
    for name in ALGORITHMS:
        yield Figure(
            name=f"loss of the demo GPT after {LOSS_STEPS} steps, {name}", value=unlimited[name]["loss"], unit=""
        )
        yield Figure(name=f"steps/s over {MEGABITS} Mbit/s, {name}", value=limited[name]["steps/s"], unit="/s")
        yield Figure(
            name=f"bytes sent per parameter and step, {name}",
            value=limited[name]["bytes"],
            unit=" B",
            goal=0.25 * 1.03 * limited["ddp"]["bytes"] if name in ("bytegrad", "qadam") else None,
        )


def _train(namespaces: list[str], name: str, steps: int) -> dict[str, Any]:
    """Train the demo GPT with a rank in each namespace; return what the first one has measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        ranks = []
        for rank, namespace in enumerate(namespaces):
            environ = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": DEVICE,
                "TORCHELASTIC_RUN_ID": "bagua",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29777",
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
                "GROUP_WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
            }
            program = [sys.executable, str(HERE / "bagua_rank.py"), name, str(steps), str(out)]
            ranks.append(subprocess.Popen(["ip", "netns", "exec", namespace, *program], env=environ))
        try:
            if any(rank.wait(_PATIENCE) for rank in ranks):
                raise RuntimeError(f"the ranks that train with {name} failed")
        finally:
            for rank in ranks:
                rank.kill()
        result: dict[str, Any] = json.loads(out.read_text())
    print(f"{name}, {steps} steps: {result}", flush=True)
    return result


@contextlib.contextmanager
def _two_namespaces() -> Iterator[list[str]]:
    """Yield two namespaces of the network, with the two ends of an interface."""
    names = [f"bagua-{os.getpid()}-{side}" for side in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for side, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{side + 1}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
