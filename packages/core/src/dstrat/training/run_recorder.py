"""Record of a run, for ``dstrat runs``, ``plot`` and ``report``."""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from dstrat.launch.failures import describe_failure
from dstrat.launch.run_record import append_event, link_record, this_process, unlink_record
from dstrat.training.loops.stopping import Interrupted, Terminated

if TYPE_CHECKING:
    from dstrat.training.run import Run

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_EPOCHS = 1.0  # shorter epochs are not recorded one by one
# Of users, without those that hold the state of a job.
_VARIABLES = ("DSTRAT_PREFER", "DSTRAT_DISABLE", "CUDA_", "OMP_NUM_THREADS", "NCCL_", "PYTORCH_", "SLURM_JOB_ID")


class RunRecorder:
    """Writer of a run's record on global rank 0; the file is in the folder of the first logger that has one.

    It has an event for the begin with plan, arguments and environment, for epochs that take longer than a second, for
    each checkpoint, and for the end with memory and times of phases.  A step costs nothing.  A file that cannot be
    written is logged, and ends no run.

    Args:
        log_dir: The log folder.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir: Path | None = log_dir
        self._next_epoch = 0.0
        self._results: dict[str, Any] = {}

    def begin(self, run: Run) -> None:
        """Write the begin of a run."""
        attempt = run.attempt
        self._write(
            "begin",
            stage=run.stage,
            attempt=1 if attempt is None else attempt.number,
            process=this_process(),
            module=type(run.module).__name__,
            plan=run.plan.to_dict(),
            arguments=run.trainer.arguments,
            monitor=_monitored(run),
            metrics=self._relative(next((each.metrics_file for each in run.loggers if each.metrics_file), None)),
            command=sys.argv,
            environment=_environment(run),
        )
        if self._log_dir is not None:
            link_record(self._log_dir)

    def note_epoch(self, run: Run) -> None:
        """Write the begin of an epoch, from which readers compute the throughput."""
        now = monotonic()
        if now >= self._next_epoch:
            self._next_epoch = now + _SECONDS_BETWEEN_EPOCHS
            self._write("epoch", epoch=run.fit_loop.epoch, step=run.fit_loop.global_step)

    def note_checkpoint(self, run: Run, path: str) -> None:
        """Write that a checkpoint was saved."""
        name = self._relative(Path(path)) if os.path.isabs(path) else path  # noqa: PTH117 - may be a URL
        self._write("checkpoint", path=name, step=run.fit_loop.global_step, seconds=round(run.save_seconds, 3))

    def note_results(self, run: Run, memory: list[dict[str, int]]) -> None:
        """Keep the results of a completed run for its end, before the strategy frees anything."""
        values = run.metrics.as_numbers(run.metrics.callback_values)
        self._results = {"memory": memory, "metrics": values}

    def end(self, run: Run, status: str, exception: BaseException | None = None) -> None:
        """Write the end of a run: completed, failed or interrupted."""
        if run.is_fitting:
            self._results |= {"step": run.fit_loop.global_step, "epochs": run.fit_loop.epochs_done}
        if status == "failed" and exception is not None:
            failure = describe_failure(exception)
            self._results |= {"error": failure.headline, "traceback": failure.traceback}
        elif isinstance(exception, Interrupted | Terminated):
            self._results["error"] = signal.Signals(exception.signal).name
        phases = {} if run.profiler is None else run.profiler.totals()
        self._write("end", status=status, phases=phases, **self._results)
        if status == "completed":
            unlink_record()  # a later failure of the script is not one of this run

    def _write(self, kind: str, **values: Any) -> None:
        if self._log_dir is None:
            return
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)  # a logger of the user may not have made it
            append_event(self._log_dir, kind, **values)
        except OSError as error:
            _log.warning("the record of this run in %s ends here: %s", self._log_dir, error)
            self._log_dir = None

    def _relative(self, path: Path | None) -> str | None:
        """Return a path relative to the log folder if it is below that, so that the folder may be moved."""
        if path is None or self._log_dir is None:
            return None
        try:
            return str(path.absolute().relative_to(self._log_dir.absolute()))
        except ValueError:
            return str(path.absolute())


def begin_record(run: Run) -> None:
    """Begin the record of a run on global rank 0, if a logger has a folder."""
    run.host_memory = _largest_host_memory()
    if run.log_dir is not None and run.is_global_zero:
        run.recorder = RunRecorder(Path(run.log_dir))
        run.recorder.begin(run)
        run.hooks.insert("on_train_epoch_start", partial(run.recorder.note_epoch, run))


def record_results(run: Run) -> None:
    """Record memory and values of a run at its end; collective."""
    if run.log_dir is None:
        return
    memory = _memory_of_ranks(run)
    if run.recorder is not None:
        run.recorder.note_results(run, memory)


def _memory_of_ranks(run: Run) -> list[dict[str, int]]:
    """Return the largest memory of each rank in bytes, on its device and of its process; collective."""
    strategy = run.strategy
    stats = strategy.accelerator.get_device_stats(strategy.root_device)
    on_device = max((value for name, value in stats.items() if name.startswith("max_memory")), default=0.0)
    sizes = [on_device, float(_largest_host_memory()), float(run.host_memory)]
    # float32 is exact to a part in 16 million, and exists on all hardware.
    local = torch.tensor(sizes, dtype=torch.float32, device=strategy.root_device)
    rows = [local.tolist()] if strategy.world_size == 1 else strategy.gather_from_processes(local).tolist()
    return [{"device": int(device), "host": int(host), "host_before": int(before)} for device, host, before in rows]


def _largest_host_memory() -> int:
    """Return the largest memory of this process until now, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return 0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def _monitored(run: Run) -> dict[str, str] | None:
    """Return name and mode of the value that ranks checkpoints; None without one."""
    for callback in run.checkpoint_callbacks:
        if name := getattr(callback, "monitor", None):
            return {"name": name, "mode": str(getattr(callback, "mode", "min"))}
    return None


def _environment(run: Run) -> dict[str, Any]:
    strategy = run.strategy
    module = getattr(torch, strategy.root_device.type, None)  # not every backend registers one
    name = getattr(module, "get_device_name", None)  # of GPUs and their like
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "dstrat": version("dstrat"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": os.cpu_count(),
        "device": str(strategy.root_device)
        if name is None
        else f"{strategy.root_device} ({name(strategy.root_device)})",
        "runtime": strategy.accelerator.describe(),
        "folder": str(Path.cwd()),
        "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith(_VARIABLES)},
    }
