"""Run a command in a pseudo-terminal, and draw what it shows as SVG, with pyte and rich."""

from __future__ import annotations

import io
import os
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COLUMNS, ROWS = 100, 600
SCALE = 0.6
"""Size of a picture, whose letters have 20 pixels before."""
# Pictures of a page load no font, and the lower edge of rich's frame cuts the underscores of the last line.
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    ' clip-path="url(#{unique_id}-clip-terminal)"', ""
)


class Terminal:
    """A program that runs in a pseudo-terminal.

    Args:
        command: The program and its arguments.
        folder: Its working directory.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._pid, self._terminal = os.forkpty()
        if self._pid == 0:
            os.chdir(folder)
            programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
            os.execvpe(command[0], command, {**os.environ, **size, "TERM": "xterm-256color", "PATH": programs})

    def run(self, watch: Callable[[list[str]], None] | None = None) -> int:
        """Show what the program prints until it ends; return its exit code.

        Args:
            watch: Gets the rows of the screen after each change.
        """
        stream = pyte.ByteStream(self._screen)
        while True:
            try:
                stream.feed(os.read(self._terminal, 65536))
            except OSError:  # the program has closed the terminal
                break
            if watch is not None:
                watch(self._screen.display)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def press(self, key: str) -> None:
        """Send a key to the program."""
        os.write(self._terminal, key.encode())

    def lines(self) -> list[Text]:
        """Return what is shown with its colors, line by line as it was printed: a full row goes on in the next one."""
        lines = [Text()]
        for number in range(ROWS):
            cells = [self._screen.buffer[number][column] for column in range(COLUMNS)]
            for style, same in groupby(cells, style_of):
                lines[-1].append("".join(cell.data for cell in same), style)
            if cells[-1].data == " ":
                lines[-1].rstrip()
                lines.append(Text())
        while lines and not lines[-1].plain:
            lines.pop()
        return lines


def style_of(cell: pyte.screens.Char) -> str:
    """Return rich's name of a style: pyte has colors as names or six digits."""
    color = f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else cell.fg.replace("brown", "yellow")
    return ("bold " if cell.bold else "") + color


def draw(path: Path, title: str, lines: Sequence[Text], width: int = COLUMNS) -> None:
    """Write a picture of a terminal with these lines."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor")
    for line in lines:
        for row in line.divide(range(width, len(line), width)):
            console.print(row, no_wrap=True)
    svg = console.export_svg(title=title, code_format=SVG_FORMAT, unique_id=path.stem)
    x, y = (float(size) * SCALE for size in re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0])
    path.write_text(svg.replace("<svg ", f'<svg width="{x:.0f}" height="{y:.0f}" ', 1))
