r"""Checks any jax step: its traffic, its memory and its mistakes, line by line.

    meshpar check my_step.py:make_step --topology=v5e:4x4 --html=step.html

The function returns (step, *arguments): a jitted step and what it is called with. The
step is compiled and not run, unless --against="one device" compares it. Without an
accelerator 8 CPU devices are simulated, or as many as the topology has chips. Exits 0,
or 1 if the step has what --assert_no forbids, or differs.
"""

import math
from collections.abc import Sequence

import jax
from absl import flags

from meshpar.checker import check
from meshpar.commands import command_line, outputs
from meshpar.errors import ConfigError
from meshpar.mesh import simulate
from meshpar.mesh.platform import JAX_PLATFORMS
from meshpar.mesh.topologies import parse_topology
from meshpar.runs import recipe_file

TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Compile for v5e:4x4, v5p:4x4x2, v6e:4x4, h100:8, h200:8, ..."
)
AGAINST = flags.DEFINE_string("against", "", 'Compare with "one device", and run.')
COMPARED = flags.DEFINE_integer("compared_steps", 1, "Steps of --against.", 1)
THRESHOLD = flags.DEFINE_float(
    "threshold", 0.01, "Least share of traffic or memory, or bytes from 1 on.", 0.0
)
ASSERT_NO = flags.DEFINE_list(
    "assert_no", [], 'Rules or kinds to forbid: "reshard,all_gather over tensor>10MB".'
)
HTML = flags.DEFINE_string("html", "", "Write the report as a page to this file.")
TAKES = (command_line.RECIPE, command_line.DEVICES, command_line.PLATFORM)
"""The shared flags that it reads."""

_SIMULATED = 8
"""Number of simulated CPU devices."""


def _start_jax() -> None:
    """Simulates devices, as many as the step needs, before its file is imported."""
    count = command_line.DEVICES.value or _SIMULATED
    if TOPOLOGY.value:
        _, shape, slices = parse_topology(TOPOLOGY.value)
        count = math.prod(shape) * (slices or 1)
        command_line.use_cpu()
    elif command_line.PLATFORM.value:
        jax.config.update("jax_platforms", JAX_PLATFORMS[command_line.PLATFORM.value])
    simulate(count)


def main(_: Sequence[str]) -> int:
    """Checks, and returns the exit code."""
    if HTML.value:
        outputs.check_file(HTML.value, "--html")
    _start_jax()
    name = command_line.RECIPE.value
    if ":" not in name:
        raise ConfigError("name a function: FILE.py:FUNCTION or MODULE:FUNCTION")
    made = recipe_file.function_of(name)()
    if not isinstance(made, tuple) or len(made) < 2:
        raise ConfigError(f"{name} has to return (step, *arguments), such as (step, x)")
    report = check(
        *made,
        topology=TOPOLOGY.value or None,
        against=AGAINST.value or None,
        steps=COMPARED.value,
        threshold=THRESHOLD.value,
    )
    print(report)
    if HTML.value:
        report.html(HTML.value)
    try:
        report.assert_no(*ASSERT_NO.value)
    except AssertionError as error:
        print(f"forbidden: {error}")
        return 1
    return 0 if report.equality is None or report.equality.ok else 1


def start() -> None:
    """Runs the command."""
    command_line.run(main, TAKES)


if __name__ == "__main__":
    start()
