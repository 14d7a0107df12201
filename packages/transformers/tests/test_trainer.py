"""transformers' Trainer with strategies of dstrat: the losses, checkpoints and files of its own DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

pytestmark = [pytest.mark.xdist_group("hf_trainer"), pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs" / "train.py"
SAVING = {"save_strategy": "steps", "save_steps": 5}
SCENARIOS = {
    "plain": SAVING,
    "accumulated": {"gradient_accumulation_steps": 4},  # of 6 batches in an epoch
    "unclipped": {"max_grad_norm": 0.0, "max_steps": 4, "eval_strategy": "no"},
    "adapters": {"adapters": True, **SAVING},
}
STRATEGIES = ("ddp", "fsdp")


def run(folder, strategy, scenarios, devices=2):
    """Run trainings in one program, and return the folder."""
    own = strategy == "own"
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={devices}"] if own and devices > 1 else []
    folder.mkdir(exist_ok=True)
    command = [sys.executable, *start, str(PROGRAM), str(folder), strategy, str(devices), json.dumps(scenarios)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({"ACCELERATE_USE_CPU": "true"} if own else {})}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


def result(folder, name):
    return json.loads((folder / name / "result.json").read_text())


@pytest.fixture(scope="module")
def own_ddp(tmp_path_factory):
    return run(tmp_path_factory.mktemp("own"), "own", SCENARIOS)


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request):
    return request.param


@pytest.fixture(scope="module")
def trained(tmp_path_factory, strategy):
    return run(tmp_path_factory.mktemp(strategy), strategy, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_training_is_that_of_its_own_ddp(own_ddp, trained, name):
    expected, seen = result(own_ddp, name), result(trained, name)
    assert seen["world_size"] == 2
    for key in ("losses", "norms", "rates", "evaluations", "predicted", "number", "events", "first", "sum"):
        assert seen[key] == pytest.approx(expected[key], rel=1e-6), key
    assert seen["accuracy"] == expected["accuracy"]
