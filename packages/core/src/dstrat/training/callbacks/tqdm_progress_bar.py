"""Progress bar of tqdm."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.callbacks.progress import format_value
from dstrat.training.callbacks.progress_bar import ProgressBar
from dstrat.training.loggers.logger import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tqdm import tqdm

    from dstrat.training.callbacks.progress import Progress
    from dstrat.training.callbacks.progress_bar import Display


class TQDMProgressBar(ProgressBar):
    """Progress bars of tqdm, on stdout of global rank 0; needs the extra ``dstrat[tqdm]``.

    In a notebook with ipywidgets the bars are widgets.  They are drawn at most ten times a second.

    Args:
        refresh_rate: Minimal number of batches between two updates; 0 shows no bar.  The variable ``TQDM_MINITERS`` can
            only increase it.
        process_position: Number of other processes' bars above.
        leave: Whether the bar of each epoch stays when the next epoch begins.

    Attributes:
        loop_options: Options of a new bar: title, number of batches, and number of batches done.

    Raises:
        MissingRequirementError: tqdm is not installed.
        RequestError: A number is negative.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        **ProgressBar.retired_members,
        **dict.fromkeys(
            ("train_progress_bar", "val_progress_bar", "test_progress_bar", "predict_progress_bar"),
            "keep the bar that an override of init_train_tqdm, or of another loop, returns",
        ),
    }

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        require("tqdm", "TQDMProgressBar")
        if refresh_rate < 0 or process_position < 0:
            raise RequestError(
                f"TQDMProgressBar(refresh_rate={refresh_rate!r}, process_position={process_position!r}): both must be "
                "0 or more"
            )
        super().__init__()
        least = int(os.environ.get("TQDM_MINITERS", "0"))
        self.refresh_rate = max(refresh_rate, least) if refresh_rate else 0
        self.process_position, self.leave = process_position, leave
        self.loop_options: dict[str, Any] = {}

    @override
    def make_display(self) -> Display:
        return _TQDMDisplay(self)

    # Override these methods to change the look of a bar; its title and counts are set when it is shown.

    def init_sanity_tqdm(self) -> tqdm[Any]:
        """Create the bar of the sanity check."""
        return self._bar(leave=False)

    def init_train_tqdm(self) -> tqdm[Any]:
        """Create the bar of an epoch."""
        return self._bar()

    def init_validation_tqdm(self) -> tqdm[Any]:
        """Create the bar of a validation, in a fit below that of the epoch."""
        is_inner = self._training is not None
        # Positions are lines below the cursor: each process has two, of the epoch and of its validation.
        return self._bar(position=2 * self.process_position + is_inner, leave=not is_inner)

    def init_test_tqdm(self) -> tqdm[Any]:
        """Create the bar of a test."""
        return self._bar()

    def init_predict_tqdm(self) -> tqdm[Any]:
        """Create the bar of a prediction."""
        return self._bar()

    def _bar(self, **options: Any) -> tqdm[Any]:
        from tqdm.auto import tqdm

        usual = {"position": 2 * self.process_position, "leave": True, "dynamic_ncols": True, "file": sys.stdout}
        return tqdm(**{**usual, **self.loop_options, **options})


class _TQDMDisplay:
    """Display of a bar of tqdm for each running loop."""

    seconds_between_updates = 0.1
    starts_at_once = True
    shows_time = False

    def __init__(self, callback: TQDMProgressBar) -> None:
        self._callback = callback
        self._shown: list[tuple[Progress, tqdm[Any]]] = []

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Draw the running loops, outermost first."""
        self._follow(running)
        for progress, bar in self._shown:
            bar.set_description(progress.title, refresh=False)
            bar.update(progress.done - bar.n)  # unlike setting bar.n, this measures the speed
        _, outermost = self._shown[0]
        outermost.set_postfix({name: format_value(value) for name, value in values.items()}, refresh=False)
        for _, bar in self._shown:
            bar.refresh()

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Draw the end of a loop, whose bar stays until the next loop begins."""
        self.update([progress], values)

    def close(self) -> None:
        """Close all bars; the outermost one stays visible."""
        while self._shown:
            self._drop(leaves=True)

    def _follow(self, running: Sequence[Progress]) -> None:
        """Close the bars of finished loops, and create those of new loops."""
        while any(progress is not now for (progress, _), now in zip(self._shown, running, strict=False)) or (
            len(self._shown) > len(running)
        ):
            self._drop(leaves=self._callback.leave)
        makers = {
            "Sanity check": self._callback.init_sanity_tqdm,
            "Validation": self._callback.init_validation_tqdm,
            "Test": self._callback.init_test_tqdm,
            "Prediction": self._callback.init_predict_tqdm,
        }
        for progress in running[len(self._shown) :]:
            kind = next((maker for title, maker in makers.items() if progress.title.startswith(title)), None)
            self._callback.loop_options = {"desc": progress.title, "total": progress.total, "initial": progress.done}
            bar = self._callback.init_train_tqdm() if kind is None else kind()
            if (bar.total, bar.n) != (progress.total, progress.done):  # of an overridden method without loop_options
                bar.reset(progress.total)
                bar.n = bar.initial = progress.done
            self._shown.append((progress, bar))

    def _drop(self, *, leaves: bool) -> None:
        _, bar = self._shown.pop()
        bar.leave = leaves and bar.leave
        bar.close()
