"""Access of a module to its Trainer: ranks, counters, loggers and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors, numbers_to_tensors
from dstrat.parallel.shards import full_value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from dstrat.training.loggers.logger import Logger
    from dstrat.training.trainer import Trainer


class TrainerAccess:
    """The part of a :class:`~dstrat.training.module.train_module.TrainModule` that reads its Trainer."""

    _trainer: Trainer | None = None  # a strong reference: modules read their Trainer after the run too

    def attach(self, trainer: Trainer | None) -> None:
        """Set the Trainer of this module and its submodules, which keep it after the run."""
        submodules: Iterable[object] = self.modules()  # type: ignore[attr-defined]  # of torch.nn.Module, beside this class
        for submodule in submodules:  # nested ones log too
            if isinstance(submodule, TrainerAccess):
                submodule._trainer = trainer  # noqa: SLF001 - of the same class

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the current or last run.

        Raises:
            MisuseError: There has been no run.
        """
        if self._trainer is None:
            raise MisuseError(f"{type(self).__name__} is not attached to a Trainer: this works in a run and after it")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self.attach(trainer)  # by users, such as in a test of a module

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh over which the strategy shards or parallelizes, from ``configure_model`` on."""
        return self.trainer.strategy.device_mesh

    @property
    def current_epoch(self) -> int:
        """Index of the epoch, from 0."""
        return self._trainer.current_epoch if self._trainer else 0

    @property
    def global_step(self) -> int:
        """Number of optimizer steps taken."""
        return self._trainer.global_step if self._trainer else 0

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return self._trainer.global_rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._trainer.local_rank if self._trainer else 0

    @property
    def logger(self) -> Any:
        """The first logger; None without one."""
        return self._trainer.logger if self._trainer else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._trainer.loggers if self._trainer else []

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once for the whole job."""
        self.trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked along a new first dimension; collective.

        Ranks that share a batch, as those that divide a model do, count once, so that each sample comes once.

        Args:
            data: A tensor, a number, or a list, tuple, dict or dataclass of them; the result has the same structure, on
                the device.  Of a DTensor each rank has the full value, without ``sync_grads``.
            group: The process group, of which all ranks count; by default all batches.
            sync_grads: Whether gradients flow back to each rank.
        """
        strategy = self.trainer.strategy
        device = strategy.root_device

        def gather(tensor: Tensor) -> Tensor:
            full = tensor if sync_grads else full_value(tensor)
            return strategy.all_gather(full.to(device), group=group, sync_grads=sync_grads)

        return apply_to_tensors(numbers_to_tensors(data, device), gather)
