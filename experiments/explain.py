r"""Says what a layout does to a model: specs, memory, collectives, warnings.

    python -m experiments.explain --recipe=llama2-7b --layout="fsdp=16,remat=full" \
        --batch_size=16 --topology=v5e:4x4 --html=report.html

Compiles, and runs nothing: with --topology for machines that are not here. Exits 0, or
1 if the compiled program breaks its contract.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

import jax
import rich.console
import rich.table
from absl import flags

import meshpar
from experiments import building, command_line, data, explain_page
from experiments.config import Config
from meshpar import mesh
from meshpar.errors import MeshparError
from meshpar.explain.report import Explanation, PipelineReport, explain

flags.adopt_module_key_flags(command_line)
TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Compile for v5e:4x4, v5p:4x4x2, v6e:4x4, h100:8, h200:8, ..."
)
DIFF = flags.DEFINE_string("diff", "", "A second layout, side by side.")
JSON = flags.DEFINE_bool("json", False, "Print JSON for programs.")
HTML = flags.DEFINE_string("html", "", "Write one page with pictures to this file.")
PNG = flags.DEFINE_string("png", "", "Draw the pipeline's schedule into this file.")
PARAMETERS = flags.DEFINE_bool("parameters", True, "List every parameter.")


def gigabytes(size: float) -> str:
    """Bytes in the unit that fits."""
    if math.isinf(size):
        return "unbounded"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"


def _parameters(explanation: Explanation) -> rich.table.Table:
    table = rich.table.Table("parameter", "shape", "spec", "per device", "reason")
    for leaf in explanation.parameters:
        spec = ", ".join("*".join(axes) or "-" for axes in leaf.spec)
        shape = "x".join(map(str, leaf.shape))
        size = gigabytes(leaf.bytes_per_device)
        table.add_row(
            leaf.path, shape, f"[{spec}]".replace("[", r"\["), size, leaf.reason
        )
    return table


def _memory(explanations: Sequence[Explanation]) -> rich.table.Table:
    table = rich.table.Table("bytes per device", *(e.layout for e in explanations))
    predicted = [e.predicted and dataclasses.asdict(e.predicted) for e in explanations]
    if all(predicted):
        for kind in predicted[0]:
            table.add_row(f"predicted {kind}", *(gigabytes(p[kind]) for p in predicted))
        totals = (gigabytes(e.predicted.total) for e in explanations)
        table.add_row("predicted total", *totals)
    table.add_row("state, exact", *(gigabytes(e.state_bytes) for e in explanations))
    for kind in ("arguments", "temporary", "peak"):
        sizes = (gigabytes(e.compiled_bytes[kind]) for e in explanations)
        table.add_row(f"compiled {kind}", *sizes)
    return table


def _traffic(explanation: Explanation) -> rich.table.Table:
    why = rich.table.Column("why", overflow="fold")
    columns = ("collective", "axes", "declared", "found", "exposed", "runs", why)
    table = rich.table.Table(*columns, title="sent per device and step")
    for row in explanation.traffic:
        table.add_row(
            row.kind,
            "*".join(row.axes) or "none of the mesh",
            ("at most " if row.bounded else "") + gigabytes(row.declared_bytes),
            gigabytes(row.found_bytes),
            gigabytes(row.exposed_bytes),
            str(row.executions),
            "; ".join(row.why),
        )
    return table


def _formula(value: float, formula: str) -> str:
    return f" (formula {formula} = {value:.4f})"


def _print_pipeline(console: rich.console.Console, pipeline: PipelineReport) -> None:
    """The schedule as text, and what it costs."""
    layers = "/".join(map(str, pipeline.layers))
    console.print(
        f"schedule {pipeline.schedule}: {pipeline.stages} stages, layers {layers}, "
        f"{pipeline.microbatches} microbatches, {pipeline.ticks} ticks",
        soft_wrap=True,
    )
    console.print(pipeline.text, soft_wrap=True, markup=False)
    formula = "" if pipeline.formula is None else _formula(*pipeline.formula)
    console.print(
        f"bubble {pipeline.bubble:.4f}{formula}; stage inputs "
        f"in flight {'/'.join(map(str, pipeline.in_flight))}; "
        f"{gigabytes(pipeline.saved_bytes)} kept between forward and backward passes; "
        f"{pipeline.sends} sends per stage and step",
        soft_wrap=True,
    )


def print_report(explanations: Sequence[Explanation]) -> None:
    """Prints one or two explanations as tables."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    for e in explanations:
        sizes = "*".join(f"{axis}={size}" for axis, size in e.mesh.items())
        console.print(
            f"[bold]{e.layout}[/]: lowering {e.lowering}, {sizes} x {e.device_kind}",
            soft_wrap=True,
        )
        if e.why_auto:
            console.print(e.why_auto, soft_wrap=True)
        if e.mode:
            console.print(e.mode, soft_wrap=True)
        if e.pipeline is not None:
            _print_pipeline(console, e.pipeline)
        if PARAMETERS.value:
            console.print(_parameters(e))
        console.print(_traffic(e))
        for path, reason in e.replicated.items():
            console.print(f"replicated: {path} ({reason})", soft_wrap=True)
        for warning in e.warnings:
            console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)
        for violation in e.violations:
            console.print(f"[bold red]VIOLATION:[/] {violation}", soft_wrap=True)
        if not e.violations:
            console.print("the compiled program keeps the contract")
    console.print(_memory(explanations))


def explain_config(
    config: Config, layout: meshpar.Layout, devices: Sequence[jax.Device]
) -> Explanation:
    """Explains a configuration whose vocabulary is known."""
    return explain(building.make_program(config, layout, devices))


def main(_: Sequence[str]) -> int:
    """Explains, and returns the exit code."""
    config = command_line.config_from_flags()
    if TOPOLOGY.value:
        layout = meshpar.layouts.parse(config.layout or "data=1")
        jax.config.update("jax_platforms", "cpu")
        meshpar.simulate(1)
        devices = mesh.topology(TOPOLOGY.value)
        if not config.layout:
            layout = meshpar.layouts.parse(f"fsdp={len(devices)}")
    else:
        layout, devices = command_line.start_devices(config)
    layouts = [layout]
    if DIFF.value:
        layouts.append(meshpar.layouts.parse(DIFF.value))
    if config.model.vocab == 0:
        config = building.fit_vocabulary(config, data.load(config.data))
    explanations = [explain_config(config, one, devices) for one in layouts]
    if PNG.value:
        if explanations[0].pipeline is None:
            raise MeshparError(f"--png draws a schedule, and {layout} has no pipe=N")
        explain_page.schedule_figure(explanations[0].pipeline).savefig(PNG.value)
    if HTML.value:
        explain_page.write(HTML.value, config.recipe, explanations)
    if JSON.value:
        found = [e.as_dict() for e in explanations]
        print(json.dumps(found if DIFF.value else found[0]))
    else:
        print_report(explanations)
    return 1 if any(e.violations for e in explanations) else 0


if __name__ == "__main__":
    command_line.run(main)
