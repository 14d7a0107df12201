"""Schedule of gradient accumulation by epochs."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from dstrat.errors import ConflictError, RequestError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Set the Trainer's ``accumulate_grad_batches`` at the start of some epochs.

    For example ``{0: 8, 4: 4, 8: 1}`` takes 8 batches for each optimizer step in epochs 0 to 3, 4 in epochs 4 to 7, and
    1 from epoch 8 on.

    Args:
        scheduling: Number of batches by the index of the first epoch; before the first of them it is 1.

    Raises:
        RequestError: The dict is empty, or an index or number is out of range.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "going_to_accumulate_grad_batches": "scheduling has the numbers of batches",
    }

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise RequestError("scheduling={} is empty: give numbers of batches by epoch, such as {0: 8, 4: 1}")
        for epoch, factor in scheduling.items():
            _check_count(f"the epoch {epoch!r}", epoch, 0)
            _check_count(f"the number of batches {factor!r} from epoch {epoch!r} on", factor, 1)
        self.scheduling = dict(sorted(scheduling.items()))
        self._decides = False

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches for an optimizer step in an epoch."""
        return next((self.scheduling[first] for first in reversed(self.scheduling) if first <= epoch), 1)

    def count_steps(self, batches: int, epochs: int) -> int:
        """Return the number of optimizer steps in a number of epochs, from the number of batches in each."""
        # Epochs at which the number changes; the last step of an epoch may have fewer batches.
        firsts = sorted({0, epochs, *(first for first in self.scheduling if first < epochs)})
        return sum(
            (end - first) * math.ceil(batches / self.get_accumulate_grad_batches(first))
            for first, end in itertools.pairwise(firsts)
        )

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Check that nothing else determines the accumulation.

        Raises:
            ConflictError: The Trainer, the module or the strategy does.
        """
        conflict = self._conflict(trainer, module)
        if conflict is not None:
            raise ConflictError(f"GradientAccumulationScheduler conflicts with {conflict}")
        self._decides = True

    def _conflict(self, trainer: Trainer, module: TrainModule) -> str | None:
        if trainer.accumulate_grad_batches != 1:
            return f"accumulate_grad_batches={trainer.accumulate_grad_batches!r} of the Trainer: leave one of them out"
        if not module.automatic_optimization:
            return f"the manual optimization of {type(module).__name__}: accumulate in its training_step"
        compiled = trainer.strategy.compiled_steps()
        # Strategies that run no optimizer steps, such as those with stages, leave accumulation to the Trainer.
        if trainer.strategy.accumulates_gradients or (compiled is not None and compiled.optimizer_steps):
            return f"{type(trainer.strategy).__name__}, which accumulates gradients by itself: use its own setting"
        return None

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._decides:  # not after a conflict, in which the number is the user's
            trainer.accumulate_grad_batches = 1
            self._decides = False


def _check_count(description: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{description} in scheduling must be an int of at least {least}")
