r"""An upper bound on the gain from a layout for each layer, as predicted.

    python -m experiments.benchmarks.layouts_by_layer

Layers of a stack have policies of rematerialization and uses of `tensor` of their own,
and share all else. If each could have any layout (axes, ZeRO level), and a change of
layouts between two layers cost nothing, memory and time of a step would be averages of
those of uniform layouts. For each machine this prints how much faster the best averages
are than the layouts that the planner has: at the memory of the machine's chips, on
average over 60 budgets from the least memory in which any layout fits up to that, and
at most. It takes half a minute.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import meshpar
from experiments import recipes
from experiments.recipes import optimizers
from meshpar import mesh
from meshpar.commands import command_line
from meshpar.layouts.mixes import is_mix
from meshpar.layouts.wanted import Wanted
from meshpar.mesh.machine import Machine, machine_of
from meshpar.planner.candidate import Candidate
from meshpar.planner.facts import Facts
from meshpar.planner.plans import predicted
from meshpar.planner.space import beside_layers
from meshpar.runs import programs
from meshpar.runs.config import with_settings

_BUDGETS = 60

MACHINES = (
    ("llama2-7b", "v5p:4x4x2", 128),
    ("llama2-7b model.length=2048", "v5e:8x8", 64),
    ("llama2-7b model.length=2048", "2*v5e:4x8", 64),
    ("llama-1b", "v5e:2x4", 16),
    ("llama2-7b", "h100:8", 16),
)
"""(recipe and settings, topology, sequences)."""


class Cost(NamedTuple):
    """The cost of a layout.

    Attributes:
      memory: bytes on one device.
      seconds: of a step.
    """

    memory: float
    seconds: float


class Gain(NamedTuple):
    """Time that averages of layouts save, as shares of the time of the best layout.

    Attributes:
      at_memory: with the memory of the chip.
      mean: over the budgets of memory.
      most: at the budget where they save most.
    """

    at_memory: float
    mean: float
    most: float


def least_seconds(costs: Sequence[Cost], memory: float) -> float:
    """The least time of an average of layouts that fits; infinite if none does.

    An average of two is enough: memory is the only bound.
    """
    best = min((c.seconds for c in costs if c.memory <= memory), default=np.inf)
    for small in (c for c in costs if c.memory <= memory):
        for large in (c for c in costs if c.memory > memory):
            share = (memory - small.memory) / (large.memory - small.memory)
            average = (1 - share) * small.seconds + share * large.seconds
            best = min(best, average)
    return best


def _front(costs: Sequence[Cost]) -> list[Cost]:
    """The Pareto front of memory and time."""
    front: list[Cost] = []
    for cost in sorted(costs):
        if not front or cost.seconds < front[-1].seconds:
            front.append(cost)
    return front


def gain(candidates: Sequence[Candidate], machine: Machine) -> Gain:
    """The saving of averages of all candidates over averages of equal ones.

    Candidates that differ in `remat` and `layers` alone may be mixed already.
    """
    every: list[Cost] = []
    alike: dict[tuple, list[Cost]] = {}
    for candidate in candidates:
        layout = candidate.layout
        if is_mix(layout.remat) or is_mix(layout.layers) or layout.offloaded:
            continue
        every.append(Cost(candidate.memory.total, candidate.seconds.total))
        alike.setdefault(beside_layers(layout), []).append(every[-1])
    front, fronts = _front(every), [_front(costs) for costs in alike.values()]
    saved = []
    least = min(cost.memory for cost in every)
    for memory in np.linspace(1.02 * least, machine.memory_bytes, _BUDGETS):
        uniform = min(least_seconds(costs, memory) for costs in fronts)
        saved.append(1 - least_seconds(front, memory) / uniform)
    return Gain(saved[-1], float(np.mean(saved)), max(saved))


def predict(recipe: str, topology: str, batch_size: int) -> Gain:
    """Predicts all layouts but pipelines, and the gain from mixing them by layer.

    Args:
      recipe: name of a recipe, then settings.
      topology: machine.
      batch_size: sequences of a batch.
    """
    name, *settings = recipe.split()
    config = with_settings(recipes.get(name), settings)
    config = dataclasses.replace(config, batch_size=batch_size)
    devices, model = mesh.topology(topology), config.make_model()
    optimizer = optimizers.make_optimizer(config.optimizer, config.steps, model)
    batch, dtype = config.abstract_batch(), programs.compute_dtype(config)
    facts, machine = Facts(model, optimizer, batch, dtype, devices), machine_of(devices)
    return gain(predicted(facts, machine, Wanted.of("", "pipe"))[0], machine)


def main(_: Sequence[str]) -> int:
    """Prints one line a machine."""
    command_line.use_cpu()
    meshpar.simulate(1)
    for case in MACHINES:
        found = predict(*case)
        print(
            f"{', '.join(map(str, case))}: layouts by layer save {found.at_memory:.1%} "
            f"at the memory of the chip, {found.mean:.1%} on average over budgets, "
            f"{found.most:.1%} at most",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    command_line.run(main)
