"""Draw the bars of the README from a result of the benchmarks: bars-light.svg and bars-dark.svg.

    python3 noxfile.py -s bench -- --with-lightning --only steps --only wall_time --only failing
    python docs/images/bars.py benchmarks/results/20261126-041500.json

Each bar is a median of ratios to the program that is written by hand, each taken within one repeat, as other programs
on the machine disturb both.  Measure on an idle machine: seconds until a failure is over depend on its load.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from diagrams import DARK, FOLDER, LIGHT, Drawing

ARMS = ("by hand", "dstrat", "lightning")
FIGURES = (  # the name of a figure of the benchmarks, what its bars show, and whether its samples are speeds
    ("DDP on 2 ranks, steps/s over by hand (tiny)", "time of a small step", True),
    ("wall time of a short job on 2 ranks, over torchrun and by hand", "start and end of a job on 2 ranks", False),
    ("until the job is over: rank 0 raises while rank 1 is busy", "from a rank's failure to the end of the job", False),
)
LEFT, BAR, HEIGHT = 150, 380, 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """The bars of one figure.

    Attributes:
        title: What they show.
        ratios: For each arm the median of its times, relative to those by hand.
    """

    title: str
    ratios: dict[str, float]


def read_bars(result: Path) -> list[Bars]:
    """Return the bars of a result, whose Lightning arm may be missing."""
    figures = {figure["name"]: figure["samples"] for figure in json.loads(result.read_text())["figures"]}
    if missing := [name for name, _, _ in FIGURES if name not in figures]:
        sys.exit(f"{result} lacks {', '.join(missing)}: measure with --only steps --only wall_time --only failing")
    return [
        Bars(title=title, ratios=ratios_of(figures[name], of_speeds=of_speeds)) for name, title, of_speeds in FIGURES
    ]


def ratios_of(samples: dict[str, list[float]], *, of_speeds: bool) -> dict[str, float]:
    """Return for each arm the median of its times in a repeat, relative to the time by hand in this repeat."""
    return {
        arm: statistics.median(
            by_hand / value if of_speeds else value / by_hand
            for value, by_hand in zip(samples[arm], samples["by hand"], strict=True)
        )
        for arm in ARMS
        if arm in samples
    }


def draw(bars: list[Bars], colors: dict[str, str]) -> str:
    """Return the picture: a group for each figure, with a scale of its own."""
    drawing, top = Drawing(colors), 34
    for group in bars:
        drawing.text(20, top, group.title, style="bold")
        longest = max(group.ratios.values())
        for arm, ratio in group.ratios.items():
            top += HEIGHT + 6
            drawing.text(36, top, {"lightning": "Lightning"}.get(arm, arm), size=13, color="quiet")
            width = max(2, round(BAR * ratio / longest))
            fill = colors["accent"] if arm == "dstrat" else colors["line"]
            drawing.elements.append(
                f'<rect x="{LEFT}" y="{top - 15}" width="{width}" height="{HEIGHT}" rx="3" fill="{fill}"/>'
            )
            drawing.text(LEFT + width + 10, top, f"{ratio:.2f}", size=13)
        top += 46
    drawing.text(
        20, top - 12, "times relative to a program that is written by hand; shorter is better", size=12, color="quiet"
    )
    return drawing.svg("Times of dstrat and Lightning, relative to a program written by hand", height=top)


def main() -> None:
    """Write the files."""
    bars = read_bars(Path(sys.argv[1]))
    for theme, colors in (("light", LIGHT), ("dark", DARK)):
        (FOLDER / f"bars-{theme}.svg").write_text(draw(bars, colors))


if __name__ == "__main__":
    main()
