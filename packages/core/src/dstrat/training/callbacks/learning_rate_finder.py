"""Search for a learning rate by a range test."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from dstrat.training.loops.sources import DataSources
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

Mode = Literal["exponential", "linear"]

_ATTRIBUTES = ("lr", "learning_rate")
_SMOOTHING = 0.98

_log = logging.getLogger(__name__)


class LearningRateCurve:
    """Losses over learning rates that increase from step to step.

    Attributes:
        results: ``"lr"``, the rates in the order of the steps, and ``"loss"``, the smoothed losses.
        mode: ``"exponential"`` or ``"linear"`` increase.
        lr_min: The first rate.
        lr_max: The last rate.
        num_training: Number of requested steps; a search that diverges has fewer results.
    """

    def __init__(self, mode: Mode, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss decreases fastest; None if there are too few points.

        Of rates that grow exponentially it is the loss over their logarithm.

        Args:
            skip_begin: Number of points to ignore at the beginning.
            skip_end: Number of points to ignore at the end.
        """
        index = self._steepest(skip_begin, skip_end)
        if index is None:
            _log.error(
                "no learning rate is suggested, as there are not enough finite losses: %d steps were recorded, and the "
                "first %d and the last %d of them are skipped; raise num_training, or lower max_lr",
                *(len(self.results["loss"]), skip_begin, skip_end),
            )
            return None
        return self.results["lr"][index]

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        losses = self.results["loss"]
        considered = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        if len(considered) < 2:
            return None
        points = torch.tensor([losses[i] for i in considered])
        rates = torch.tensor([self.results["lr"][i] for i in considered], dtype=torch.float64)
        # As the curve is drawn: by a change of a tiny rate itself, the noise of the loss would be the steepest fall.
        spacing = rates.log() if self.mode == "exponential" else rates
        (slopes,) = torch.gradient(points, spacing=[spacing])
        return considered[int(torch.argmin(slopes))]

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Any:
        """Plot the losses over the rates with matplotlib, and return the figure.

        Args:
            suggest: Whether to mark the suggested rate.
            show: Whether to show the figure at once.
            ax: The axes; by default those of a new figure.

        Raises:
            MisuseError: matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise MisuseError("plot needs matplotlib, which is not installed: pip install matplotlib") from error
        axes = plt.subplots()[1] if ax is None else ax
        axes.plot(self.results["lr"], self.results["loss"])
        axes.set(xlabel="learning rate", ylabel="loss", xscale="log" if self.mode == "exponential" else "linear")
        index = self._steepest(10, 1) if suggest else None
        if index is not None:
            axes.plot(self.results["lr"][index], self.results["loss"][index], "ro", markersize=10)
        if show:
            plt.show()
        return axes.figure


class LearningRateFinder(Callback):
    """Search for a good learning rate before a fit.

    A copy of the module is trained for some steps with increasing rates.  The fit then starts unchanged, with the rate
    at which the loss decreased fastest.  ``configure_optimizers`` must read the rate from the attribute or
    hyperparameter.  A fit that resumes from ``ckpt_path`` keeps its rate, without a search.

    Args:
        min_lr: The first rate.
        max_lr: The last rate.
        num_training_steps: Number of optimizer steps.
        mode: ``"exponential"`` or ``"linear"`` increase.
        early_stop_threshold: Ratio of the smoothed loss to the best one at which the search ends; None is no limit.
        update_attr: Whether to set the module's attribute to the suggested rate.
        attr_name: The attribute of the module or of its ``hparams``; by default ``lr`` or ``learning_rate``.

    Attributes:
        optimal_lr: The result, a :class:`LearningRateCurve`; None before a search.

    Raises:
        RequestError: An argument is out of range.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "lr_find": "it searches before a fit, and not in hooks of one: Tuner(trainer).lr_find(module)",
    }

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: Mode = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        _check_range(min_lr, max_lr, num_training_steps, mode)
        self._range = {"min_lr": min_lr, "max_lr": max_lr, "num_training": num_training_steps, "mode": mode}
        self._early_stop_threshold = early_stop_threshold
        self._update_attr, self._attr_name = update_attr, attr_name
        self.optimal_lr: LearningRateCurve | None = None

    @override
    def on_before_fit(self, trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
        self.optimal_lr = find_learning_rate(
            trainer,
            module,
            sources,
            **self._range,  # type: ignore[arg-type]  # they have the arguments' types
            early_stop_threshold=self._early_stop_threshold,
            update_attr=self._update_attr,
            attr_name=self._attr_name,
        )


def find_learning_rate(
    trainer: Trainer,
    module: TrainModule,
    sources: DataSources,
    *,
    min_lr: float,
    max_lr: float,
    num_training: int,
    mode: Mode,
    early_stop_threshold: float | None,
    update_attr: bool,
    attr_name: str,
) -> LearningRateCurve | None:
    """Run Leslie Smith's range test (https://arxiv.org/abs/1506.01186) with a copy of a module.

    The arguments are those of :class:`LearningRateFinder`, and the following run.

    Returns:
        The losses over the rates; None with ``fast_dev_run``.

    Raises:
        MisuseError: The module has no attribute for the rate, or not exactly one optimizer.
        RequestError: An argument is out of range.
    """
    # Here, since this module imports the Trainer.
    from dstrat.training.callbacks.trial import (
        TrialTrainer,
        copy_module,
        restored_random_state,
        run_trial,
        set_attribute,
    )

    _check_range(min_lr, max_lr, num_training, mode)
    if trainer.fast_dev_run:
        _log.warning("no learning rate is searched with fast_dev_run")
        return None
    attribute = _attribute(module, attr_name) if update_attr else ""  # an error comes before the search
    curve = LearningRateCurve(mode, min_lr, max_lr, num_training)
    test = _RangeTest(curve, early_stop_threshold)
    with restored_random_state(sources.passed("train")):
        trial = TrialTrainer(
            trainer,
            test,
            max_steps=num_training,
            limit_train_batches=trainer.limit_train_batches,
            limit_val_batches=0,
        )
        run_trial(trial, "fit", copy_module(module, "the search for a learning rate"), sources)
    if trainer.is_global_zero and len(curve.results["lr"]) < num_training:
        _log.info("the search for a learning rate ended after %d steps: the loss diverges", len(curve.results["lr"]))
    suggested = curve.suggestion() if update_attr else None
    if suggested is not None:
        set_attribute(attribute, suggested, module)
        if trainer.is_global_zero:
            # Python shows warnings, but no infos, of a program that has not configured logging.
            _log.warning(
                "%s of %s is %.3g now, where the loss fell fastest in %d steps",
                *(attribute, type(module).__name__, suggested, len(curve.results["lr"])),
            )
    return curve


class _RangeTest(Callback):
    """The callback of a trial that sets the rate before each step, and records the loss."""

    def __init__(self, curve: LearningRateCurve, early_stop_threshold: float | None) -> None:
        self._curve, self._threshold = curve, early_stop_threshold
        self._average = self._best = 0.0
        self._step = 0
        self._group: list[float] = []

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if len(trainer.optimizers) != 1:
            raise MisuseError(
                f"configure_optimizers of {type(module).__name__} returned {len(trainer.optimizers)} optimizers, and "
                "the search for a learning rate needs one: choose their rates by hand"
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self._rate(trainer.global_step)

    def _rate(self, step: int) -> float:
        """Return the rate of a step, from 0."""
        low, high = self._curve.lr_min, self._curve.lr_max
        share = (step + 1) / self._curve.num_training if step else 0.0  # Lightning's, so that both give the same curve
        return low * (high / low) ** share if self._curve.mode == "exponential" else low + share * (high - low)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # gradients are being accumulated
            return
        rate, self._step = self._rate(self._step), trainer.global_step
        loss = outputs.get("loss") if outputs is not None else None
        smoothed = math.nan  # of a step without a loss, which no suggestion considers
        if isinstance(loss, Tensor):  # reduced, so that all ranks stop at the same step
            latest = float(trainer.strategy.reduce(loss.detach()))
            self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * latest
            # The exponent is one more than the number of steps, as in Lightning, so that both give the same curve.
            smoothed = self._average / (1 - _SMOOTHING ** (self._step + 1))
        self._curve.results["lr"].append(rate)
        self._curve.results["loss"].append(smoothed)
        if self._threshold is not None and self._step > 1 and smoothed > self._threshold * self._best:
            trainer.should_stop = True
        if smoothed < self._best or self._step == 1:
            self._best = smoothed

    # State, which a trial in other processes sends back

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"results": self._curve.results}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._curve.results.update(state_dict["results"])


def _check_range(min_lr: float, max_lr: float, num_training: int, mode: str) -> None:
    if mode not in ("exponential", "linear"):
        raise RequestError(f"mode={mode!r} is not known: choose 'exponential' or 'linear'")
    if not 0 < min_lr < max_lr:
        raise RequestError(f"min_lr={min_lr!r} and max_lr={max_lr!r} must be positive, and the first the smaller one")
    if isinstance(num_training, bool) or not isinstance(num_training, int) or num_training < 1:
        raise RequestError(f"a search of {num_training!r} steps is not possible: give an int of at least 1")


def _attribute(module: TrainModule, attr_name: str) -> str:
    """Return the name of the attribute that has the learning rate."""
    from dstrat.training.callbacks.trial import attribute_holders

    names = (attr_name,) if attr_name else _ATTRIBUTES
    for name in names:
        if attribute_holders(name, module):
            return name
    raise MisuseError(
        f"{type(module).__name__} and its hparams have no {' or '.join(map(repr, names))} that the learning rate could "
        "be written to: take the rate from such an attribute in configure_optimizers, name another one as attr_name, "
        "or pass update_attr=False"
    )
