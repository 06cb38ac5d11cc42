"""One self-contained page that explains layouts, with pictures.

Memory per device as stacked bars, the mesh as a grid, traffic per axis, the schedule
of a pipeline.
"""

import dataclasses
import html
import io
import math
from collections.abc import Sequence

import matplotlib
import matplotlib.figure
import matplotlib.patches
import numpy as np

from meshpar.explain.report import Explanation, PipelineReport

matplotlib.use("Agg")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem;
  color: #1b1f24; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-size: 13px; }
td, th { border-bottom: 1px solid #d8dee4; padding: .25rem .6rem; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: #b42318; font-weight: 600 } .warn { color: #8a5a00 }
.good { color: #1a7f37 } svg { max-width: 100%; height: auto }
"""


def _svg(figure: matplotlib.figure.Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def memory_picture(explanations: Sequence[Explanation]) -> str:
    """Stacked bars: predicted by kind, and compiled."""
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
    return _svg(figure)


def mesh_picture(explanation: Explanation) -> str:
    """The mesh as a grid: the last axis across, the others down."""
    names = [axis for axis, size in explanation.mesh.items() if size > 1] or ["data"]
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
    return _svg(figure)


def traffic_picture(explanations: Sequence[Explanation]) -> str:
    """Bytes sent per step by mesh axes, hidden and exposed."""
    figure = matplotlib.figure.Figure(figsize=(8, 2.6))
    axes, ticks = figure.add_subplot(), []
    for e in explanations:
        groups = dict.fromkeys(row.axes for row in e.traffic if row.found_bytes)
        for group in groups:
            rows = [row for row in e.traffic if row.axes == group]
            exposed = sum(row.exposed_bytes for row in rows) / 1e9
            hidden = sum(row.found_bytes for row in rows) / 1e9 - exposed
            first = not ticks
            place, label = len(ticks), "hidden behind compute" if first else None
            axes.bar(place, hidden, color="C2", label=label)
            label = "exposed" if first else None
            axes.bar(place, exposed, bottom=hidden, color="C3", label=label)
            ticks.append(f"{'*'.join(group) or 'other'}\n{e.layout}")
    axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
    axes.set_ylabel("GB sent per device and step")
    if ticks:
        axes.legend(fontsize=7)
    return _svg(figure)


_SHADES = {"F": 0.85, "B": 0.5, "W": 0.25}


def schedule_figure(pipeline: PipelineReport) -> matplotlib.figure.Figure:
    """Stages down, ticks across; boxes F, B and W, coloured by microbatch."""
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


def _pipeline_section(pipeline: PipelineReport | None) -> str:
    if pipeline is None:
        return ""
    formula = ""
    if pipeline.formula is not None:
        formula = f"; formula {pipeline.formula[1]} = {pipeline.formula[0]:.4f}"
    in_flight = ", ".join(map(str, pipeline.in_flight))
    return (
        f"<h3>Pipeline</h3>"
        f"{_svg(schedule_figure(pipeline))}<p>Bubble {pipeline.bubble:.4f}"
        f"{html.escape(formula)}. Stage inputs in flight: {in_flight}. "
        f"Kept between forward and backward passes: {pipeline.saved_bytes:,} bytes. "
        f"Sends per stage and step: {pipeline.sends}.</p>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        number = isinstance(value, int | float)
        text = f"{value:,.0f}" if number else html.escape(str(value))
        return f'<td class="n">{text}</td>' if number else f"<td>{text}</td>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _section(e: Explanation) -> str:
    items = [f'<p class="bad">Violation: {html.escape(v)}</p>' for v in e.violations]
    items += [f'<p class="warn">Warning: {html.escape(w)}</p>' for w in e.warnings]
    if not e.violations:
        items.append('<p class="good">The compiled program keeps the contract.</p>')
    traffic = [
        (
            row.kind,
            "*".join(row.axes) or "none of the mesh",
            "unbounded" if math.isinf(row.declared_bytes) else row.declared_bytes,
            "at most" if row.bounded else "",
            row.found_bytes,
            row.exposed_bytes,
            row.executions,
            "; ".join(row.why),
        )
        for row in e.traffic
    ]
    parameters = [
        (
            leaf.path,
            "x".join(map(str, leaf.shape)),
            ", ".join("*".join(axes) or "-" for axes in leaf.spec),
            leaf.bytes_per_device,
            leaf.reason,
        )
        for leaf in e.parameters
    ]
    header = ("collective", "axes", "declared", "", "found", "exposed", "runs", "why")
    columns = ("parameter", "shape", "spec", "bytes per device", "reason")
    return (
        f"<h2>{html.escape(e.layout)}</h2><p>Lowering {e.lowering} on "
        f"{html.escape(e.device_kind)}. {html.escape(e.why_auto)}</p>"
        f"{''.join(items)}<h3>Mesh</h3>"
        f"{mesh_picture(e)}{_pipeline_section(e.pipeline)}<h3>Collectives</h3>"
        "<p>Bytes sent per device and step.</p>"
        f"{_table(header, traffic)}<h3>Parameters</h3>{_table(columns, parameters)}"
    )


def write(path: str, recipe: str, explanations: Sequence[Explanation]) -> None:
    """Writes the page; it refers to nothing outside itself."""
    layouts = ", ".join(e.layout for e in explanations)
    title = html.escape(f"{recipe}: {layouts}")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><body><h1>{title}</h1><h2>Memory</h2>"
        f"{memory_picture(explanations)}<h2>Traffic</h2>{traffic_picture(explanations)}"
        f"{''.join(map(_section, explanations))}</body></html>"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
