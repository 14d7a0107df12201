"""Progress bar with custom styles of rich."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.callbacks.progress_bar import ProgressBar, has_terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.style import Style

    from dstrat.training.callbacks.progress_bar import Display


@dataclass
class RichProgressBarTheme:
    """The styles of a progress bar: rich's names, such as ``"bold red"`` or ``"#6206E0"``, or a ``Style``.

    Attributes:
        description: Style of the title of a loop.
        progress_bar: Style of an unfinished bar.
        progress_bar_finished: Style of a finished bar.
        progress_bar_pulse: Style of the bar of a loop with unknown length.
        batch_progress: Style of the number of batches.
        time: Style of the times.
        processing_speed: Style of the speed.
        metrics: Style of the values.
        metrics_text_delimiter: Text between two values.
        metrics_format: Format of a value, such as ``".3f"``; empty for four digits.
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
    """A :class:`~dstrat.training.callbacks.progress_bar.ProgressBar` with other styles.

    Args:
        refresh_rate: Minimal number of batches between two updates; 0 shows no bar.
        leave: Whether the bar of each epoch stays when the next epoch begins, rather than a line.
        theme: The styles.
        console_kwargs: Arguments of ``rich.console.Console``, such as ``{"width": 80}``.

    Raises:
        RequestError: The number is negative.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        **ProgressBar.retired_members,
        "configure_columns": "theme= has the styles, get_metrics returns the values, and make_display another display",
        "refresh": "the bar is drawn by time, after refresh_rate batches at the earliest",
        **dict.fromkeys(
            ("train_progress_bar", "val_progress_bar", "val_sanity_check_bar", "test_progress_bar"),
            "the bars belong to the display that make_display returns",
        ),
    }

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
        if not has_terminal():
            return super().make_display()
        from dstrat.training.callbacks.progress_terminal import LiveDisplay

        return LiveDisplay(self.theme, leaves=self.leave, **self._console_kwargs)
