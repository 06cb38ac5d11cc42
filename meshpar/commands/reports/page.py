"""HTML page that explains layouts, in one file with its pictures."""

import html
from collections.abc import Sequence

from meshpar import html_page
from meshpar.commands.reports import pictures, roofs
from meshpar.explain.report import Explanation
from meshpar.pipeline.report import PipelineReport
from meshpar.units import readable_bytes


def _pipeline_section(pipeline: PipelineReport | None) -> str:
    if pipeline is None:
        return ""
    formula = ""
    if pipeline.formula is not None:
        formula = f"; formula {pipeline.formula[1]} = {pipeline.formula[0]:.4f}"
    picture = pictures.picture(pictures.schedule_figure(pipeline))
    in_flight = ", ".join(map(str, pipeline.in_flight))
    return (
        f"<h3>Pipeline</h3>"
        f"{picture}<p>Bubble {pipeline.bubble:.4f}"
        f"{html.escape(formula)}. Stage inputs in flight: {in_flight}. "
        f"Saved between forward and backward passes: "
        f"{readable_bytes(pipeline.saved_bytes)}. "
        f"Sends per stage and step: {pipeline.sends}.</p>"
    )


def _section(e: Explanation) -> str:
    """One layout: verdict, mesh, pipeline, collectives and parameters."""
    items = [f'<p class="bad">Violation: {html.escape(v)}</p>' for v in e.violations]
    items += [f'<p class="warn">Warning: {html.escape(w)}</p>' for w in e.warnings]
    kept = "bad" if e.violations else "good"
    items.append(f'<p class="{kept}">{html.escape(str(e.shares))}</p>')
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
        f"{pictures.picture(pictures.mesh_figure(e))}{_pipeline_section(e.pipeline)}"
        "<h3>Collectives</h3><p>Sent per device and step.</p>"
        f"{html_page.table(header, traffic)}<h3>Parameters and state</h3>"
        f"{html_page.table(columns, parameters)}"
    )


def _roofline(steps: roofs.Steps | None) -> str:
    if steps is None:
        return ""
    return (
        f"<h2>Roofline</h2>{pictures.picture(roofs.figure(steps))}"
        f"{html_page.table(roofs.TITLES, steps.rows)}"
        f"<p>{html.escape(steps.words)}.</p>"
    )


def write(
    path: str,
    recipe: str,
    explanations: Sequence[Explanation],
    plan_command: str,
    steps: roofs.Steps | None = None,
) -> None:
    """Writes the page; it needs no other file.

    Args:
      path: where to write it.
      recipe: name of the model, for the title.
      explanations: one per layout.
      plan_command: plans layouts for the same model, batch and machine.
      steps: of several batch sizes, under the first layout.
    """
    layouts = ", ".join(e.layout for e in explanations)
    body = (
        f"<h2>Memory</h2>{pictures.picture(pictures.memory_figure(explanations))}"
        f"<h2>Traffic</h2>{pictures.picture(pictures.traffic_figure(explanations))}"
        f"{_roofline(steps)}"
        f"{''.join(map(_section, explanations))}"
        "<h2>Other layouts</h2><p>All layouts of this model, ranked:"
        f'</p><pre class="wide">{html.escape(plan_command)}</pre>'
    )
    html_page.write(path, f"{recipe}: {layouts}", body)
