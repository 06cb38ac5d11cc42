"""HTML page that explains layouts, in one file with its pictures."""

import html
import pathlib
from collections.abc import Sequence

import matplotlib.figure

from experiments.reports import pictures
from experiments.reports.units import readable_bytes
from meshpar.explain.report import Explanation
from meshpar.pipeline.report import PipelineReport

_LOOK = pathlib.Path(__file__).parents[2] / "docs/look.css"


def _picture(figure: matplotlib.figure.Figure) -> str:
    return f'<div class="wide">{pictures.svg(figure)}</div>'


def _pipeline_section(pipeline: PipelineReport | None) -> str:
    if pipeline is None:
        return ""
    formula = ""
    if pipeline.formula is not None:
        formula = f"; formula {pipeline.formula[1]} = {pipeline.formula[0]:.4f}"
    picture = _picture(pictures.schedule_figure(pipeline))
    in_flight = ", ".join(map(str, pipeline.in_flight))
    return (
        f"<h3>Pipeline</h3>"
        f"{picture}<p>Bubble {pipeline.bubble:.4f}"
        f"{html.escape(formula)}. Stage inputs in flight: {in_flight}. "
        f"Saved between forward and backward passes: "
        f"{readable_bytes(pipeline.saved_bytes)}. "
        f"Sends per stage and step: {pipeline.sends}.</p>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; floats are bytes."""

    def cell(value: object) -> str:
        if isinstance(value, int | float):
            text = f"{value:,}" if isinstance(value, int) else readable_bytes(value)
            return f'<td class="number">{text}</td>'
        return f"<td>{html.escape(str(value))}</td>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _section(e: Explanation) -> str:
    """One layout: verdict, mesh, pipeline, collectives and parameters."""
    items = [f'<p class="bad">Violation: {html.escape(v)}</p>' for v in e.violations]
    items += [f'<p class="warn">Warning: {html.escape(w)}</p>' for w in e.warnings]
    if not e.violations:
        items.append('<p class="good">The compiled program keeps the contract.</p>')
    traffic = [
        (
            row.kind,
            "*".join(row.axes),
            ("at most " if row.bounded else "") + readable_bytes(row.declared_bytes),
            float(row.found_bytes),
            float(row.exposed_bytes),
            row.executions,
            "; ".join(row.why),
        )
        for row in e.traffic
    ]
    parameters = [
        (
            leaf.path,
            leaf.kind,
            "x".join(map(str, leaf.shape)),
            ", ".join("*".join(axes) or "-" for axes in leaf.spec),
            float(leaf.bytes_per_device),
            leaf.reason,
        )
        for leaf in e.parameters
    ]
    header = ("collective", "axes", "declared", "found", "exposed", "runs", "why")
    columns = ("variable", "kind", "shape", "spec", "per device", "reason")
    return (
        f"<h2>{html.escape(e.layout)}</h2><p>Lowering {e.lowering} on "
        f"{html.escape(e.device_kind)}. {html.escape(e.why_auto)}</p>"
        f"{''.join(items)}<h3>Mesh</h3>"
        f"{_picture(pictures.mesh_figure(e))}{_pipeline_section(e.pipeline)}"
        "<h3>Collectives</h3><p>Sent per device and step.</p>"
        f"{_table(header, traffic)}<h3>Parameters and state</h3>"
        f"{_table(columns, parameters)}"
    )


def write(path: str, recipe: str, explanations: Sequence[Explanation]) -> None:
    """Writes the page; it needs no other file.

    Args:
      path: where to write it.
      recipe: name of the model, for the title.
      explanations: one per layout.
    """
    layouts = ", ".join(e.layout for e in explanations)
    title = html.escape(f"{recipe}: {layouts}")
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_LOOK.read_text()}</style>"
        f'<body class="report"><h1>{title}</h1><h2>Memory</h2>'
        f"{_picture(pictures.memory_figure(explanations))}<h2>Traffic</h2>"
        f"{_picture(pictures.traffic_figure(explanations))}"
        f"{''.join(map(_section, explanations))}</body></html>"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
