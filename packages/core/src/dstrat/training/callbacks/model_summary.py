"""A table of a module's layers, shown before training."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from dstrat.training.callbacks.model_summary_layers import Summary
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class ModelSummary(Callback):
    """Writes a module's layers with their parameters and sizes to stderr when a fit starts, once for the job.

    With a batch as the module's ``example_input_array`` (a tensor, a tuple of positional or a dict of keyword arguments
    of ``forward``) each layer's input and output shapes are listed too: ``forward`` runs once on it, in evaluation mode
    and without gradients, and leaves modes and random numbers as they were.

    Args:
        max_depth: Levels of layers to list: 1 those of the module itself, 0 only the totals, -1 all.

    Raises:
        RequestError: The depth is below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise RequestError(f"ModelSummary(max_depth={max_depth!r}) must be 0 or more, or -1 for all levels")
        self._max_depth = max_depth

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero:
            from dstrat.training.callbacks.model_summary_layers import summarize
            from dstrat.training.callbacks.model_summary_shapes import try_example

            shapes, remark = try_example(trainer, module)
            show(summarize(module, max_depth=self._max_depth, shapes=shapes, remark=remark))


def show(summary: Summary) -> None:
    """Write a summary to stderr: with colours on a terminal, as plain text elsewhere."""
    if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        from dstrat.training.callbacks.model_summary_rich import show_on_terminal

        show_on_terminal(summary)
    else:
        from dstrat.training.callbacks.model_summary_table import as_text

        print(as_text(summary), file=sys.stderr, flush=True)
