"""Pictures of layouts: memory, mesh, collectives, and the schedule of a pipeline."""

import dataclasses
import io
import math
import pathlib
from collections.abc import Iterable, Sequence

import matplotlib
import matplotlib.figure
import matplotlib.patches
import numpy as np

from meshpar.errors import ConfigError
from meshpar.explain.report import Explanation
from meshpar.layouts.axes import DATA
from meshpar.pipeline.report import PipelineReport
from meshpar.units import readable_bytes, unit_of_bytes

matplotlib.use("Agg")

_SHADES = {"F": 0.85, "B": 0.5, "W": 0.25}
_INK = "#1b1f24"  # An svg has the color of the page's text in its place.
_LOOK = {
    **{f"{part}.color": _INK for part in ("text", "xtick", "ytick")},
    **{"axes.labelcolor": _INK, "axes.edgecolor": _INK, "axes.facecolor": "none"},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"legend.frameon": False, "font.size": 9},
    # Layouts hold regexes: their dollar signs are no formulas.
    **{"text.parse_math": False},
}
with_look = matplotlib.rc_context(_LOOK)
"""Decorates a function that makes a figure for a page."""

_PREDICTED = ("#1f6fb4", "#c2571a", "#2e8b57", "#8a63b5", "#b8860b", "#4aa3a2")
_COMPILED, _HIDDEN, _EXPOSED = "#8b949e", "#2e8b57", "#d1495b"


def check_format(path: str) -> None:
    """Raises ConfigError for a file whose suffix is no format of pictures."""
    suffix = pathlib.PurePath(path).suffix.removeprefix(".").lower()
    known = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    if suffix and suffix not in known:
        raise ConfigError(
            f"{path}: no pictures are written as .{suffix}; use .png or one of "
            f"{', '.join(sorted(known))}"
        )


@with_look
def svg(figure: matplotlib.figure.Figure) -> str:
    """The figure as an <svg> element without a background, for light and dark pages."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def picture(figure: matplotlib.figure.Figure) -> str:
    """A figure in a page, which scrolls where it is wider than the page."""
    return f'<div class="wide">{svg(figure)}</div>'


def _label(layout: str, *lines: str) -> str:
    """A layout over several rows of about 30 characters, and more lines."""
    items = layout.split(",")
    rows = [items[0]]
    for item in items[1:]:
        if len(longer := f"{rows[-1]},{item}") <= 30:
            rows[-1] = longer
        else:
            rows[-1] += ","
            rows.append(item)
    return "\n".join([*rows, *lines])


@with_look
def _bars_figure(
    labels: Sequence[str], parts: Sequence[Sequence[tuple[float, str]]], title: str
) -> matplotlib.figure.Figure:
    """Stacked horizontal bars of bytes, as high as their labels need.

    Args:
      labels: one per bar, of any number of lines.
      parts: (bytes, color) of each part of each bar.
      title: what the bytes are.
    """
    totals = [sum(size for size, _ in bar) for bar in parts]
    scale, unit = unit_of_bytes(max(totals, default=0))
    heights = np.array([0.12 + 0.15 * (1 + label.count("\n")) for label in labels])
    ends = np.cumsum(heights)
    size = 8, 0.7 + heights.sum()
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    for middle, bar, total in zip(ends - heights / 2, parts, totals, strict=True):
        left = 0.0
        for part, color in bar:
            axes.barh(middle, part / scale, 0.22, left=left, color=color)
            left += part / scale
        axes.text(left, middle, f" {readable_bytes(total)}", va="center")
    axes.set_yticks(ends - heights / 2, labels)
    axes.set_ylim(heights.sum() or 0.3, 0)
    axes.set_xlim(0, 1.15 * max([*totals, 1]) / scale)
    axes.set_xlabel(f"{title}, {unit}")
    return figure


@with_look
def _add_legend(figure: matplotlib.figure.Figure, colors: Iterable[tuple[str, str]]):
    """A legend above the plot for (name, color)."""
    handles = [matplotlib.patches.Patch(color=c, label=name) for name, c in colors]
    if handles:
        figure.legend(handles=handles, ncols=4, loc="outside upper left")


def memory_figure(explanations: Sequence[Explanation]) -> matplotlib.figure.Figure:
    """Memory per device as stacked bars: predicted by kind, and compiled."""
    labels, parts, used = [], [], {}
    for e in explanations:
        if e.predicted is not None:
            sizes = dataclasses.asdict(e.predicted)
            bar = []
            for number, (kind, size) in enumerate(sizes.items()):
                color = _PREDICTED[number % len(_PREDICTED)]
                if size:
                    used[kind] = color
                    bar.append((size, color))
            labels.append(_label(e.layout, "predicted"))
            parts.append(bar)
        labels.append(_label(e.layout, "compiled"))
        parts.append([(e.compiled_bytes["peak"], _COMPILED)])
    figure = _bars_figure(labels, parts, "per device")
    _add_legend(figure, [*used.items(), ("compiled peak", _COMPILED)])
    return figure


@with_look
def mesh_figure(explanation: Explanation) -> matplotlib.figure.Figure:
    """The mesh as a grid: the last axis in columns, the others in rows."""
    names = [axis for axis, size in explanation.mesh.items() if size > 1] or [DATA]
    sizes = [explanation.mesh[axis] for axis in names]
    rows, columns = math.prod(sizes[:-1]), sizes[-1]
    figure = matplotlib.figure.Figure(
        figsize=(min(10, 1.5 + 0.6 * columns), min(8, 0.9 + 0.4 * rows))
    )
    axes = figure.add_subplot()
    colors = np.array(matplotlib.colormaps["tab10"].colors)[np.arange(rows) % 10]
    on_white = 0.35 * colors + 0.65
    axes.imshow(on_white[:, None].repeat(columns, axis=1), aspect="auto")
    if rows * columns <= 128:
        for i, j in np.ndindex(rows, columns):
            number = str(i * columns + j)
            axes.text(j, i, number, ha="center", va="center", color="black")
    axes.set_xlabel(f"{names[-1]} = {columns}")
    outer = ", ".join(f"{a}={n}" for a, n in zip(names[:-1], sizes[:-1], strict=True))
    axes.set_ylabel(outer or "one row")
    axes.set_xticks([])
    axes.set_yticks([])
    return figure


def traffic_figure(explanations: Sequence[Explanation]) -> matplotlib.figure.Figure:
    """Bytes sent per device and step over each mesh axis, hidden and exposed."""
    labels, parts = [], []
    for e in explanations:
        groups = dict.fromkeys(row.axes for row in e.traffic if row.found_bytes)
        for group in groups:
            rows = [row for row in e.traffic if row.axes == group]
            exposed = sum(row.exposed_bytes for row in rows)
            hidden = sum(row.found_bytes for row in rows) - exposed
            labels.append(_label(e.layout, f"over {'*'.join(group) or 'others'}"))
            parts.append([(hidden, _HIDDEN), (exposed, _EXPOSED)])
    figure = _bars_figure(labels, parts, "sent per device and step")
    legend = ("hidden behind compute", _HIDDEN), ("exposed", _EXPOSED)
    _add_legend(figure, legend if labels else ())
    return figure


@with_look
def schedule_figure(pipeline: PipelineReport) -> matplotlib.figure.Figure:
    """The schedule as a grid of stages and ticks, coloured by microbatch.

    Boxes are forward (F), backward (B) and weight-gradient (W) passes.
    """
    width = min(24.0, 1.5 + 0.42 * pipeline.ticks)
    size = width, 0.9 + 0.75 * pipeline.stages
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    colors = matplotlib.colormaps["tab20"]
    kinds = sorted({op[0] for op in pipeline.ops}, key="FBW".index)
    for kind, microbatch, chunk, stage, tick in pipeline.ops:
        row = stage + kinds.index(kind) / len(kinds)
        box = (tick, row), 1, 0.94 / len(kinds)
        shade = _SHADES[kind]  # On white, whatever the background.
        color = shade * np.array(colors(microbatch % 20)[:3]) + 1 - shade
        axes.add_patch(matplotlib.patches.Rectangle(*box, fc=color, ec="0.3", lw=0.4))
        if pipeline.ticks <= 60:
            name = f"{kind}{microbatch}{'abcdefgh'[chunk] if chunk else ''}"
            middle = row + 0.47 / len(kinds)
            place = dict(ha="center", va="center", fontsize=8.5, color="black")
            axes.text(tick + 0.5, middle, name, **place)
    axes.set_xlim(0, pipeline.ticks)
    axes.set_ylim(pipeline.stages, 0)
    axes.set_yticks(np.arange(pipeline.stages) + 0.47, range(pipeline.stages))
    axes.set_ylabel("stage")
    axes.set_xlabel("tick")
    axes.set_title(f"{pipeline.schedule}: bubble {pipeline.bubble:.3f}", fontsize=9)
    return figure
