"""Chooses a policy for each layer: the fastest policies that fit into memory.

A choice is a policy of rematerialization, and what the layer uses `tensor` for.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3.3, whose dynamic program
  chooses a strategy for each layer under a budget of memory.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    fronts = {FEATURES: [Chosen(0.0, 0.0, ())]}
    for costs in layers:
        grown: dict[str, list[Chosen]] = {}
        for use, front in fronts.items():
            for done in front:
                for choice, cost in costs.items():
                    if done.saved + cost.saved <= budget:
                        between = change if choice.use != use else 0.0
                        longer = Chosen(
                            done.seconds + between + cost.seconds,
                            done.saved + cost.saved,
                            (*done.choices, choice),
                        )
                        grown.setdefault(choice.use, []).append(longer)
        fronts = {use: _unbeaten(partials) for use, partials in grown.items()}
    fastest = {use: front[0] for use, front in fronts.items()}
    if last := fastest.get(ROWS):
        fastest[ROWS] = last._replace(seconds=last.seconds + change)
    return min(fastest.values(), default=None)


def _unbeaten(partials: list[Chosen]) -> list[Chosen]:
    """The Pareto front of seconds and bytes, fastest first."""
    front, least = [], float("inf")
    for partial in sorted(partials, key=lambda partial: partial[:2]):
        if partial.saved < least:
            front.append(partial)
            least = partial.saved
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
