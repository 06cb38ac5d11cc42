r"""Ranks the layouts of a model on a machine that need not be present.

    meshpar plan my_run.py:gpt --topology=v5p:4x4x2 --batch_size=128
    meshpar plan my_run.py:gpt --topology=v5e:8x8 --batch_size=64 \
        --memory=12GB --require=zero=3 --forbid=tensor --compile=2 --html=plan.html

It predicts memory, traffic and time of every layout and compiles nothing; --compile=K
compiles the best K, and prints what was predicted beside what was compiled. Exits 0, or
1 if a compiled program breaks its contract or needs more memory than there is.
"""

import json
import re
from collections.abc import Sequence

import jax
from absl import flags

from meshpar.commands import command_line, outputs
from meshpar.commands.devices import start_devices
from meshpar.commands.reports import pictures, plan_page, planning
from meshpar.errors import ConfigError
from meshpar.explain.report import explain
from meshpar.mesh import simulate
from meshpar.mesh import topology as topology_of
from meshpar.runs import planned_layout, programs
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.config import RunConfig
from meshpar.settings import Number

TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Plan for v5e:4x4, 8*v5p:8x8x4, h100:8, ...; else for this machine."
)
TOP = flags.DEFINE_integer("top", 5, "Layouts to list.")
MEMORY = flags.DEFINE_string(
    "memory", "", "Memory that a step may take on a device, such as 60GB."
)
REQUIRE = flags.DEFINE_string(
    "require", "", "Items that layouts must have, such as zero=3,remat=full."
)
FORBID = flags.DEFINE_string(
    "forbid", "", "Axes and options that layouts must not use, such as tensor,pipe."
)
MEASURED = flags.DEFINE_list(
    "measured", [], "Folders of runs of --layout=auto, whose steps correct the times."
)
COMPILE = flags.DEFINE_integer("compile", 0, "Compile so many of the best layouts.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of tables.")
PNG = flags.DEFINE_string("png", "", "Draw time over memory into this file.")
HTML = flags.DEFINE_string("html", "", "Write a page of the plan into this file.")
command_line.limit(TOP, Number(1, 1000, "layouts"))
command_line.limit(COMPILE, Number(0, 100, "layouts", "0 to compile none"))

_NOT_READ = {
    "layout": "a plan looks for the layout, and --require asks for parts of it",
    "lowering": "the planner predicts shard_map programs",
    "optimizer_mode": "the planner predicts synchronous training",
}
_UNITS = {"GB": 1e9, "GiB": 2**30, "MB": 1e6, "MiB": 2**20}


def _memory() -> int | None:
    """Bytes of --memory.

    Raises:
      ConfigError: it is no size.
    """
    if not MEMORY.value:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([GM]i?B)", MEMORY.value)
    if not match or not float(match.group(1)):
        raise ConfigError(
            f"--memory={MEMORY.value}: write a size such as 60GB, 80GiB or 512MB"
        )
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def _devices(config: RunConfig) -> Sequence[jax.Device]:
    """The devices to plan for: of --topology, or of this machine."""
    if not TOPOLOGY.value:
        return start_devices(config)[1]
    command_line.refuse_unread(*command_line.OF_CONFIG)
    command_line.use_cpu()
    simulate(1)
    return topology_of(TOPOLOGY.value)


TAKES = (
    *command_line.of_config_but(
        command_line.LAYOUT,
        command_line.LOWERING,
        command_line.OPTIMIZER_MODE,
        command_line.SEED,
    ),
    *command_line.OF_DEVICES,
)
"""The shared flags that it reads."""


def main(_: Sequence[str]) -> int:
    """Plans, and returns the exit code."""
    config = command_line.config_from_flags()
    if config.layout:
        raise ConfigError(
            f"layout={config.layout}: a plan looks for the layout; ask for parts of "
            "it by --require"
        )
    if PNG.value:
        pictures.check_format(PNG.value)
    for name, path in (("--png", PNG.value), ("--html", HTML.value)):
        if path:
            outputs.check_file(path, name)
    _memory()
    devices = _devices(config)
    config, run = config.prepared()
    kind = devices[0].device_kind
    slowdown = planned_layout.measured(MEASURED.value, kind) if MEASURED.value else 1.0
    plans = programs.make_plans(
        config,
        run,
        devices,
        memory=_memory(),
        require=REQUIRE.value,
        forbid=FORBID.value,
        top=max(TOP.value, COMPILE.value),
        slowdown=slowdown,
    )
    compiled = [
        explain(programs.make_program(config, run, candidate.layout, devices))
        for candidate in plans.best[: COMPILE.value]
    ]
    if PNG.value:
        planning.pareto_figure(plans).savefig(PNG.value)
    if HTML.value:
        machine = TOPOLOGY.value or f"{len(devices)} devices"
        title = f"{config.recipe}, {config.batch_size} samples, on {machine}"
        for name, asked in (("require", REQUIRE.value), ("forbid", FORBID.value)):
            title += f", {name}={asked}" * bool(asked)
        plan_page.write(HTML.value, title, plans, compiled, TOP.value)
    if JSON.value:
        print(json.dumps(planning.as_dict(plans, compiled)))
    else:
        planning.print_plans(plans, compiled, TOP.value)
    return 1 if any(planning.faults(plans, e) for e in compiled) else 0


def start(known: Catalog = FILES_ALONE) -> None:
    """Runs the command.

    Args:
      known: the recipes that it knows by name.
    """
    command_line.run(main, TAKES, _NOT_READ, known=known)


if __name__ == "__main__":
    start()
