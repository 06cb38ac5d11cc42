r"""Explains a model under a layout: specs, memory, collectives, warnings.

    meshpar explain my_run.py:gpt --layout="fsdp=16,remat=full" \
        --batch_size=16 --topology=v5e:4x4 --html=report.html

It compiles the step, or with --generate prefill and decoding, and runs nothing;
--topology compiles for machines that are not present. Exits 0, or 1 if the compiled
program breaks its contract.
"""

import json
import shlex
from collections.abc import Sequence

import jax
from absl import flags

from meshpar import mesh
from meshpar.commands import command_line, outputs
from meshpar.commands.devices import start_devices
from meshpar.commands.reports import explanation, page, pictures, roofs, terminal
from meshpar.errors import ConfigError
from meshpar.explain.generation import explain_generation
from meshpar.explain.report import explain
from meshpar.generation import Generator, generator
from meshpar.layouts.axes import FSDP
from meshpar.layouts.layout import Layout, parse
from meshpar.mesh import simulate
from meshpar.mesh.chips import chip_of
from meshpar.runs import programs
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.config import RunConfig, check_setting
from meshpar.runs.run import Run

TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Compile for v5e:4x4, v5p:4x4x2, v6e:4x4, h100:8, h200:8, ..."
)
DIFF = flags.DEFINE_string("diff", "", "A second layout to compare with.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of tables.")
HTML = flags.DEFINE_string("html", "", "Write one page with pictures to this file.")
PNG = flags.DEFINE_string("png", "", "Draw the pipeline's schedule into this file.")
ROOFLINE = flags.DEFINE_list(
    "roofline", None, "Batch sizes whose steps are put under the chip's roofline."
)
GENERATE = flags.DEFINE_bool(
    "generate", False, "Explain prefill and decoding in place of a training step."
)
PARAMETERS = flags.DEFINE_bool("parameters", True, "List every parameter.")


def _devices(config: RunConfig) -> tuple[Layout, list[jax.Device]]:
    """The layout and its devices, of this machine or of --topology."""
    if not TOPOLOGY.value:
        return start_devices(config)
    command_line.refuse_unread(*command_line.OF_CONFIG)
    command_line.use_cpu()
    simulate(1)
    devices = mesh.topology(TOPOLOGY.value)
    layout = config.layout or f"{FSDP}={len(devices)}"
    return parse(layout), devices


def _batch_sizes(devices: Sequence[jax.Device]) -> list[int]:
    """The batch sizes of --roofline.

    Raises:
      ConfigError: they are no batch sizes, or nothing is known about the chip.
    """
    if ROOFLINE.value is None:
        return []
    if GENERATE.value:
        raise ConfigError("--roofline is of training steps; leave out --generate")
    words = [word for word in ROOFLINE.value if not word.strip().isdecimal()]
    sizes = sorted({int(word) for word in ROOFLINE.value}) if not words else []
    if len(sizes) < 2:
        raise ConfigError(
            f"--roofline={','.join(ROOFLINE.value)}: give two batch sizes or more, "
            "such as --roofline=8,16,32"
        )
    for size in sizes:
        check_setting("batch_size", size)
    if chip_of(kind := devices[0].device_kind) is None:
        raise ConfigError(
            f"--roofline: the rates of {kind} are not known; add a machine, such as "
            "--topology=v5e:2x4"
        )
    return sizes


def _check_pictures(layout: Layout) -> None:
    """Raises ConfigError for files that cannot be drawn or written."""
    if PNG.value:
        pictures.check_format(PNG.value)
        if GENERATE.value:
            raise ConfigError("--png draws a schedule, and --generate has none")
        if layout.pipe == 1:
            raise ConfigError(
                f"--png draws a schedule, and {layout} has no pipe=N; add it, or leave "
                "out --png"
            )
    for name, path in (("--png", PNG.value), ("--html", HTML.value)):
        if path:
            outputs.check_file(path, name)


def _generator(
    config: RunConfig, run: Run, layout: Layout, devices: list[jax.Device]
) -> Generator:
    """The recipe's model as it generates, for sequences of its own length.

    Raises:
      ConfigError: the recipe gives no length.
    """
    if not run.length:
        raise ConfigError(
            "--generate needs the length of sequences; add length=TOKENS to the "
            "recipe's meshpar.Run"
        )
    return generator(
        run.model,
        layout,
        max_length=run.length,
        batch_size=command_line.BATCH_SIZE.value or 0,
        devices=devices,
        compute_dtype=programs.compute_dtype(config),
    )


def _plan_command(num_devices: int) -> str:
    """The command that plans for the model, the batch and the machine of this one."""
    names = "RECIPE", "BATCH_SIZE", "DATA", "TOKENIZER", "PLATFORM"
    own = (*(getattr(command_line, name) for name in names), TOPOLOGY)
    words = [flag.serialize() for flag in own if flag.present]
    given = command_line.SET.value or ()
    settings = (text for text in given if not text.startswith("layout="))
    words += [f"--set={text}" for text in settings]
    if not TOPOLOGY.value:
        words.append(f"--devices={num_devices}")
    return shlex.join([*command_line.program("plan"), *words, "--html=plan.html"])


TAKES = (*command_line.of_config_but(command_line.SEED), *command_line.OF_DEVICES)
"""The shared flags that it reads."""


def main(_: Sequence[str]) -> int:
    """Explains, and returns the exit code."""
    config = command_line.config_from_flags()
    layout, devices = _devices(config)
    layouts = [layout]
    if DIFF.value:
        layouts.append(parse(DIFF.value))
    _check_pictures(layout)
    sizes = _batch_sizes(devices)
    config, run = config.prepared()
    # All layouts are checked before the first is compiled.
    if GENERATE.value:
        generators = [_generator(config, run, layout, devices) for layout in layouts]
        explanations = [e for g in generators for e in explain_generation(g)]
    else:
        lowered = [
            programs.make_program(config, run, layout, devices) for layout in layouts
        ]
        by_rows = {
            rows: programs.make_program(
                config, run, layout, devices, run.data.abstract_batch(rows)
            )
            for rows in sizes
        }
        explanations = [explain(program) for program in lowered]
    steps = None
    if sizes:
        works = {rows: program.inspection.work for rows, program in by_rows.items()}
        steps = roofs.Steps(chip_of(devices[0].device_kind), works)
    if PNG.value:
        pictures.schedule_figure(explanations[0].pipeline).savefig(PNG.value)
    if HTML.value:
        command = _plan_command(len(devices))
        page.write(HTML.value, config.recipe, explanations, command, steps)
    if JSON.value:
        reports = [e.as_dict() for e in explanations]
        if steps is not None:
            reports[0]["roofline"] = steps.as_dict()
        print(json.dumps(reports if len(reports) > 1 else reports[0]))
    else:
        explanation.print_explanations(explanations, PARAMETERS.value)
        if steps is not None:
            terminal.wide_console().print(roofs.table(steps))
    return 1 if any(e.violations for e in explanations) else 0


def start(known: Catalog = FILES_ALONE) -> None:
    """Runs the command.

    Args:
      known: the recipes that it knows by name.
    """
    command_line.run(main, TAKES, known=known)


if __name__ == "__main__":
    start()
