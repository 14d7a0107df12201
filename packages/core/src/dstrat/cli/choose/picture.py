"""Picture of the layouts of ``dstrat choose``: time of a step and memory of a device, by their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.cli.estimate.command import MOST_OF_MEMORY
from dstrat.cli.runs.charts import COLORS, chart_style, render, svg_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from dstrat.cli.choose.candidates import Candidate, Workload

_GIB = 2**30
_ROW = 0.3  # inches
_TIMES = {
    "compute": "compute",
    "communication": "communication",
    "idle": "idle",
    "optimizer": "optimizer step",
    "offload": "copies from and to the host",
}


def save_picture(path: Path, candidates: Sequence[Candidate], workload: Workload) -> None:
    """Write bars of layouts, the first one at the top, as a file of the format that its suffix says.

    Raises:
        MissingRequirementError: matplotlib is not installed, or jinja2 for an HTML page.
    """
    if path.suffix == ".html":
        chart = svg_of(lambda ink: _make_figure(candidates, workload, ink))
        title = f"Layouts of {workload.model}"
        page = render("choose.html.jinja", title=title, chart=chart, candidates=candidates, gib=_GIB)
        path.write_text(page, encoding="utf-8")
    else:
        _make_figure(candidates, workload, "black").savefig(path, dpi=150)


def _make_figure(candidates: Sequence[Candidate], workload: Workload, ink: str) -> Figure:
    with chart_style(ink):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 2.2 + _ROW * len(candidates)), layout="constrained")
        time, memory = figure.subplots(1, 2, sharey=True)
        _draw_bars(time, [_milliseconds(one) for one in candidates])
        _draw_bars(memory, [_gib(one) for one in candidates])
        limit = MOST_OF_MEMORY * workload.memory / _GIB
        memory.axvline(limit, color=ink, linestyle=":", label=f"{MOST_OF_MEMORY:.0%} of the device")
        time.set_yticks(range(len(candidates)), [_label(one, workload) for one in candidates])
        time.invert_yaxis()
        time.set(xlabel="ms of a step")
        memory.set(xlabel="GiB of a device at its peak")
        for axes in (time, memory):
            axes.grid(axis="x", alpha=0.25)
            axes.set_axisbelow(True)
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=8)
    return figure


def _draw_bars(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    ends = [0.0] * len(rows)
    for number, name in enumerate(rows[0]):
        sizes = [row[name] for row in rows]
        if any(sizes):
            axes.barh(range(len(rows)), sizes, left=ends, height=0.7, color=COLORS[number], label=name)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]


def _milliseconds(one: Candidate) -> dict[str, float]:
    return {text: 1000 * getattr(one.time, name) for name, text in _TIMES.items()}


def _gib(one: Candidate) -> dict[str, float]:
    """Return the memory that is always there, and the rest: activations, gradients and what is temporary."""
    memory = one.memory
    sizes = {"parameters": memory.parameters, "optimizer state": memory.optimizer_state, "buckets": memory.buffers}
    sizes["the rest of the peak"] = max(0, one.peak - sum(sizes.values()))
    return {name: size / _GIB for name, size in sizes.items()}


def _label(one: Candidate, workload: Workload) -> str:
    return one.strategy + (f", {one.precision}" if len(workload.precisions) > 1 else "")
