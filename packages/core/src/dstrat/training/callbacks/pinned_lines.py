"""Lines at the bottom of a terminal, below whatever is written to it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment

from dstrat.training.callbacks.log_streams import move_handlers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType

_ERASE_BELOW = Segment("\r\x1b[J", None, [(ControlType.CARRIAGE_RETURN,)])


class PinnedLines(RenderHook):
    """Lines that stay below everything that is written.

    The cursor rests on an empty line above them.  What this process prints goes there through the console; what other
    processes write to the same terminal appears there too and stays, because the next drawing starts where it ended.

    Args:
        console: Writes to a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._content: RenderableType = ""
        self._replaced: list[tuple[TextIO, TextIO]] = []
        console.push_render_hook(self)
        if sys.stdout.isatty():  # where it goes to a file, it stays there
            sys.stdout = self._replace(sys.stdout)
        sys.stderr = self._replace(sys.stderr)

    def set(self, content: RenderableType) -> None:
        """Take other lines, for the next time that anything is written."""
        self._content = content

    def release(self, content: RenderableType) -> None:
        """Let lines go up to what is written, and pin none."""
        self._content = ""
        self._console.print(content)

    def draw(self, content: RenderableType) -> None:
        """Show other lines."""
        self._content = content
        self._console.print(Control())

    def close(self) -> None:
        """Leave the lines where they are, and the cursor below them."""
        for stream in {id(new): new for _, new in self._replaced}.values():
            stream.flush()
        for original, proxy in self._replaced:
            move_handlers(proxy, original)
            if sys.stdout is proxy:
                sys.stdout = original
            if sys.stderr is proxy:
                sys.stderr = original
        self._replaced = []
        self._console.pop_render_hook()
        self._console.print(_Raw(_ERASE_BELOW), self._content, sep="", end="" if self._content == "" else "\n")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put the lines below what is printed; called by the console."""
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
    """An empty line, where the cursor is left, and the content below it."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment | Control]:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)[: console.height - 1]
        for line in lines:
            yield Segment.line()
            yield from line
        if lines:
            yield Control((ControlType.CURSOR_UP, len(lines)), ControlType.CARRIAGE_RETURN)
