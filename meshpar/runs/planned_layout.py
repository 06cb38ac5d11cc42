"""The layout that the planner took for a run (plan.json), and how its steps compare.

A run that goes on with the same model, batch and machine takes the same layout without
planning again. Steps of such a run log how long they take over what was predicted.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from meshpar.errors import CheckpointError, ConfigError, LayoutError
from meshpar.layouts import parse
from meshpar.mesh.machine import Machine
from meshpar.runs import metrics
from meshpar.runs.code import code_hash
from meshpar.runs.config import RunConfig
from meshpar.runs.run import Run

FILE = "plan.json"
"""Name of the file in the folder of a run."""

STEP_OVER_PREDICTED = "step_over_predicted"
"""Name of the metric: seconds of a step over those that the planner predicted."""

_FEWEST = 10
"""Fewest steps that say something; the first of a start are left out."""


@dataclasses.dataclass(frozen=True)
class PlannedLayout:
    """The best layout for some facts.

    Attributes:
      layout: the layout.
      seconds: of a step, predicted.
      memory: bytes on one device, predicted.
      fitting: number of layouts that fit, of which it is the fastest.
      facts: {name: value} that it was planned for.
    """

    layout: str
    seconds: float
    memory: int
    fitting: int
    facts: Mapping[str, Any]

    def __str__(self):
        return (
            f"{self.layout}: predicted {1e3 * self.seconds:.3g} ms a step and "
            f"{self.memory / 1e9:.3g} GB a device, the fastest of {self.fitting} "
            "that fit"
        )

    def write(self, folder: pathlib.Path) -> None:
        """Writes the file; a process that is killed leaves a whole one.

        Raises:
          CheckpointError: it cannot be written.
        """
        partial = folder / f"{FILE}.partial"
        try:
            partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
            os.replace(partial, folder / FILE)
        except OSError as error:
            raise CheckpointError(
                f"the plan of the run cannot be written: {error}; choose another "
                "--workdir"
            ) from error


def facts_of(config: RunConfig, run: Run, machine: Machine) -> dict[str, Any]:
    """The facts that a plan depends on, as JSON reads them back.

    Args:
      config: the run, with what the data says.
      run: what it trains.
      machine: the machine to plan for.
    """
    params = {path: param.shape for path, param in run.model.params.items()}
    shapes = sorted(params.items()), run.data.abstract_batch(config.batch_size)
    facts = config.plan_facts | {
        "shapes": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "code": " ".join([code_hash("meshpar"), *config.code.values()]),
        "devices": f"{len(machine.devices)} of {machine.devices[0].device_kind}",
        "slices": machine.num_slices,
        "memory_bytes": machine.memory_bytes,
    }
    return json.loads(json.dumps(facts))


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The facts that differ, as "name was X, now Y"."""
    lines = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            old, new = (
                {k: x.get(k) for k in {*old, *new} if old.get(k) != new.get(k)}
                for x in (old, new)
            )
        if old != new:
            lines.append(f"{name} was {old}, now {new}")
    return "; ".join(lines)


def read(folder: pathlib.Path) -> PlannedLayout | None:
    """The plan in the folder of a run; None without one that can be read."""
    try:
        found = PlannedLayout(**json.loads((folder / FILE).read_text()))
        parse(found.layout)
    except (OSError, ValueError, TypeError, LayoutError):
        return None  # Planning again gives it back.
    return found


def step_over_predicted(folder: pathlib.Path) -> float | None:
    """Ratio of measured to predicted step time in one run; None for too few steps."""
    rows = metrics.read(folder / metrics.METRICS)
    ratios = [row[STEP_OVER_PREDICTED] for row in rows if STEP_OVER_PREDICTED in row]
    return statistics.median(ratios) if len(ratios) >= _FEWEST else None


def measured(folders: Sequence[str], device_kind: str) -> float:
    """Ratio of measured to predicted step time: the geometric mean over runs.

    Args:
      folders: of the runs.
      device_kind: of the machine that they are to speak for.

    Raises:
      ConfigError: a run without plan or steps, or on devices of another kind.
    """
    ratios = []
    for name in folders:
        folder = pathlib.Path(name)
        plan, ratio = read(folder), step_over_predicted(folder)
        if plan is None or ratio is None:
            raise ConfigError(
                f"--measured={name}: needs a run of --layout=auto with {_FEWEST} steps "
                f"beside the first ones; {FILE if plan is None else metrics.METRICS} "
                "has none"
            )
        kind = str(plan.facts["devices"]).partition(" of ")[2]
        if kind != device_kind:
            raise ConfigError(
                f"--measured={name}: the run was on {kind}, and the plan is for "
                f"{device_kind}; measure on the same kind of device"
            )
        ratios.append(ratio)
    return statistics.geometric_mean(ratios)
