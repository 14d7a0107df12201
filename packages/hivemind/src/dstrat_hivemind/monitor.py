"""Progress of a collaboration, written to the loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import MisuseError
from dstrat.training.callbacks.callback import Callback
from dstrat_hivemind.strategy import HivemindStrategy

if TYPE_CHECKING:
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class CollaborationMonitor(Callback):
    """Logs the collaboration's epoch, its peers, their samples in the epoch, and failed averagings, in each step.

    Names are ``collaboration/epoch``, ``collaboration/peers``, ``collaboration/samples`` and
    ``collaboration/failed_averagings``.

    Raises:
        MisuseError: The Trainer has another strategy.
    """

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if not isinstance(trainer.strategy, HivemindStrategy):
            raise MisuseError(
                "CollaborationMonitor logs values of HivemindStrategy, and the strategy is "
                f"{type(trainer.strategy).__name__}: leave the callback out, or choose HivemindStrategy"
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HivemindStrategy)  # noqa: S101 - checked in setup
        module.log_dict(
            {
                "collaboration/epoch": float(strategy.collaboration_epoch),
                "collaboration/peers": float(strategy.num_peers),
                "collaboration/samples": float(strategy.num_samples),
                "collaboration/failed_averagings": float(strategy.num_failed_averagings),
            }
        )
