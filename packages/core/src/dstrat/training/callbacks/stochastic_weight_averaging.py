"""Stochastic weight averaging: the mean of the weights of the last epochs, with their own learning rates."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from torch import Tensor
from typing_extensions import override

from dstrat.data.limits import check_count
from dstrat.errors import RequestError
from dstrat.training.callbacks.weight_averaging import WeightAveraging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

Annealing = Literal["cos", "linear"]

_log = logging.getLogger(__name__)


class StochasticWeightAveraging(WeightAveraging):
    """Average the weights at the ends of the last epochs, with a constant learning rate.

    The method is that of `Izmailov et al., 2018 <https://arxiv.org/abs/1803.05407>`_.  In the averaged epochs this
    callback sets the learning rates, like ``torch.optim.swa_utils.SWALR``, and schedulers have no effect; pass it
    before a ``LearningRateMonitor``.  Statistics of batch norm are averaged like weights, not computed again.

    Args:
        swa_lrs: The final learning rate: one for all, or one for each parameter group of all optimizers in their order.
        swa_epoch_start: Number of the first averaged epoch, counted from 1, or as a float its share of ``max_epochs``:
            of 10 epochs ``8`` and ``0.8`` average the last three.
        annealing_epochs: Number of epochs of annealing to the final learning rate; 0 sets it at once.
        annealing_strategy: ``"cos"`` or ``"linear"`` annealing.
        avg_fn: The average, an argument of ``torch.optim.swa_utils.AveragedModel``; by default the mean.
        device: Device of the average; by default the module's.
        use_buffers: Whether buffers are averaged too; otherwise they are copied.

    Raises:
        RequestError: An argument is out of range.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "avg_fn": "pass avg_fn to the constructor",
        "update_parameters": "pass avg_fn to the constructor",
        "transfer_weights": "the average is module.state_dict() in validation and after the fit",
        "reset_momenta": "statistics of batch norm are averaged like weights",
        "reset_batch_norm_and_save_state": "statistics of batch norm are averaged like weights",
        "pl_module_contains_batch_norm": "statistics of batch norm are averaged like weights",
        "swa_start": "it is swa_epoch_start of the constructor",
        "swa_end": "the last averaged epoch is the last one of the training",
    }

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Annealing = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
    ) -> None:
        rates = _read_rates(swa_lrs)
        _check_start(swa_epoch_start)
        check_count(annealing_epochs, "annealing_epochs", 0)
        if annealing_strategy not in get_args(Annealing):
            raise RequestError(f"annealing_strategy={annealing_strategy!r} must be 'cos' or 'linear'")
        super().__init__(device, use_buffers, avg_fn=avg_fn)
        self._swa_lrs, self._epoch_start = rates, swa_epoch_start
        self._annealing_epochs, self._annealing_strategy = annealing_epochs, annealing_strategy
        self._first_epoch = 0

    @override
    def _begin(self) -> None:
        super()._begin()
        self._rates_before: list[float] | None = None
        self._rates: list[float] = []

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= self._first_epoch

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rates_before": self._rates_before}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._rates_before = state_dict["rates_before"]

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_fit_start(trainer, module)
        self._first_epoch = self._find_first_epoch(trainer.max_epochs)
        groups = len(_groups(trainer))
        if len(self._swa_lrs) not in (1, groups):
            raise RequestError(
                f"swa_lrs={self._swa_lrs!r} has {len(self._swa_lrs)} learning rates, and the optimizers have {groups} "
                "parameter groups: give one for each, or one for all"
            )

    def _find_first_epoch(self, max_epochs: int) -> int:
        if isinstance(self._epoch_start, int):
            return self._epoch_start - 1
        if max_epochs < 0:
            raise RequestError(
                f"swa_epoch_start={self._epoch_start!r} is a fraction of max_epochs, which is not limited: "
                "set max_epochs, or give the number of an epoch as an int"
            )
        return max(0, int(self._epoch_start * max_epochs) - 1)

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        epochs = trainer.current_epoch - self._first_epoch
        if epochs < 0:
            return
        if self._rates_before is None:
            self._rates_before = [float(group["lr"]) for group in _groups(trainer)]
            if trainer.strategy.lr_schedulers and trainer.is_global_zero:
                _log.warning(
                    "from epoch %d on StochasticWeightAveraging sets the learning rates, and schedulers have no effect",
                    trainer.current_epoch + 1,
                )
        share = self._share_of_new(epochs)
        before = self._rates_before
        after = self._swa_lrs * len(before) if len(self._swa_lrs) == 1 else self._swa_lrs
        self._rates = [new * share + old * (1 - share) for old, new in zip(before, after, strict=True)]
        if not trainer.fit_loop.batches_done:  # in a resume within the epoch the next batch sets them, as in each batch
            self._set_rates(trainer)

    def _share_of_new(self, epochs: int) -> float:
        """Return the share of the final learning rate, from the number of epochs since the first averaged one."""
        progress = min(1.0, epochs / self._annealing_epochs) if self._annealing_epochs else 1.0
        return progress if self._annealing_strategy == "linear" else (1 - math.cos(math.pi * progress)) / 2

    @override
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._rates:  # a scheduler with interval "step" may have changed them
            self._set_rates(trainer)

    def _set_rates(self, trainer: Trainer) -> None:
        for group, rate in zip(_groups(trainer), self._rates, strict=True):
            if isinstance(group["lr"], Tensor):  # in place: a captured or compiled step reads this tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _read_rates(swa_lrs: float | Sequence[float]) -> list[float]:
    rates = list(swa_lrs) if isinstance(swa_lrs, Sequence) else [swa_lrs]
    if not rates or not all(map(_is_rate, rates)):
        raise RequestError(
            f"swa_lrs={swa_lrs!r} must be a number above 0, or a list of such numbers, one for each parameter group"
        )
    return rates


def _check_start(start: object) -> None:
    is_number = isinstance(start, int) and not isinstance(start, bool) and start >= 1
    is_fraction = isinstance(start, float) and 0 <= start <= 1
    if not (is_number or is_fraction):
        raise RequestError(
            f"swa_epoch_start={start!r} must be the number of an epoch as an int of at least 1, or a fraction of "
            "max_epochs as a float from 0.0 to 1.0"
        )


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.strategy.optimizers for group in optimizer.param_groups]
