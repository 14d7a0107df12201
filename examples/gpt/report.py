"""Callbacks that report the training speed and draw the loss curve."""

# ruff: noqa: ARG002 - hooks do not use all of their arguments

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dstrat import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from dstrat import Trainer, TrainModule


class TokensPerSecond(Callback):
    """Logs the bytes of text per second that the whole job trains on.

    Args:
        tokens_per_step: Bytes per batch, over all processes.
        steps: Number of steps per measurement.
    """

    def __init__(self, tokens_per_step: int, steps: int = 10) -> None:
        self._tokens_per_step, self._steps = tokens_per_step, steps

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Start the measurement."""
        self._begin()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Restart the measurement: validation time is not included."""
        self._begin()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and log the speed after every ``steps`` batches."""
        self._count += 1
        if self._count == self._steps:
            seconds = time.perf_counter() - self._start
            module.log("tokens/s", self._steps * self._tokens_per_step / seconds, prog_bar=True)
            self._begin()

    def _begin(self) -> None:
        self._count, self._start = 0, time.perf_counter()


class LossCurve(Callback):
    """Draws the loss curve at the end of training.

    Args:
        path: Image file to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._training: list[Tensor] = []  # tensors: a float would synchronize with the device in every step
        self._validation: list[tuple[int, float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the loss of the batch."""
        self._training.append(outputs["loss"])

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Store the validation loss."""
        if not trainer.sanity_checking:
            self._validation.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Draw the curve on global rank 0."""
        if not trainer.is_global_zero:
            return
        try:
            self._draw([float(loss) for loss in self._training])
        except ModuleNotFoundError as error:
            print(f"\nno loss curve was drawn, because {error.name} is not installed: pip install matplotlib")

    def _draw(self, losses: list[float]) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
        axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.35, linewidth=0.8, label="training")
        axes.plot(*zip(*self._validation, strict=True), color="tab:orange", marker="o", label="validation")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self._path)
