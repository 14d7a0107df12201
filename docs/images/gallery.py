"""Draw the pictures of gallery.md: what its programs and commands print in a terminal of 100 columns.

Run ``python docs/images/gallery.py [NAME ...]`` where the packages, pyte and torchmetrics are installed.  The program
of a section is the first one of the page and that of the section below it.  A section without commands runs it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from terminal import Terminal, draw

FOLDER = Path(__file__).parent / "gallery"
PAGE = FOLDER.parents[1] / "gallery.md"
CTRL_C = "\x03"


@dataclass(frozen=True)
class View:
    """What is drawn of what a program prints.

    Attributes:
        lines: Pattern of the lines to draw; by default all.
        at_most: Number of lines after which the rest is left out.
    """

    lines: str = ""
    at_most: int = 100


RESULT = "Epoch|trained|checkpoint |logs "
VIEWS = {
    "epochs": View("Epoch"),
    "summary": View("layer|─|backbone|head|total"),
    "closing-line": View(RESULT),
    "fast-dev-run": View(RESULT),
    "overfit": View(RESULT),
    "sanity-check": View("Sanity|training failed|TypeError"),
    "early-stopping": View("Epoch|training ends|trained"),
    "best-checkpoint": View("Epoch|dstrat_logs"),
    "autoresume": View(r"\$|Epoch|loss|training|newest|KeyboardInterrupt|resume='auto': training resumes|trained"),
    "other-devices": View(r"(?!layer|─|backbone|head|total|no shapes|.*starts anew)"),
    "accumulation": View(RESULT),
    "finders": View(".* now|Epoch"),
    "profiler": View("(?!layer|─|backbone|head|total|Epoch|trained|checkpoint |logs )", at_most=14),
    "metrics": View("Epoch"),
    "precision": View("(?!layer|─|backbone|head|total)"),
    "launchers": View("(?!layer|─|backbone|head|total)"),
    "restarts": View("(?!layer|─|backbone|head|total|logs)"),
    "traceback": View("(?!layer|─|backbone|head|total)"),
    "freezing": View("(?!checkpoint|logs)"),
    "loggers": View(r"\$|dstrat_logs|checkpoints|events|step|\d|$"),
    "command-line": View(at_most=25),
    "estimate": View(at_most=17),
}
INTERRUPTED = {"autoresume": re.compile(r"Epoch 3/6 .* [4-9]\d/128")}
"""What a line of the first command shows when Ctrl-C is pressed."""


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        picture: Name of its picture.
        program: What train.py is.
        commands: Run one after the other in one folder.
    """

    picture: str
    program: str
    commands: list[str]


def sections() -> list[Section]:
    """Return the sections of the page whose pictures are drawn here."""
    page = PAGE.read_text()
    common, *_ = programs_of(page)
    found = []
    for text in page.split("\n### "):
        for picture in re.findall(r"\(images/gallery/(.+)\.svg\)", text):
            program = "\n".join((common, *programs_of(text)))
            commands = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
            found.append(Section(picture, program, commands.splitlines()))
    return found


def programs_of(text: str) -> list[str]:
    """Return the programs in a part of the page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def record(section: Section) -> list[Text]:
    """Run the program and the commands of a section in a folder; return the lines to draw."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(section.program)
        if not section.commands:
            return viewed(section.picture, run(["python", "train.py"], folder))
        if "train.py" not in "".join(section.commands):  # the commands look at what it leaves
            run(["python", "train.py"], folder)
        printed: list[Text] = []
        for number, command in enumerate(section.commands):
            interrupted = INTERRUPTED.get(section.picture) if number == 0 else None
            lines = run(["bash", "-c", command], folder, interrupted)
            printed += [Text(f"$ {command}", "bold"), *viewed(section.picture, lines)]
        return printed


def run(command: list[str], folder: Path, interrupted: re.Pattern[str] | None = None) -> list[Text]:
    """Run a command, press Ctrl-C when a line is shown, and return what it has printed, without the folder's name."""
    terminal = Terminal(command, folder)
    pressed = False

    def watch(lines: list[str]) -> None:
        nonlocal pressed
        if interrupted is not None and not pressed and any(map(interrupted.search, lines)):
            terminal.press(CTRL_C)
            pressed = True

    terminal.run(watch)
    return [without(f"{folder}/", line) for line in terminal.lines()]


def viewed(picture: str, lines: list[Text]) -> list[Text]:
    """Return the lines that a picture has."""
    view = VIEWS.get(picture, View())
    kept = [line for line in lines if re.match(view.lines, line.plain)]
    return kept if len(kept) <= view.at_most else [*kept[: view.at_most], Text("...")]


def without(name: str, line: Text) -> Text:
    """Return a line without the name of a folder."""
    while (start := line.plain.find(name)) >= 0:
        line = Text.assemble(line[:start], line[start + len(name) :])
    return line


def main() -> None:
    """Draw the pictures that are named as arguments, or all."""
    FOLDER.mkdir(exist_ok=True)
    for section in sections():
        if section.picture in sys.argv[1:] or not sys.argv[1:]:
            lines = record(section)
            draw(FOLDER / f"{section.picture}.svg", (section.commands or ["python train.py"])[-1], lines)
            print(f"{section.picture}\n{Text(chr(10)).join(lines).plain}\n", flush=True)


if __name__ == "__main__":
    main()
