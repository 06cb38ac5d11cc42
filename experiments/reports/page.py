"""HTML page that explains layouts, in one file with its pictures."""

import html
import math
from collections.abc import Sequence

from experiments.reports import pictures
from meshpar.explain.report import Explanation
from meshpar.pipeline.report import PipelineReport

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem;
  color: #1b1f24; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-size: 13px; }
td, th { border-bottom: 1px solid #d8dee4; padding: .25rem .6rem; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: #b42318; font-weight: 600 } .warn { color: #8a5a00 }
.good { color: #1a7f37 } svg { max-width: 100%; height: auto }
"""


def _pipeline_section(pipeline: PipelineReport | None) -> str:
    if pipeline is None:
        return ""
    formula = ""
    if pipeline.formula is not None:
        formula = f"; formula {pipeline.formula[1]} = {pipeline.formula[0]:.4f}"
    picture = pictures.svg(pictures.schedule_figure(pipeline))
    in_flight = ", ".join(map(str, pipeline.in_flight))
    return (
        f"<h3>Pipeline</h3>"
        f"{picture}<p>Bubble {pipeline.bubble:.4f}"
        f"{html.escape(formula)}. Stage inputs in flight: {in_flight}. "
        f"Saved between forward and backward passes: {pipeline.saved_bytes:,} bytes. "
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
    """One layout: verdict, mesh, pipeline, collectives and parameters."""
    items = [f'<p class="bad">Violation: {html.escape(v)}</p>' for v in e.violations]
    items += [f'<p class="warn">Warning: {html.escape(w)}</p>' for w in e.warnings]
    if not e.violations:
        items.append('<p class="good">The compiled program keeps the contract.</p>')
    traffic = [
        (
            row.kind,
            "*".join(row.axes),
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
            leaf.kind,
            "x".join(map(str, leaf.shape)),
            ", ".join("*".join(axes) or "-" for axes in leaf.spec),
            leaf.bytes_per_device,
            leaf.reason,
        )
        for leaf in e.parameters
    ]
    header = ("collective", "axes", "declared", "", "found", "exposed", "runs", "why")
    columns = ("variable", "kind", "shape", "spec", "bytes per device", "reason")
    return (
        f"<h2>{html.escape(e.layout)}</h2><p>Lowering {e.lowering} on "
        f"{html.escape(e.device_kind)}. {html.escape(e.why_auto)}</p>"
        f"{''.join(items)}<h3>Mesh</h3>"
        f"{pictures.mesh_picture(e)}{_pipeline_section(e.pipeline)}<h3>Collectives</h3>"
        "<p>Bytes sent per device and step.</p>"
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
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><body><h1>{title}</h1><h2>Memory</h2>"
        f"{pictures.memory_picture(explanations)}<h2>Traffic</h2>"
        f"{pictures.traffic_picture(explanations)}"
        f"{''.join(map(_section, explanations))}</body></html>"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
