"""Rematerialization per layer: the fastest policies that fit into some memory.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3.3, whose dynamic program
  chooses a strategy for each layer under a budget of memory.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshpar.layouts.layout import Layout
from meshpar.planner.candidate import Candidate


class Cost(NamedTuple):
    """What a policy costs in one layer.

    Attributes:
      seconds: that the layer takes.
      saved: bytes that it saves for the backward pass.
    """

    seconds: float
    saved: float


class _Partial(NamedTuple):
    """Policies of the first layers, and what they cost together."""

    seconds: float
    saved: float
    policies: tuple[str, ...]


def best_policies(
    layers: Sequence[Mapping[str, Cost]], budget: float
) -> tuple[str, ...] | None:
    """The policy of every layer, of those that save at most `budget` bytes together.

    A dynamic program over the layers, which keeps the choices that no other one beats
    in both seconds and bytes. It is exact.

    Args:
      layers: {policy: its cost} of each layer.
      budget: bytes.

    Returns:
      The policies that take least time; None if no choice fits.
    """
    front = [_Partial(0.0, 0.0, ())]
    for costs in layers:
        grown = [
            _Partial(
                done.seconds + cost.seconds,
                done.saved + cost.saved,
                (*done.policies, policy),
            )
            for done in front
            for policy, cost in costs.items()
            if done.saved + cost.saved <= budget
        ]
        grown.sort(key=lambda choice: choice[:2])
        front, least = [], float("inf")
        for choice in grown:
            if choice.saved < least:
                front.append(choice)
                least = choice.saved
    return front[0].policies if front else None


def as_remat(policies: Sequence[str], costs: Mapping[str, Cost]) -> str:
    """The value of `remat=` that gives equal layers these policies.

    Layers that save least come first: what the last ones save is freed first.
    """
    kinds = sorted(set(policies), key=lambda policy: costs[policy].saved)
    if len(kinds) == 1:
        return kinds[0]
    counts = ((policies.count(policy), policy) for policy in kinds)
    return "+".join(f"{count}*{policy}" for count, policy in counts)


def mixed_layout(
    uniform: Sequence[Candidate], depth: int, memory: int
) -> Layout | None:
    """The layout whose layers rematerialize as much as memory needs, and no more.

    It leaves room for the largest known error of such predictions.

    Args:
      uniform: candidates that differ in `remat` alone, each with one policy.
      depth: layers of the stack.
      memory: bytes that a step may take on one device.

    Returns:
      The layout; None if one policy does for all layers, or they run in a pipeline.
    """
    if not uniform or uniform[0].layout.pipe > 1:
        return None
    if known := uniform[0].uncertainty:
        memory = int(memory / known.memory.high)
    fits = [c.memory.total <= memory for c in uniform]
    if not any(fits) or all(fits):
        return None
    costs = {
        c.layout.remat: Cost(c.seconds.total / depth, c.memory.activations / depth)
        for c in uniform
    }
    rest = max(c.memory.total - c.memory.activations for c in uniform)
    policies = best_policies([costs] * depth, memory - rest)
    if policies is None or len(set(policies)) == 1:
        return None
    return dataclasses.replace(uniform[0].layout, remat=as_remat(policies, costs))
