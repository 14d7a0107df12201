"""Draw the pictures of logging.md and runs.md: progress.svg, plot.svg, report-light.png and report-dark.png.

Run ``python docs/images/runs.py`` where dstrat[report], dstrat-ddp, pyte and chromium are installed.  Three runs of
one program train in a pseudo-terminal, one after the other.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "runs_program.py"
COLUMNS, ROWS = 100, 40
FOURTH_EPOCH = re.compile(r"Epoch 4/8 .*256/256")  # and its validation is running


def train(folder: Path, learning_rate: str) -> list[Text]:
    """Run the program in a terminal; return what it showed last during the validation of the fourth epoch."""
    command, shown = [sys.executable, str(PROGRAM), learning_rate], []
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(folder)
        os.execve(command[0], command, environ)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the program has closed the terminal
            break
        lines = screen.display
        if any(FOURTH_EPOCH.search(line) for line in lines) and any("Validation" in line for line in lines):
            shown = rows_of(screen)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit("\n".join(screen.display))
    return shown


def rows_of(screen: pyte.Screen) -> list[Text]:
    """Return the lines of the epochs with their colors."""
    rows = []
    for number, line in enumerate(screen.display):
        if line.startswith(("Epoch", "Validation")):
            cells = (screen.buffer[number][column] for column in range(COLUMNS))
            rows.append(Text.assemble(*((cell.data, style_of(cell)) for cell in cells)))
    return rows


def style_of(cell: pyte.screens.Char) -> str:
    """Return rich's name of a style: pyte has colors as names or six digits."""
    color = f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else cell.fg.replace("brown", "yellow")
    return ("bold " if cell.bold else "") + color


def draw(name: str, title: str, rows: list[Text], width: int) -> None:
    """Write a picture of a terminal with these rows."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor")
    for row in rows:
        console.print(row, no_wrap=True)
    console.save_svg(str(FOLDER / f"{name}.svg"), title=title, unique_id=name)


def main() -> None:
    """Train with three rates, and draw the first run, the curves of all, and the report of the second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shown, *_ = [train(folder, rate) for rate in ("0.001", "0.003", "0.01")]
        draw("progress", "trainer.fit(module, loader)", shown, COLUMNS)

        dstrat = [sys.executable, "-m", "dstrat"]
        environ = {**os.environ, "FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": "80"}
        plot = subprocess.run([*dstrat, "plot", "val_loss"], cwd=folder, env=environ, check=True, capture_output=True)
        draw("plot", "dstrat plot", [Text("$ dstrat plot val_loss"), Text.from_ansi(plot.stdout.decode())], 80)

        subprocess.run([*dstrat, "report", "version_1", "--output", "report.html"], cwd=folder, check=True)
        for theme, scheme in (("light", 1), ("dark", 0)):
            subprocess.run(
                [
                    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,1330",
                    f"--screenshot={FOLDER / f'report-{theme}.png'}", (folder / "report.html").as_uri(),
                ],
                check=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
