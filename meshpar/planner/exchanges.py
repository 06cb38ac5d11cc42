"""Laws by which the exchanges of a layer follow from those that are traced.

Its runs, and the bytes that it moves and holds, are sums of those of other layouts:

- Sizes of `context` follow from two that are traced. A device holds 1/n of a sequence.
  With context_mode=allgather it sends (n-1)/n of whole keys and values in n-1 steps,
  and with ulysses 1/n of its heads and tokens, as long as n divides the heads of keys.
  Rings run in steps of their own.
- Sizes of `expert` follow from two that are traced. A device sends its tokens to n-1
  others, and has rows for all choices of all tokens of n devices, as long as it has as
  many experts as a token chooses.
- Under `expert` and `context` together a layer moves tokens along each as it does
  along that axis alone. Experts with slots for a whole sequence do not, so this law is
  first held against the trace of the smallest sizes (`by_law`).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from meshpar.layouts.axes import CONTEXT, EXPERT
from meshpar.layouts.context_modes import ALLGATHER, ULYSSES
from meshpar.layouts.layout import Layout

TRACED_SIZES = 2, 4
"""Sizes of `context` and of `expert` from which larger ones follow."""

_CLOSE = 0.01
"""Largest relative difference between a trace and the law that stands in for it."""


T = TypeVar("T")


class Law(NamedTuple):
    """A layout of exchanges as a sum of others.

    Attributes:
      sources: the others.
      bytes: how many times the bytes of each count.
      runs: how many times the runs of each count.
    """

    sources: tuple[Layout, ...]
    bytes: tuple[float, ...]
    runs: tuple[float, ...]


def weighted(weights: Iterable[float], values: Iterable[float]) -> float:
    """The sum of values, each as often as its weight says."""
    return sum(map(operator.mul, weights, values))


def exchange_of(layout: Layout) -> Layout:
    """A layout with only those axes along which a layer exchanges tokens."""
    names = EXPERT, "axes"
    if layout.context > 1:
        names += CONTEXT, "context_mode", "context_order", "context_heads"
    return _layout_of(tuple((name, getattr(layout, name)) for name in names))


@functools.cache
def _layout_of(fields: tuple[tuple[str, Any], ...]) -> Layout:
    return Layout(**dict(fields))


def law_of(
    exchange: Layout, heads: frozenset[int], most_experts: float = 0
) -> Law | None:
    """The law by which a layout of exchanges follows; None if it has to be traced.

    Args:
      exchange: of `exchange_of`.
      heads: numbers of heads of keys in the model; empty if it has no attention.
      most_experts: the largest size of `expert` that follows.
    """
    n = exchange.context
    if exchange.expert > 1 and n > 1:
        of_tokens = dataclasses.replace(exchange, expert=1)
        experts, none = (
            _layout_of(((EXPERT, size), ("axes", exchange.axes)))
            for size in (exchange.expert, 1)
        )
        sources = experts, exchange_of(of_tokens), none
        return Law(sources, (1 / n, 1.0, -1 / n), (1.0, 1.0, 0.0))
    low, high = TRACED_SIZES
    if high < exchange.expert <= most_experts:
        sources = tuple(dataclasses.replace(exchange, expert=e) for e in TRACED_SIZES)
        steps = _affine(exchange.expert)
        return Law(sources, steps, steps)
    divides = bool(heads) and all(h % n == 0 for h in heads)
    gathers = exchange.context_mode == ALLGATHER
    if n <= high or not (gathers or exchange.context_mode == ULYSSES and divides):
        return None
    sources = tuple(dataclasses.replace(exchange, context=c) for c in TRACED_SIZES)
    part = (1 / n - 1 / low) / (1 / low - 1 / high)
    return Law(sources, (1 + part, -part), _affine(n))


def _affine(n: int) -> tuple[float, float]:
    """Weights of `TRACED_SIZES` for what has a fixed part and one that grows."""
    low, high = TRACED_SIZES
    steps = (n - low) / (high - low)
    return 1 - steps, steps


def by_law(
    exchange: Layout,
    law_of: Callable[[Layout], Law | None],
    traced: Callable[[Layout], T],
    summed: Callable[[Law], T],
    numbers: Callable[[Layout, T], Mapping[Any, float]],
) -> T | None:
    """Facts of a layout of exchanges that follow by a law; None if it is to be traced.

    Args:
      exchange: of `exchange_of`.
      law_of: the law of a layout of exchanges, if there is one.
      traced: facts of a layout of exchanges, such as those that `summed` adds up.
      summed: the facts that a law makes of others.
      numbers: those of a layout's facts, by which a law is held against its trace.
    """
    law = law_of(exchange)
    if law is None:
        return None
    if exchange.expert > 1 and exchange.context > 1:
        expert, context = map(_least_factor, (exchange.expert, exchange.context))
        probe = dataclasses.replace(exchange, expert=expert, context=context)
        own = law_of(probe)
        if probe == exchange or own is None:
            return None
        if not _are_close(*(numbers(probe, x) for x in (traced(probe), summed(own)))):
            return None
    return summed(law)


def _least_factor(size: int) -> int:
    """The smallest factor of a size that is not 1."""
    return next(factor for factor in range(2, size + 1) if size % factor == 0)


def _are_close(some: Mapping[Any, float], others: Mapping[Any, float]) -> bool:
    """Whether two sets of numbers have the same names and nearly the same values."""
    return some.keys() == others.keys() and all(
        math.isclose(some[name], others[name], rel_tol=_CLOSE, abs_tol=1.0)
        for name in some
    )
