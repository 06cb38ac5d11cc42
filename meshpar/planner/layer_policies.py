"""Chooses a policy for each layer: the fastest policies that fit into memory.

A choice is a policy of rematerialization, and what the layer uses `tensor` for.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3.3, whose dynamic program
  chooses a strategy for each layer under a budget of memory.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshpar.layouts import mixes
from meshpar.layouts.layer_uses import FEATURES, ROWS
from meshpar.layouts.layout import Layout
from meshpar.planner.candidate import Candidate


class LayerPolicy(NamedTuple):
    """A policy of one layer.

    Attributes:
      remat: its policy of rematerialization.
      use: what it uses `tensor` for.
    """

    remat: str
    use: str = FEATURES


class LayerCost(NamedTuple):
    """Time and memory of one layer under a policy.

    Attributes:
      seconds: that the layer takes.
      saved: bytes that it saves for the backward pass.
    """

    seconds: float
    saved: float


class Chosen(NamedTuple):
    """The policies of several layers, with their total time and memory."""

    seconds: float
    saved: float
    choices: tuple[LayerPolicy, ...]


def best_choices(
    layers: Sequence[Mapping[LayerPolicy, LayerCost]],
    budget: float,
    change: float = 0.0,
) -> Chosen | None:
    """Finds the fastest policies whose layers save at most `budget` bytes together.

    A dynamic program over the layers. For each use that the last layer may have, it
    keeps the choices that no other one beats in both seconds and bytes. It is exact.

    Args:
      layers: {choice: its cost} of each layer.
      budget: bytes.
      change: seconds where neighbours differ in their use; embedding and head, before
        and after the layers, split features.

    Returns:
      The choices that take least time; None if none fit.
    """
    fronts: dict[str, list[_Partial]] = {FEATURES: [(0.0, 0.0, None, None)]}
    for costs in layers:
        steps: dict[str, list[tuple[float, float, LayerPolicy]]] = {}
        for choice, (seconds, saved) in costs.items():
            steps.setdefault(choice.use, []).append((seconds, saved, choice))
        fronts = {
            use: _unbeaten(_longer(fronts, use, _unbeaten(own), budget, change))
            for use, own in steps.items()
        }
    found = []
    for use, front in fronts.items():
        for seconds, saved, *last in front[:1]:
            seconds += change if use == ROWS else 0.0
            found.append(Chosen(seconds, saved, tuple(_choices(*last))[::-1]))
    return min(found, default=None)


_Partial = tuple[float, float, Any, LayerPolicy | None]
"""(seconds, bytes, the same up to the layer before, choice) up to a layer."""


def _longer(
    fronts: Mapping[str, list[_Partial]],
    use: str,
    steps: list[tuple[float, float, LayerPolicy]],
    budget: float,
    change: float,
) -> list[_Partial]:
    """Partial choices with one more layer of a use, within the budget."""
    longer: list[_Partial] = []
    for before, front in fronts.items():
        between = change if before != use else 0.0
        for seconds, saved, choice in steps:
            seconds += between
            longer += [
                (done[0] + seconds, done[1] + saved, done, choice)
                for done in front
                if done[1] + saved <= budget
            ]
    return longer


def _choices(before: _Partial | None, choice: LayerPolicy | None) -> Iterator[Any]:
    """The choices of a partial one, the last layer's first."""
    while before is not None:
        yield choice
        *_, before, choice = before


def _unbeaten(options: list[Any]) -> list[Any]:
    """The Pareto front of (seconds, bytes, ...), fastest first."""
    front, least = [], float("inf")
    for option in sorted(options, key=operator.itemgetter(0, 1)):
        if option[1] < least:
            front.append(option)
            least = option[1]
    return front


def as_options(
    choices: Sequence[LayerPolicy], costs: Mapping[LayerPolicy, LayerCost]
) -> dict[str, str]:
    """The values of `remat=` and `layers=` that give equal layers these choices.

    Layers of one use follow each other. Of those, layers that save least come first:
    what the last ones save is freed first.
    """
    order = sorted(
        choices, key=lambda choice: (choice.use != ROWS, costs[choice].saved)
    )
    return {
        "remat": mixes.written([(choice.remat, 1) for choice in order]),
        "layers": mixes.written([(choice.use, 1) for choice in order]),
    }


def mixed_layout(
    uniform: Sequence[Candidate], depth: int, memory: int
) -> Layout | None:
    """A layout with as many rematerialized layers as memory needs, and no more.

    It leaves room for the largest known error of such predictions.

    Args:
      uniform: candidates that differ in `remat` and `layers` alone, each with one
        choice for all layers.
      depth: layers of the stack.
      memory: bytes that a step may take on one device.

    Returns:
      The layout; None if one choice does for all layers, or they run in a pipeline.
    """
    if not uniform or uniform[0].layout.pipe > 1:
        return None
    if known := uniform[0].uncertainty:
        memory = int(memory / known.memory.high)
    fits = [c.memory.total <= memory for c in uniform]
    if not any(fits) or all(fits):
        return None
    # Layers that split rows move activations over `tensor` at both ends alone.
    moved = (c.seconds.tensor for c in uniform if c.layout.layers == ROWS)
    change = min(moved, default=0.0) / 2
    costs: dict[LayerPolicy, LayerCost] = {}
    rest = dict.fromkeys((c.layout.layers for c in uniform), 0)
    for candidate in uniform:
        use, memory_of = candidate.layout.layers, candidate.memory
        seconds = candidate.seconds.total - (2 * change if use == ROWS else 0.0)
        cost = LayerCost(seconds / depth, memory_of.activations / depth)
        costs[LayerPolicy(candidate.layout.remat, use)] = cost
        rest[use] = max(rest[use], memory_of.total - memory_of.activations)
    found = []
    for uses in ({FEATURES}, {ROWS}, {FEATURES, ROWS}):
        if uses <= rest.keys():
            own = {choice: cost for choice, cost in costs.items() if choice.use in uses}
            budget = memory - max(rest[use] for use in uses)
            found.append(best_choices([own] * depth, budget, change))
    best = min(filter(None, found), default=None)
    if best is None or len(set(best.choices)) == 1:
        return None
    return dataclasses.replace(uniform[0].layout, **as_options(best.choices, costs))
