"""``dstrat doctor``: diagnosis of whether training would work here."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dstrat.cli.components import loaded_catalog
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.errors import AmbiguousAliasError, DstratError, MissingRequirementError
from dstrat.launch.job import JOB_VARIABLE
from dstrat.plugins.component import KINDS, NO_BACKEND
from dstrat.plugins.offer import kind_label
from dstrat.plugins.settings import DISABLE, normalized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer, Plugin


_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


FindingState = Literal["ok", "note", "problem"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the report.

    Attributes:
        subject: The subject of the check.
        text: The result, and what to do about it.
        state: ``"ok"``; ``"note"`` if it may explain a surprise; ``"problem"`` if something will not work.
    """

    subject: str
    text: str
    state: FindingState = "ok"


@click.command(short_help="Check whether training would work here.")
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Time limit of the all-reduce.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, seconds: float, as_json: bool) -> None:
    """Check versions, devices, ranks, plugins, an all-reduce and leftovers; exit with 1 if there is a problem."""
    findings = list(_findings(seconds))
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        print_table([(_MARKS[finding.state], finding.subject, finding.text) for finding in findings])
    ctx.exit(1 if any(finding.state == "problem" for finding in findings) else 0)


def _findings(seconds: float) -> Iterator[Finding]:
    from rich.console import Console

    catalog = loaded_catalog()
    yield from check_plugins(catalog)
    yield from check_versions(catalog)
    yield from check_devices(catalog)
    yield from check_evidence(catalog, os.environ)
    with Console(stderr=True).status("two processes add their numbers ..."):  # shown in terminals only
        yield from check_all_reduce(seconds)
    yield from check_leftovers()


# Plugins that fail or are slow, and components that cannot be used


_SLOW = 0.1  # seconds; a plugin is a few lines


def check_plugins(catalog: Catalog) -> Iterator[Finding]:
    """Yield broken, disabled and slow plugins, and components that cannot be used as they are."""
    offers = [offer for kind in KINDS for offer in catalog.offers(kind)]
    findings = [
        *_about_settings(catalog),
        *(finding for plugin in catalog.plugins for finding in _about_plugin(plugin)),
        *_merged(finding for offer in offers for finding in _about_offer(offer, catalog)),
    ]
    yield from findings
    if not findings:
        yield Finding(subject="plugins", text=f"all {len(catalog.plugins)} work, with {len(offers)} components")


def _about_settings(catalog: Catalog) -> Iterator[Finding]:
    absent = catalog.settings.disabled - {normalized(plugin.distribution) for plugin in catalog.plugins}
    if absent:
        text = f"names distributions without an installed plugin: {', '.join(sorted(absent))}"
        yield Finding(subject=DISABLE, text=text, state="note")


def _about_plugin(plugin: Plugin) -> Iterator[Finding]:
    if plugin.is_broken:
        yield Finding(subject=plugin.label, text=f"{plugin.state}: {plugin.reason}", state="problem")
    elif plugin.state == "disabled":
        yield Finding(subject=plugin.label, text=f"disabled: {plugin.reason}", state="note")
    elif plugin.imported_torch:
        text = "its plugin module imports torch, which makes every listing slow"
        yield Finding(subject=plugin.label, text=text, state="note")
    elif plugin.seconds > _SLOW:
        text = f"its plugin module took {plugin.seconds:.2f} s to load, which makes every listing slow"
        yield Finding(subject=plugin.label, text=text, state="note")


def _about_offer(offer: Offer, catalog: Catalog) -> Iterator[Finding]:
    subject = f"{kind_label(offer.component.kind)} {offer.component.alias}"
    try:
        catalog.find(offer.component.kind, offer.component.alias)
        catalog.check_requirements(offer)
        catalog.load(offer)
    except (AmbiguousAliasError, MissingRequirementError) as error:  # no problem until a user asks for it
        text = str(error).removeprefix(f"{offer.title} ")  # the same for all components with this cause
        yield Finding(subject=subject, text=f"{offer.owner_label} {text}" if text != str(error) else text, state="note")
    except DstratError as error:
        yield Finding(subject=subject, text=str(error), state="problem")


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield one finding for components with the same text and state, such as for a package that they all need."""
    subjects: dict[tuple[str, FindingState], dict[str, None]] = {}  # each name once, also of an alias with two owners
    for finding in findings:
        subjects.setdefault((finding.text, finding.state), {})[finding.subject] = None
    for (text, state), names in subjects.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Finding(subject=f"{next(iter(names))}{more}", text=text, state=state)


# Installed versions


def check_versions(catalog: Catalog) -> Iterator[Finding]:
    """Yield the versions of Python, torch and the distributions that offer components."""
    yield Finding(subject="python", text=f"{platform.python_version()} on {platform.platform()}")
    yield _torch()
    distributions = {plugin.label for plugin in catalog.plugins}
    yield Finding(subject="distributions", text=", ".join(sorted(distributions)))


def _torch() -> Finding:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001 - a torch that does not fit the machine raises many things
        text = f"cannot be imported ({type(error).__name__}: {error}): reinstall it"
        return Finding(subject="torch", text=text, state="problem")
    if not dist.is_available():
        text = f"{torch.__version__} without torch.distributed: only strategies of one process work"
        return Finding(subject="torch", text=text, state="note")
    tests = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    backends = [name for name, is_available in tests.items() if is_available()]
    return Finding(subject="torch", text=f"{torch.__version__}, backends {', '.join(backends) or 'none'}")


# Devices of each accelerator


def check_devices(catalog: Catalog) -> Iterator[Finding]:
    """Yield the devices that each accelerator finds."""
    for offer in catalog.offers("accelerator"):
        try:
            catalog.check_requirements(offer)
            cls = catalog.load(offer)
        except DstratError:  # check_plugins has reported it
            continue
        yield _check_accelerator(cls, offer)


def _check_accelerator(cls: type[Accelerator], offer: Offer) -> Finding:
    subject = f"accelerator {offer.component.alias}"
    try:
        return Finding(subject=subject, text=_describe_devices(cls(**offer.component.options)))
    except DstratError as error:
        return Finding(subject=subject, text=str(error), state="problem")
    except Exception as error:  # noqa: BLE001 - a driver that does not fit raises many things
        text = f"{offer.owner_label} raised {type(error).__name__}: {error}"
        return Finding(subject=subject, text=text, state="problem")


def _describe_devices(accelerator: Accelerator) -> str:
    if not accelerator.is_available():
        hint = accelerator.hint_unavailable()
        return f"not on this machine: {hint}" if hint else "not on this machine"
    indices = accelerator.parse_devices("auto")
    devices = ", ".join(str(device) for device in accelerator.get_parallel_devices(indices))
    backend = accelerator.process_group_backend
    collectives = "no collectives between processes" if backend == NO_BACKEND else f"collectives by {backend}"
    by_default = f"{len(indices)} by default ({devices}), {collectives}"
    description = accelerator.describe()
    return f"{by_default}; {description}" if description else by_default


# Evidence of launchers and schedulers in the environment


def check_evidence(catalog: Catalog, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the cluster environments that find evidence of themselves, with the position that they read from it."""
    findings = [
        finding for offer in catalog.offers("cluster_environment") for finding in _seen(offer, catalog, environ)
    ]
    yield from findings or [Finding(subject="environment", text="nothing else has started this process")]


def _seen(offer: Offer, catalog: Catalog, environ: Mapping[str, str]) -> Iterator[Finding]:
    alias = offer.component.alias
    try:
        cls = catalog.load(offer)
        evidence = cls.evidence(environ)
        if evidence is not None:
            cluster = cls(environ, **offer.component.options)
            position = f"rank {cluster.global_rank} of {cluster.world_size}, machine {cluster.node_rank}"
            yield Finding(subject=alias, text=f"{evidence}: {position}", state="note")
    except DstratError as error:
        yield Finding(subject=alias, text=str(error), state="problem")
    except Exception as error:  # noqa: BLE001 - variables that were set by hand may hold anything
        text = f"{offer.owner_label} raised {type(error).__name__}: {error}"
        yield Finding(subject=alias, text=text, state="problem")


# All-reduce between two processes of this machine


_RANKS = 2
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL


def check_all_reduce(seconds: float) -> Iterator[Finding]:
    """Start two ranks that add their numbers, and yield whether the sum is right within the time limit in seconds."""
    subject = f"all-reduce on {_RANKS} processes"
    started = time.monotonic()
    # In a process of its own, which can be killed at the limit if the start hangs.
    process = subprocess.Popen(  # noqa: S603 - this interpreter and module
        [sys.executable, "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its group is that of the supervisor and its ranks, for killpg
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        text = f"no result after {seconds:g} s: the loopback is blocked, or the start is slow (try a longer --seconds)"
        yield Finding(subject=subject, text=text, state="problem")
        return
    if process.returncode == 0:
        yield Finding(subject=subject, text=f"works with gloo, in {time.monotonic() - started:.1f} s")
    else:
        *_, last = ["", *errors.splitlines()]  # _main writes the reason last
        yield Finding(subject=subject, text=f"failed with exit code {process.returncode}: {last}", state="problem")


def _end(process: subprocess.Popen[str]) -> None:
    """Let the supervisor end its ranks, or kill it with them."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _sum_of_ranks() -> float:
    """Return the sum of all ranks, counted from 1; runs in each rank."""
    import torch

    from dstrat.builtin.clusters.local import LocalEnvironment
    from dstrat.parallel.collectives import reduce_tensor
    from dstrat.parallel.process_group import close_process_group, open_process_group

    cluster = LocalEnvironment()
    open_process_group(cluster, backend="gloo", timeout=timedelta(seconds=60))
    total = reduce_tensor(torch.tensor(cluster.global_rank + 1.0), reduce_op="sum")
    close_process_group()
    return float(total)


def _main() -> None:
    from dstrat.errors import DstratError
    from dstrat.launch.local import LocalLauncher

    expected = float(sum(range(1, _RANKS + 1)))
    try:
        total = LocalLauncher(num_processes=_RANKS, start_method="spawn").launch(_sum_of_ranks)
    except DstratError as error:
        sys.exit(str(error).partition("\n")[0])  # the other lines are the rank's traceback
    if total != expected:
        sys.exit(f"the sum was {total}, and should have been {expected}")


# Orphan processes and stale folders of earlier jobs


_PROC = Path("/proc")
_FOLDER_PREFIX = "dstrat-job-"  # as in launch/job.py
_WATCHDOG = "dstrat-watchdog"  # as in launch/signals.py: it lives as long as its job; its last argument is the folder

_PAUSE = 0.5  # seconds between two looks
_MAX_COMMAND = 60  # characters of a command line in a finding


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    pid: int
    arguments: tuple[str, ...]
    job: str | None


def check_leftovers() -> Iterator[Finding]:
    """Yield processes and folders of jobs that are over."""
    if not _PROC.is_dir():
        yield Finding(subject="leftovers", text="are not looked for on this platform", state="note")
        return
    first = _leftovers()
    if not any(first):
        yield Finding(subject="leftovers", text="none")
        return
    time.sleep(_PAUSE)  # a job that began or ended during the first look is gone from the second
    second = _leftovers()
    for pid, command in sorted(first[0] & second[0]):
        text = f"of a job that is over ({command[:_MAX_COMMAND]}): kill {pid}"
        yield Finding(subject=f"process {pid}", text=text, state="problem")
    folders = sorted(first[1] & second[1])
    if folders:
        text = f"{len(folders)} of jobs that are over: rm -r {' '.join(folders)}"
        yield Finding(subject="folders", text=text, state="note")


def _leftovers() -> tuple[set[tuple[int, str]], set[str]]:
    """Return the processes and the folders that belong to a job without a watchdog."""
    folders = {str(folder) for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*")}
    processes = list(_readable_processes())
    running = {process.arguments[-1] for process in processes if _WATCHDOG in process.arguments}
    orphans = {
        (process.pid, " ".join(process.arguments))
        for process in processes
        if process.job is not None and process.job not in running
    }
    return orphans, folders - running


def _readable_processes() -> Iterator[_Process]:
    """Yield this user's processes."""
    for folder in _PROC.glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # of another user, or ended meanwhile
            continue
        variables = dict(item.partition("=")[::2] for item in environ)
        yield _Process(pid=int(folder.name), arguments=tuple(arguments), job=variables.get(JOB_VARIABLE))


if __name__ == "__main__":
    _main()
