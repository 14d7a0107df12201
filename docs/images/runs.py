"""Draw the pictures of logging.md and runs.md: progress.svg, plot.svg, report-light.png and report-dark.png.

Run ``python docs/images/runs.py`` where dstrat[report], dstrat-ddp, pyte and chromium are installed.  Three runs of
one program train in a pseudo-terminal, one after the other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.text import Text
from terminal import Terminal, draw

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "runs_program.py"
FOURTH_EPOCH = re.compile(r"Epoch 4/8 .*256/256")  # and its validation is running


def train(folder: Path, learning_rate: str) -> list[Text]:
    """Run the program in a terminal; return what it showed last during the validation of the fourth epoch."""
    terminal = Terminal([sys.executable, str(PROGRAM), learning_rate], folder)
    shown: list[Text] = []

    def watch(rows: list[str]) -> None:
        nonlocal shown
        if any(FOURTH_EPOCH.search(row) for row in rows) and any("Validation" in row for row in rows):
            shown = [line for line in terminal.lines() if line.plain.startswith(("Epoch", "Validation"))]

    if terminal.run(watch):
        sys.exit("\n".join(line.plain for line in terminal.lines()))
    return shown


def main() -> None:
    """Train with three rates, and draw the first run, the curves of all, and the report of the second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shown, *_ = [train(folder, rate) for rate in ("0.001", "0.003", "0.01")]
        draw(FOLDER / "progress.svg", "trainer.fit(module, loader)", shown)

        dstrat = [sys.executable, "-m", "dstrat"]
        environ = {**os.environ, "FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": "80"}
        plot = subprocess.run([*dstrat, "plot", "val_loss"], cwd=folder, env=environ, check=True, capture_output=True)
        lines = Text.from_ansi(plot.stdout.decode()).split("\n")
        draw(FOLDER / "plot.svg", "dstrat plot", [Text("$ dstrat plot val_loss"), *lines], 80)

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
