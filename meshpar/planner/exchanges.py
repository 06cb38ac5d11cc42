"""Laws by which the exchanges of a layer follow from those that are traced.

Its runs, and the bytes that it moves and holds, are sums of those of other layouts:

- Sizes of `context` follow from two that are traced. A device holds 1/n of a sequence.
  With context_mode=allgather it sends (n-1)/n of whole keys and values in n-1 steps.
  With ulysses it sends 1/n of its heads and tokens, where n divides the heads of keys,
  or each device has one of these. Rings run in steps of their own.
- Sizes of `expert` follow from two that are traced. A device sends its tokens to n-1
  others, and has rows for all choices of all tokens of n devices, as long as it has as
  many experts as a token chooses.
- Under `expert` and `context` together a layer moves tokens along each as it does
  along that axis alone.

The laws of `expert` hold for dropless routing. With capacity, the slots of experts are
those of whole sequences, and each layout is traced.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from meshpar.layouts.axes import CONTEXT, EXPERT
from meshpar.layouts.context_modes import ALLGATHER, ULYSSES
from meshpar.layouts.layout import Layout
from meshpar.ops.experts.config import DROPLESS, MixtureConfig

TRACED_SIZES = 2, 4
"""Sizes of `context` and of `expert` from which larger ones follow, where they do."""


class Law(NamedTuple):
    """A layout of exchanges as a sum of others.

    Attributes:
      sources: the others.
      bytes: how many times the bytes of each count.
      runs: how many times the runs of each count.
      along_each: whether the others exchange along `expert` and `context` alone, and
        are not two sizes of one axis.
    """

    sources: tuple[Layout, ...]
    bytes: tuple[float, ...]
    runs: tuple[float, ...]
    along_each: bool = False


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
    exchange: Layout,
    heads: frozenset[int],
    mixtures: frozenset[MixtureConfig] = frozenset(),
    moves: bool = False,
) -> Law | None:
    """The law by which a layout of exchanges follows; None if it has to be traced.

    Args:
      exchange: of `exchange_of`.
      heads: numbers of heads of keys in the model; empty if it has no attention.
      mixtures: of experts in the model.
      moves: whether only what a layer moves is asked for, and not what it holds.
    """
    if exchange.expert > 1:
        dropless = mixtures and all(own.routing == DROPLESS for own in mixtures)
        if not dropless:
            return None
        if exchange.context > 1:
            return _along_each(exchange)
        return _of_experts(exchange, mixtures, moves)
    if exchange.context_mode == ALLGATHER:
        return _of_context(exchange, *TRACED_SIZES)
    if exchange.context_mode != ULYSSES or not heads:
        return None
    if all(h % exchange.context == 0 for h in heads):
        return _of_context(exchange, *TRACED_SIZES)
    low, rest = divmod(exchange.context, 4)
    if low == 1 or rest or any(low % h for h in heads):
        return None
    return _of_context(exchange, low, 2 * low)


def _along_each(exchange: Layout) -> Law:
    """The law of `expert` and `context` together."""
    n, of_tokens = exchange.context, dataclasses.replace(exchange, expert=1)
    experts, none = (
        _layout_of(((EXPERT, size), ("axes", exchange.axes)))
        for size in (exchange.expert, 1)
    )
    sources = experts, exchange_of(of_tokens), none
    return Law(sources, (1 / n, 1.0, -1 / n), (1.0, 1.0, 0.0), along_each=True)


def _of_experts(
    exchange: Layout, mixtures: Iterable[MixtureConfig], moves: bool
) -> Law | None:
    """The law of a size of `expert`, if there is one."""
    n, (low, high) = exchange.expert, TRACED_SIZES
    has_all = all(n * own.experts_per_token <= own.num_experts for own in mixtures)
    bounded = any(own.bound for own in mixtures)
    if n <= high or bounded or not (moves or has_all):
        return None
    sources = tuple(dataclasses.replace(exchange, expert=size) for size in (low, high))
    weights = _weights(n, low, high)
    return Law(sources, weights, weights)


def _of_context(exchange: Layout, low: int, high: int) -> Law | None:
    """The law of a size of `context` above two others; None if it is one of them."""
    n = exchange.context
    if n <= high:
        return None
    sources = tuple(dataclasses.replace(exchange, context=size) for size in (low, high))
    return Law(sources, _weights(1 / n, 1 / low, 1 / high), _weights(n, low, high))


def _weights(at: float, low: float, high: float) -> tuple[float, float]:
    """Weights of the values at two points in a linear function's value at another."""
    part = (at - low) / (high - low)
    return 1 - part, part
