"""Progress as moving bars at the bottom of a terminal."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from dstrat.training.callbacks.progress import (
    drawing,
    forbid_forks_while_drawing,
    format_count,
    format_duration,
    format_remaining,
    format_speed,
    format_value,
)
from dstrat.training.callbacks.rich_progress_bar import RichProgressBarTheme

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TextIO

    from rich.console import ConsoleOptions, ConsoleRenderable, RenderableType

    from dstrat.training.callbacks.progress import Progress


class LiveDisplay:
    """Display of bars for the running loops, with the values below; other output appears above them."""

    seconds_between_updates = 0.3
    starts_at_once = True
    shows_time = True

    def __init__(
        self, theme: RichProgressBarTheme | None = None, *, leaves: bool = False, **console_options: Any
    ) -> None:
        forbid_forks_while_drawing()
        self._theme, self._leaves = theme or RichProgressBarTheme(), leaves
        self._lines = PinnedLines(Console(**{"stderr": True, **console_options}))

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Draw the running loops, outermost first."""
        with drawing:
            self._lines.draw(_drawing_of(running, values, self._theme))

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Print a line about a finished loop, or its bar if bars are left; the next loop follows below."""
        with drawing:
            if self._leaves:
                self._lines.release(_drawing_of([progress], values, self._theme))
            else:
                self._lines.release(_line_of(progress, values, self._theme))

    def close(self) -> None:
        """Draw a last time, and restore the terminal."""
        self._lines.close()


def _drawing_of(running: Sequence[Progress], values: Mapping[str, float | str], theme: RichProgressBarTheme) -> Group:
    table = Table.grid(padding=(0, 1), expand=True)
    styles = (theme.description, "", theme.batch_progress, theme.processing_speed, theme.time, theme.time)
    for ratio, style in zip((None, 1, None, None, None, None), styles, strict=True):
        table.add_column(ratio=ratio, no_wrap=True, style=style)
    for progress in running:
        table.add_row(
            progress.title,
            ProgressBar(
                total=progress.total,
                completed=progress.done,
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            format_count(progress),
            format_speed(progress.speed),
            format_duration(progress.seconds),
            format_remaining(progress),
        )
    return Group(table, _Values(values, theme)) if values else Group(table)


def _line_of(progress: Progress, values: Mapping[str, float | str], theme: RichProgressBarTheme) -> Text:
    facts = [f"{format_count(progress)} batches", format_duration(progress.seconds), format_speed(progress.speed)]
    line = Text.assemble((progress.title, theme.description), ": ", ", ".join(filter(None, facts)))
    for name, value in values.items():
        line.append(f"{theme.metrics_text_delimiter}{name} {_format(value, theme)}", theme.metrics)
    return line


def _format(value: float | str, theme: RichProgressBarTheme) -> str:
    form = theme.metrics_format
    return format(value, form) if form and not isinstance(value, str) else format_value(value)


class _Values:
    """Names and values, wrapped into lines for the width that is known when they are drawn."""

    def __init__(self, values: Mapping[str, float | str], theme: RichProgressBarTheme) -> None:
        self._values, self._theme = values, theme

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        between, line = self._theme.metrics_text_delimiter, ""
        for name, value in self._values.items():
            pair = f"{name} {_format(value, self._theme)}"
            if line and cell_len(f"{line}{between}{pair}") > options.max_width:
                yield Text(line, self._theme.metrics)
                line = pair
            else:
                line = f"{line}{between}{pair}" if line else pair
        yield Text(line, self._theme.metrics)


# Lines at the bottom of a terminal, below the program's output


# rich has no control code for this.  The list marks the text as one, which has no width.
_ERASE_BELOW = Segment("\r\x1b[J", None, [(ControlType.CARRIAGE_RETURN,)])


class PinnedLines(RenderHook):
    """Lines that stay below all other output.

    The cursor rests on an empty line above them.  Output of this process is written there through the console; that of
    other processes to the same terminal, such as other ranks, appears there too.

    Args:
        console: The console of a terminal.
    """

    # Not rich.live.Live, on which rich.progress.Progress is based: its cursor rests below the lines, and to draw again
    # it erases the lines above the cursor.  If another rank has printed there since, that is lost, and old bars stay.

    def __init__(self, console: Console) -> None:
        self._console = console
        self._content: RenderableType = ""
        self._replaced: list[tuple[TextIO, TextIO]] = []
        console.push_render_hook(self)
        if sys.stdout.isatty():  # not if it is redirected to a file
            sys.stdout = self._replace(sys.stdout)
        sys.stderr = self._replace(sys.stderr)

    def set(self, content: RenderableType) -> None:
        """Set the lines for the next drawing."""
        self._content = content

    def release(self, content: RenderableType) -> None:
        """Print lines as normal output, and pin none."""
        self._content = ""
        self._console.print(content)

    def draw(self, content: RenderableType) -> None:
        """Draw other lines."""
        self._content = content
        self._console.print(Control())  # nothing, to which process_renderables adds the lines

    def close(self) -> None:
        """Unpin the lines, and put the cursor below them."""
        for original, proxy in self._replaced:
            proxy.flush()  # text without a line end
            move_handlers(proxy, original)
            if sys.stdout is proxy:  # the program may have replaced it since
                sys.stdout = original
            if sys.stderr is proxy:
                sys.stderr = original
        self._replaced = []
        self._console.pop_render_hook()
        self._console.print(_Raw(_ERASE_BELOW), self._content, sep="", end="" if self._content == "" else "\n")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Append the lines to printed content; called by the console."""
        return [_Raw(_ERASE_BELOW), *renderables, _Below(self._content)]

    def _replace(self, stream: TextIO) -> TextIO:
        proxy: TextIO = FileProxy(self._console, stream)  # type: ignore[assignment]  # rich types it as io.TextIOBase
        self._replaced.append((stream, proxy))
        move_handlers(stream, proxy)  # logging handlers keep the stream that they were made with
        return proxy


class _Raw:
    """A control sequence."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield self._segment


class _Below:
    """An empty line for the cursor, and the content below it."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment | Control]:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        lines = lines[: console.height - 1]  # more would scroll the line of the cursor out of its reach
        for line in lines:
            yield Segment.line()
            yield from line
        if lines:
            yield Control((ControlType.CURSOR_UP, len(lines)), ControlType.CARRIAGE_RETURN)


# Logging handlers of a stream that is replaced temporarily


def move_handlers(old: TextIO, new: TextIO) -> None:
    """Redirect the logging handlers of a stream to another one."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                # logging.lastResort has no settable stream: it looks up sys.stderr for each record.
                with suppress(AttributeError):
                    handler.setStream(new)
