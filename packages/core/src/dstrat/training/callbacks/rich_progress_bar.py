"""Progress of a run, with the styles of rich."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.callbacks.progress_bar import ProgressBar, moves_bars

if TYPE_CHECKING:
    from rich.style import Style

    from dstrat.training.callbacks.progress_bar import Display


@dataclass
class RichProgressBarTheme:
    """The styles of a progress bar, as rich knows them: names such as ``"bold red"`` or ``"#6206E0"``, or a ``Style``.

    Attributes:
        description: Of what the loop does.
        progress_bar: Of the bar while it moves.
        progress_bar_finished: Of the bar at its end.
        progress_bar_pulse: Of the bar of a loop without a known end.
        batch_progress: Of the number of batches.
        time: Of the times.
        processing_speed: Of the speed.
        metrics: Of the values.
        metrics_text_delimiter: Between two values.
        metrics_format: Of a value, as ``".3f"``; empty for four digits.
    """

    description: str | Style = ""
    progress_bar: str | Style = "bar.complete"
    progress_bar_finished: str | Style = "bar.finished"
    progress_bar_pulse: str | Style = "bar.pulse"
    batch_progress: str | Style = ""
    time: str | Style = ""
    processing_speed: str | Style = ""
    metrics: str | Style = ""
    metrics_text_delimiter: str = "  "
    metrics_format: str = ""


class RichProgressBar(ProgressBar):
    """Shows what :class:`~dstrat.training.callbacks.progress_bar.ProgressBar` does, in other styles.

    Args:
        refresh_rate: Number of batches between two updates, at least; 0 shows no bar.
        leave: Whether the bar of each epoch stays when the next one begins.
        theme: The styles.
        console_kwargs: For ``rich.console.Console``, such as ``{"width": 80}``.

    Raises:
        RequestError: The number is negative.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if refresh_rate < 0:
            raise RequestError(f"RichProgressBar(refresh_rate={refresh_rate!r}) must be 0 or more")
        super().__init__()
        self.refresh_rate, self.leave = refresh_rate, leave
        self.theme, self._console_kwargs = theme or RichProgressBarTheme(), console_kwargs or {}

    @override
    def make_display(self) -> Display:
        if not moves_bars():
            return super().make_display()
        from dstrat.training.callbacks.progress_terminal import LiveDisplay

        return LiveDisplay(self.theme, leaves=self.leave, **self._console_kwargs)
