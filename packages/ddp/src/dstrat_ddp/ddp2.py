"""Training with one process per machine: replicas inside it, DistributedDataParallel between machines."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.parallel.step_module import StepModule
from dstrat_ddp.data_parallel import replicated
from dstrat_ddp.strategy import DDPStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dstrat.interfaces.communication import CommunicationLayout
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.strategy import StepName, TrainerLike


class DDP2Strategy(DDPStrategy):
    """Training that behaves like DataParallelStrategy inside a machine and like DDPStrategy between machines.

    It starts no processes: start one per machine, with torchrun or a scheduler.

    Args:
        *args: As for DDPStrategy.
        **kwargs: As for DDPStrategy, but for ``start_method``.

    Raises:
        MisuseError: A start method is given.
    """

    start_method = None
    drives_several_devices = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "start_method" in kwargs:
            raise MisuseError("DDP2Strategy takes no start_method, as it starts no processes: start one per machine")
        super().__init__(*args, **kwargs)
        self.start_method = None  # DDPStrategy has set its default

    @property
    def assigned_device(self) -> torch.device:
        return self.parallel_devices[0]

    @property
    def driven_devices(self) -> tuple[torch.device, ...]:
        return self.parallel_devices

    @property
    def device_ids(self) -> None:
        """None: the batch is not moved to one device before it is split."""
        return

    @property
    def processes_per_machine(self) -> int:
        return 1

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:  # noqa: ARG002 - inside a process, no collective
        return None

    def wrap_model(self, trainer: TrainerLike) -> None:
        self._replicas = replicated(StepModule(self.module), self.parallel_devices)
        super().wrap_model(trainer)

    def configure_ddp(self) -> None:
        """Replace :attr:`model` by its replicas, in a wrapper that averages gradients between machines."""
        self.model = replicated(self.model, self.parallel_devices)
        super().configure_ddp()

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name != "training_step":  # DistributedDataParallel runs that in the replicas
            step = partial(self._replicas, step)
        return super().run_step(name, step, *args, **kwargs)
