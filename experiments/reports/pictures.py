"""Pictures of layouts: memory, mesh, collectives, and the schedule of a pipeline."""

import dataclasses
import io
import math
import pathlib
from collections.abc import Sequence

import matplotlib
import matplotlib.figure
import matplotlib.patches
import numpy as np

from experiments.recipes.errors import ConfigError
from meshpar.explain.report import Explanation
from meshpar.layouts.axes import DATA
from meshpar.pipeline.report import PipelineReport

matplotlib.use("Agg")
# Layouts hold regexes: their dollar signs are no formulas.
matplotlib.rcParams["text.parse_math"] = False

_SHADES = {"F": 0.85, "B": 0.5, "W": 0.25}


def check_format(path: str) -> None:
    """Raises ConfigError for a file whose suffix is no format of pictures."""
    suffix = pathlib.PurePath(path).suffix.removeprefix(".").lower()
    known = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    if suffix and suffix not in known:
        raise ConfigError(
            f"{path}: no pictures are written as .{suffix}; use .png or one of "
            f"{', '.join(sorted(known))}"
        )


def svg(figure: matplotlib.figure.Figure) -> str:
    """The figure as an <svg> element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def memory_picture(explanations: Sequence[Explanation]) -> str:
    """Memory per device as stacked bars: predicted by kind, and compiled."""
    figure = matplotlib.figure.Figure(figsize=(8, 1.2 + 0.9 * len(explanations)))
    axes, labels = figure.add_subplot(), []
    for e in explanations:
        if e.predicted is not None:
            left, kinds = 0.0, dataclasses.asdict(e.predicted)
            for number, (kind, size) in enumerate(kinds.items()):
                label = kind if not labels else None
                color = f"C{number}"
                axes.barh(len(labels), size / 1e9, left=left, color=color, label=label)
                left += size / 1e9
            labels.append(f"{e.layout}\npredicted")
        axes.barh(len(labels), e.compiled_bytes["peak"] / 1e9, color="0.6")
        labels.append(f"{e.layout}\ncompiled")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("GB per device")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return svg(figure)


def mesh_picture(explanation: Explanation) -> str:
    """The mesh as a grid: the last axis in columns, the others in rows."""
    names = [axis for axis, size in explanation.mesh.items() if size > 1] or [DATA]
    sizes = [explanation.mesh[axis] for axis in names]
    rows, columns = math.prod(sizes[:-1]), sizes[-1]
    figure = matplotlib.figure.Figure(
        figsize=(min(10, 1.5 + 0.6 * columns), min(8, 0.9 + 0.4 * rows))
    )
    axes = figure.add_subplot()
    groups = np.repeat(np.arange(rows) % 10, columns).reshape(rows, columns)
    axes.imshow(groups, cmap="tab10", alpha=0.35, aspect="auto", vmin=0, vmax=9)
    if rows * columns <= 128:
        for i, j in np.ndindex(rows, columns):
            number = str(i * columns + j)
            axes.text(j, i, number, ha="center", va="center", fontsize=7)
    axes.set_xlabel(f"{names[-1]} = {columns}")
    outer = ", ".join(f"{a}={n}" for a, n in zip(names[:-1], sizes[:-1], strict=True))
    axes.set_ylabel(outer or "one row", fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    return svg(figure)


def traffic_picture(explanations: Sequence[Explanation]) -> str:
    """Bytes sent per device and step over each mesh axis, hidden and exposed."""
    figure = matplotlib.figure.Figure(figsize=(8, 2.6))
    axes, ticks = figure.add_subplot(), []
    for e in explanations:
        groups = dict.fromkeys(row.axes for row in e.traffic if row.found_bytes)
        for group in groups:
            rows = [row for row in e.traffic if row.axes == group]
            exposed = sum(row.exposed_bytes for row in rows) / 1e9
            hidden = sum(row.found_bytes for row in rows) / 1e9 - exposed
            first = not ticks
            position, label = len(ticks), "hidden behind compute" if first else None
            axes.bar(position, hidden, color="C2", label=label)
            label = "exposed" if first else None
            axes.bar(position, exposed, bottom=hidden, color="C3", label=label)
            ticks.append(f"{'*'.join(group) or 'other'}\n{e.layout}")
    axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
    axes.set_ylabel("GB sent per device and step")
    if ticks:
        axes.legend(fontsize=7)
    return svg(figure)


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
        color = (*colors(microbatch % 20)[:3], _SHADES[kind])
        axes.add_patch(matplotlib.patches.Rectangle(*box, fc=color, ec="0.3", lw=0.4))
        if pipeline.ticks <= 60:
            name = f"{kind}{microbatch}{'abcdefgh'[chunk] if chunk else ''}"
            middle = row + 0.47 / len(kinds)
            axes.text(tick + 0.5, middle, name, ha="center", va="center", fontsize=6)
    axes.set_xlim(0, pipeline.ticks)
    axes.set_ylim(pipeline.stages, 0)
    axes.set_yticks(np.arange(pipeline.stages) + 0.47, range(pipeline.stages))
    axes.set_ylabel("stage")
    axes.set_xlabel("tick")
    axes.set_title(f"{pipeline.schedule}: bubble {pipeline.bubble:.3f}", fontsize=9)
    return figure
