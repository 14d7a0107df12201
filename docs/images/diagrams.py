"""Draw the diagrams of the guides, each in light and dark colors, such as architecture-light.svg.

Run ``python3 docs/images/diagrams.py`` after a change; tests/test_guides.py compares the files.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
WIDTH = 640  # narrow, so that the text can be read on a phone
LIGHT = {
    "page": "#ffffff",
    "box": "#f4f5fb",
    "line": "#7a83b8",
    "text": "#1c2030",
    "quiet": "#565d78",
    "accent": "#3f51b5",
}
DARK = {
    "page": "#1e2129",
    "box": "#2a2f3d",
    "line": "#7f8ac9",
    "text": "#e9ebf4",
    "quiet": "#b3b9cf",
    "accent": "#9fa8ff",
}

PLUGINS = (
    "dstrat-ddp",
    "dstrat-fsdp",
    "dstrat-deepspeed",
    "dstrat-horovod",
    "dstrat-xla",
    "... and others",
    "or your own",
)

QUESTIONS = (  # the question in two lines, the answer that leads to the aliases, the aliases, and a note
    ("Is it one device?", "or a first test", "yes", ("single_device",), ""),
    (
        "Does everything fit on each device?",
        "parameters, gradients, optimizer state",
        "yes",
        ("ddp",),
        "slow network: bagua",
    ),
    ("Do the parameters fit on each device?", "the rest is sharded", "yes", ("deepspeed_stage_2",), ""),
    ("Does each layer fit on one device?", "with its activations", "no", ("model_parallel",), ""),
    ("Do all shards fit on all devices?", "nothing is kept twice", "yes", ("fsdp", "deepspeed_stage_3"), ""),
)

AXES = (  # the same for an axis of the mesh, and at last the label of the arrow to the next question
    (
        "Is the largest layer too large?",
        "or are there fewer samples than devices?",
        "yes",
        "tp",
        "within a machine",
        "then",
    ),
    ("Are sequences too long?", "their activations do not fit", "yes", "cp", "with torch's attention", "then"),
    ("Are experts too large?", "gathered, or gathering takes too long", "yes", "ep", "takes no more devices", "then"),
    ("Does gathering take too long?", "links between machines are slow", "no", "dp_shard", "has the rest", "yes"),
    (
        "Do all shards fit on one machine?",
        "or on a few with fast links",
        "yes",
        "dp_replicate",
        "a replica for each",
        "no",
    ),
)


class Drawing:
    """Elements of an SVG in the colors of one theme; lengths are in its units, from the upper left corner."""

    def __init__(self, colors: dict[str, str]) -> None:
        self.colors = colors
        self.elements: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, *, fill: str = "box", dashed: bool = False) -> None:
        """Draw a rectangle with round corners."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{self.colors[fill]}" '
            f'stroke="{self.colors["line"]}"{dash}/>'
        )

    def text(
        self, x: int, y: int, text: str, *, size: int = 15, color: str = "text", style: str = "", center: bool = False
    ) -> None:
        """Write one line; style is "bold", "code" or nothing."""
        look = {"bold": ' font-weight="600"', "code": ' font-family="ui-monospace, Menlo, Consolas, monospace"'}
        anchor = ' text-anchor="middle"' if center else ""
        self.elements.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{self.colors[color]}"{look.get(style, "")}{anchor}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[int, int]) -> None:
        """Draw a line through points, with its head at the last one."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.elements.append(
            f'<polyline points="{path}" fill="none" stroke="{self.colors["accent"]}" stroke-width="2" '
            'marker-end="url(#head)"/>'
        )

    def question(self, top: int, question: str, of_what: str, answer: str, otherwise: str) -> None:
        """Draw a question, the arrow of an answer to the empty box beside it, and the one to the next question."""
        self.box(20, top, 360, 72)
        self.text(36, top + 31, question, style="bold")
        self.text(36, top + 53, of_what, size=13, color="quiet")
        self.box(440, top, 180, 72, fill="page", dashed=True)
        self.arrow((380, top + 36), (440, top + 36))
        self.text(407, top + 28, answer, size=13, color="quiet", center=True)
        self.arrow((185, top + 72), (185, top + 104))
        self.text(198, top + 92, otherwise, size=13, color="quiet")

    def svg(self, title: str, *, height: int) -> str:
        """Return the file's text."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{self.colors["accent"]}"/></marker>'
        )
        fonts = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{fonts}" role="img">',
                f"<title>{escape(title)}</title>",
                f"<defs>{head}</defs>",
                f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{self.colors["page"]}"/>',
                *self.elements,
                "</svg>",
                "",
            ]
        )


def draw_architecture(colors: dict[str, str]) -> str:
    """Return the diagram of the program, the core, the packages and the ranks."""
    drawing = Drawing(colors)

    drawing.box(20, 16, 600, 84)
    drawing.text(36, 42, "your program", style="bold")
    drawing.text(36, 66, 'Trainer(strategy="fsdp", devices=2).fit(module, data)', style="code", size=14)
    drawing.text(36, 88, "or OwnLoop with your own loop, or dstrat fit --config run.yaml", size=13, color="quiet")

    drawing.box(20, 122, 350, 282, fill="page", dashed=True)
    drawing.arrow((195, 100), (195, 152))
    drawing.text(228, 143, "dstrat, the core", style="bold", color="accent")
    for top, name, first, second in (
        (152, "catalog", "finds installed packages", "by their entry point dstrat.v1"),
        (238, "plan", "selects strategy, accelerator, precision,", "each with a reason, before anything runs"),
        (324, "launcher", "starts and supervises one process per rank,", "terminates all of them when one fails"),
    ):
        drawing.box(36, top, 318, 66)
        drawing.text(48, top + 21, name, style="bold")
        drawing.text(48, top + 40, first, size=13, color="quiet")
        drawing.text(48, top + 57, second, size=13, color="quiet")
    drawing.arrow((195, 218), (195, 238))
    drawing.arrow((195, 304), (195, 324))

    drawing.box(440, 122, 180, 282, fill="page", dashed=True)
    drawing.text(530, 148, "plugin packages", style="bold", color="accent", center=True)
    for number, name in enumerate(PLUGINS):
        drawing.text(456, 180 + 26 * number, name, size=14, style="code" if name.startswith("dstrat") else "")
    drawing.text(456, 372, "strategies, accelerators,", size=12, color="quiet")
    drawing.text(456, 389, "checkpoint ios, launchers", size=12, color="quiet")
    drawing.arrow((440, 185), (354, 185))
    drawing.text(400, 176, "records", size=12, color="quiet", center=True)

    drawing.arrow((120, 390), (120, 444))
    drawing.arrow((270, 390), (270, 420), (375, 420), (375, 444))
    for left, rank in ((20, 0), (330, 1)):
        drawing.box(left, 444, 290, 92)
        drawing.text(left + 14, 468, f"rank {rank}", style="bold")
        drawing.text(left + 14, 490, "your module, wrapped or sharded", size=13, color="quiet")
        drawing.text(left + 14, 508, "Trainer's loop, or yours", size=13, color="quiet")
        drawing.text(left + 14, 526, "strategy, accelerator, precision", size=13, color="quiet")
    drawing.arrow((530, 404), (530, 444))
    drawing.text(540, 430, "classes", size=12, color="quiet")
    drawing.arrow((165, 536), (165, 574))
    drawing.arrow((475, 536), (475, 574))

    drawing.box(20, 574, 600, 50)
    drawing.text(36, 604, "checkpoint", style="bold")
    drawing.text(142, 604, "one folder, loaded by any strategy on any world size", size=14, color="quiet")
    return drawing.svg("A program, dstrat's core, the packages of strategies, and the ranks of a job", height=640)


def draw_choice(colors: dict[str, str]) -> str:
    """Return the decision for a strategy: questions from above to below, the answers beside them."""
    drawing = Drawing(colors)
    for number, (question, of_what, answer, aliases, note) in enumerate(QUESTIONS):
        top = 16 + 104 * number
        drawing.question(top, question, of_what, answer, "no" if answer == "yes" else "yes")
        for line, alias in enumerate(aliases):
            first = top + (42 if len(aliases) == 1 and not note else 31)
            drawing.text(454, first + 22 * line, alias, style="code", size=14, color="accent")
        drawing.text(454, top + 53, note, size=12, color="quiet")
    top = 16 + 104 * len(QUESTIONS)
    drawing.box(20, top, 600, 72, fill="page", dashed=True)
    drawing.text(36, top + 31, "fsdp_cpu_offload, deepspeed_stage_3_offload", style="code", size=14, color="accent")
    drawing.text(36, top + 53, "the rest is in the memory of the host", size=13, color="quiet")
    return drawing.svg("Questions that lead to a strategy", height=top + 88)


def draw_axes(colors: dict[str, str]) -> str:
    """Return the decision for the axes of a mesh, which begins with sharding over all devices."""
    drawing = Drawing(colors)
    drawing.box(20, 16, 600, 72, fill="page", dashed=True)
    drawing.text(36, 47, 'dp_shard="auto"', style="code", size=14, color="accent")
    drawing.text(36, 69, "all devices: parameters, gradients and optimizer state are sharded", size=13, color="quiet")
    drawing.arrow((185, 88), (185, 120))
    for number, (question, of_what, answer, axis, note, otherwise) in enumerate(AXES, 1):
        top = 16 + 104 * number
        drawing.question(top, question, of_what, answer, otherwise)
        drawing.text(454, top + 31, axis, style="code", size=14, color="accent")
        drawing.text(454, top + 53, note, size=12, color="quiet")
    top = 16 + 104 * (len(AXES) + 1)
    drawing.box(20, top, 600, 72, fill="page", dashed=True)
    drawing.text(36, top + 31, "pp", style="code", size=14, color="accent")
    drawing.text(36, top + 53, "with many microbatches; also where the other axes are used up", size=13, color="quiet")
    return drawing.svg("Questions that lead to the axes of a mesh", height=top + 88)


DIAGRAMS = {"architecture": draw_architecture, "choose": draw_choice, "axes": draw_axes}


def main() -> None:
    """Write the files."""
    for name, draw in DIAGRAMS.items():
        for theme, colors in (("light", LIGHT), ("dark", DARK)):
            (FOLDER / f"{name}-{theme}.svg").write_text(draw(colors))


if __name__ == "__main__":
    main()
