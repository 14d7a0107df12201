"""Strategy of a program whose loop is that of another library: transformers' Trainer, or one with Accelerate."""

from __future__ import annotations

import atexit
import copy
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.resolve import Request, resolve_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.accelerator import Devices
    from dstrat.interfaces.strategy import Strategy
    from dstrat.parallel.strategy import ParallelStrategy

_PRECISIONS = {"no": None, "bf16": "bf16-mixed"}  # of Accelerate, and dstrat's flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The strategy that a program has selected, in one of its processes, whose communication is open.

    Attributes:
        request: The strategy, hardware and devices.
        world_size: Number of processes.
    """

    request: Request
    world_size: int

    def make_strategy(self, mixed_precision: str) -> Strategy:
        """Return a new strategy of this session, with its environment set up; collective.

        Each training has one, as a strategy has the state of one module.

        Args:
            mixed_precision: Accelerate's name of a precision: ``"no"`` or ``"bf16"``.

        Raises:
            RequestError: There is no such precision, or the strategy cannot have it.
            ConflictError: The strategy runs optimizer steps by itself.
        """
        if mixed_precision not in _PRECISIONS:
            raise RequestError(
                f"mixed_precision={mixed_precision!r} is not possible with a strategy of dstrat, as Accelerate does "
                "not know of the steps that a loss scale skips: choose 'bf16' or 'no'"
            )
        selected: Any = self.request.strategy
        selected = selected if isinstance(selected, str) else copy.copy(selected)  # which other trainings use too
        request = replace(self.request, strategy=selected, precision=_PRECISIONS[mixed_precision])
        _, strategy = resolve_request(request)
        strategy.setup_environment()
        compiled = strategy.compiled_steps()
        if strategy.accumulates_gradients or (compiled is not None and compiled.optimizer_steps > 0):
            raise ConflictError(
                f"{type(strategy).__name__} runs whole optimizer steps, which another library's loop takes apart: use "
                "dstrat.Trainer with it, or choose another strategy"
            )
        return strategy


_session: Session | None = None  # of the process: the objects of other libraries cannot pass it on


def current_session() -> Session:
    """Return the session of this process.

    Raises:
        MisuseError: The program has not selected a strategy.
    """
    if _session is None:
        raise MisuseError(
            "no strategy has been selected: call dstrat_transformers.use('fsdp', devices=2), or another one, at the "
            "top of the program"
        )
    return _session


def use(
    strategy: str | Strategy = "auto",
    *,
    accelerator: Any = "auto",
    devices: Devices = "auto",
    num_nodes: int = 1,
    max_restarts: int = 0,
) -> None:
    """Select the strategy of this program, and start its processes; call it once, before anything else.

    ``python program.py`` starts the program once more in each process, and this process supervises them: the call
    returns in these only.  In processes that exist, as of ``torchrun`` or ``accelerate launch``, it returns at once.
    Afterwards communication is open, and Accelerate takes it over, with :class:`DstratTrainer` and
    :class:`DstratAccelerator`.  The precision is theirs, such as ``TrainingArguments(bf16=True)``.

    Args:
        strategy: How training is distributed, by alias, such as ``"ddp"`` or ``"mesh(tp=2)"``, or as a Strategy.
        accelerator: Hardware by alias (``"cpu"``, ``"gpu"``, ``"auto"`` ...) or as an Accelerator.
        devices: Number of devices of each machine: ``4``, ``-1``, ``"auto"``.
        num_nodes: Number of machines.
        max_restarts: How often all processes are started again after one of them has failed.

    Raises:
        MisuseError: It was called before.
        RequestError: The request is not possible; the message says what is.
        ConflictError: The strategy cannot run the loop of another library.
    """
    if _session is not None:
        raise MisuseError("use was called twice, and the processes of a program have one strategy: call it once")
    request = Request(
        strategy=strategy, accelerator=accelerator, devices=devices, num_nodes=num_nodes, max_restarts=max_restarts
    )
    plan, selected = resolve_request(request)
    name = type(selected).__name__
    if selected.drives_several_devices or (plan.world_size > 1 and not selected.uses_torch_distributed):
        raise ConflictError(
            f"{name} does not communicate through torch.distributed with one process for each device, as Accelerate "
            "does: use dstrat.Trainer with it, or choose another strategy"
        )
    if selected.steps_with_other_jobs:
        raise ConflictError(
            f"{name} trains together with other jobs, and another library's loop divides the data among the processes "
            "of one job, so that all jobs would train on the same samples: use dstrat.Trainer or dstrat.OwnLoop with "
            "it, or choose another strategy"
        )
    launcher = selected.launcher
    if launcher is None:
        _begin(request, selected)
        return
    if not (launcher.runs_here or launcher.reruns_the_script):
        raise ConflictError(
            f"start_method={plan.start_method!r} runs one function in new processes, and use needs processes that run "
            "the program: leave it out, or start the program with torchrun"
        )
    launcher.launch(_begin, request, selected)


def _begin(request: Request, selected: Strategy) -> None:
    """Open communication in this process, and tell Accelerate of it."""
    global _session  # noqa: PLW0603 - as above
    selected.accelerator.setup(selected.assigned_device)
    if selected.uses_torch_distributed:
        _open_communication(selected)  # type: ignore[arg-type]  # what uses torch.distributed derives from it
    if selected.root_device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # which it otherwise takes from TrainingArguments(use_cpu=True)
    _session = Session(request=request, world_size=selected.world_size)


def _open_communication(selected: ParallelStrategy) -> None:
    from dstrat.launch.progress import watched_for_hangs
    from dstrat.parallel.process_group import open_process_group

    device, cluster = selected.root_device, selected.cluster_environment
    if device.index not in (None, selected.local_rank):
        raise RequestError(
            f"local rank {selected.local_rank} has the device {device}, and Accelerate counts devices as ranks: give "
            "a number of devices, and select them by the variable that hides the others, such as CUDA_VISIBLE_DEVICES"
        )
    backend = selected.process_group_backend or selected.accelerator.process_group_backend
    if device.type != "cpu" and ":" not in backend:
        backend = f"cpu:gloo,{device.type}:{backend}"  # a strategy that offloads reduces on the CPU, too
    open_process_group(cluster, backend=backend, timeout=selected.timeout, device=device)
    variables: Mapping[str, Any] = {
        "RANK": selected.global_rank,
        "WORLD_SIZE": selected.world_size,
        "LOCAL_RANK": selected.local_rank,
        "LOCAL_WORLD_SIZE": len(selected.parallel_devices),
        "MASTER_ADDR": cluster.main_address,
        "MASTER_PORT": cluster.main_port,
    }
    if selected.world_size > 1:  # a single process that nothing has launched has no port
        for name, value in variables.items():  # set already by torchrun and by dstrat, not by a scheduler
            os.environ.setdefault(name, str(value))
    watch = ExitStack()
    watch.enter_context(watched_for_hangs(selected))
    atexit.register(watch.close)
