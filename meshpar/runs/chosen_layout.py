"""The layout of a run: the one that is named, the default, or the planner's."""

import pathlib
from collections.abc import Callable, Sequence

import jax

from meshpar.layouts.layout import Layout, parse
from meshpar.mesh.machine import machine_of
from meshpar.multihost import agree
from meshpar.runs import planned_layout, programs
from meshpar.runs.config import AUTO, RunConfig
from meshpar.runs.planned_layout import PlannedLayout


def chosen_layout(
    config: RunConfig,
    devices: Sequence[jax.Device],
    folder: pathlib.Path | None,
    say: Callable[[str], None],
) -> tuple[Layout, PlannedLayout | None]:
    """The layout of a run, and the plan that it comes from if it is the planner's.

    Args:
      config: the run.
      devices: the devices to fill where the layout is not named; of several islands
        each gets its part of them.
      folder: of the run, which goes on under the layout that was planned for it.
      say: prints a line.

    Raises:
      MeshparError: no layout fits.
    """
    devices = devices[: max(1, len(devices) // programs.num_islands(config))]
    if config.layout == AUTO:
        planned = _planned(config, devices, folder, say)
        return parse(planned.layout), planned
    return parse(config.layout or config.default_layout(len(devices))), None


def _planned(
    config: RunConfig,
    devices: Sequence[jax.Device],
    folder: pathlib.Path | None,
    say: Callable[[str], None],
) -> PlannedLayout:
    """The layout that the planner takes for layout=auto; says which, and why.

    Raises:
      MeshparError: no layout fits.
    """
    config, run = config.prepared()
    facts = planned_layout.facts_of(config, run, machine_of(devices))
    found = planned_layout.read(folder) if folder else None
    # All processes go by what the first one sees and plans.
    found, facts = agree.allgather_objects("facts of the plan", (found, facts))[0]
    if found and found.facts == facts:
        ratio = planned_layout.step_over_predicted(folder)
        note = f"; its steps took {ratio:.2f} times as long" if ratio else ""
        say(f"layout=auto goes on with {found}{note}")
        return found
    if found:
        say(f"layout=auto plans again: {planned_layout.changed(found.facts, facts)}")
    plans = programs.make_plans(config, run, devices, top=1)
    best = plans.best[0]
    number = 1 + len(plans.others)
    sizes = best.seconds.total, best.memory.total, number
    planned = PlannedLayout(str(best.layout), *sizes, facts)
    planned = agree.allgather_objects("plan", planned)[0]
    say(f"layout=auto took {planned}")
    return planned
