"""Refuses models that are wrong once the length of their sequences is split.

Each device computes the loss of its own part of every sequence. That is right where
tokens are computed one by one, and positions are mixed and counted by functions of
`ops.context` alone. The analysis of rows, applied to positions, proves it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from meshpar.arrays import abstract
from meshpar.errors import LayoutError
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.layout import Layout
from meshpar.layouts.token_order import check_length
from meshpar.metrics import LossResult
from meshpar.models.model import Model
from meshpar.models.row_problems import problem_of
from meshpar.models.row_values import compared_values, traced_with_shape, values_of
from meshpar.replicated import map_rows, row_leaves
from meshpar.rows.analysis import RowAnalysis
from meshpar.rows.two_traces import Differences
from meshpar.rows.values import (
    COUNTS,
    NUMBER,
    Fixed,
    Key,
    Mixed,
    PerRow,
    is_value,
)

_SMALLEST = 5
"""Smallest length to trace with: smaller numbers divide most sizes of a model."""

_REMEDY = (
    "mix positions by meshpar.ops.context.attention alone, number them by "
    "meshpar.ops.context.positions, take sizes from the arrays, or use lowering=jit"
)


@dataclasses.dataclass(frozen=True)
class PositionAnalysis(RowAnalysis):
    """The analysis of rows, applied to positions: sequences have a prime length.

    Draws have positions in their second dim.
    """

    dim: int = 1


def check_positions(model: Model, batch: Any, layout: Layout, evaluates: bool) -> None:
    """Checks that parts of sequences give the loss of whole sequences.

    Args:
      model: the model.
      batch: abstract batch of whole sequences, leaves [batch, length, ...] or [batch].
      layout: may split the length.
      evaluates: whether evaluation splits the length, too.

    Raises:
      LayoutError: positions are mixed or counted in another way, or that cannot be
        followed; or sequences do not divide into the parts of their order.
    """
    if layout.context == 1:
        return
    for x in row_leaves(batch):
        if len(x.shape) > 1:
            check_length(x.shape[1], layout.context, layout.token_order)
    why = f"{CONTEXT}={layout.context}"
    params, key = abstract(model.params), jax.eval_shape(lambda: jax.random.key(0))
    _check(model.loss, "the loss", (params, batch, key), why)
    if evaluates:
        what = "the evaluation loss"
        _check(model.evaluation_loss, what, (params, batch), why)


def _check(fn: Callable, what: str, arguments: tuple, why: str) -> None:
    params, batch, *key = arguments
    prime, *others = _lengths_for(params, batch)
    inputs = [
        *(Fixed() for _ in jax.tree.leaves(params)),
        *jax.tree.leaves(map_rows(_position, batch, others=_fixed), is_leaf=is_value),
        *(Key() for _ in key),
    ]

    def traced(length: int) -> tuple[Any, Any]:
        tokens = map_rows(lambda x: _with_length(x, length), batch)
        return traced_with_shape(fn, params, tokens, *key)

    def analysis(differences: Differences) -> PositionAnalysis:
        return PositionAnalysis(prime, differences)

    try:
        closed, shape = traced(prime)
    except Exception as error:
        raise LayoutError(
            f"{what} cannot be traced with sequences of {prime} tokens, by which it is "
            f"checked ({why} splits the length of sequences); {_REMEDY} "
            f"({type(error).__name__}: {error})"
        ) from error
    if others:
        seconds = ((length, traced(length)[0]) for length in others)
        result = compared_values(closed, shape, inputs, prime, seconds, analysis)
    else:
        result = values_of(closed, shape, inputs, PositionAnalysis(prime))
    if problem := _problem(result, what):
        raise LayoutError(
            f"{problem} ({why} splits the length of sequences, and each of their "
            f"positions counts as a row here); {_REMEDY}"
        )


def _position(x: Any) -> Any:
    """The value of a leaf with rows, by position."""
    return PerRow(1) if len(x.shape) > 1 else Fixed()


def _fixed(_: Any) -> Fixed:
    return Fixed()


def _problem(result: LossResult, what: str) -> str:
    """The first problem of a loss, whatever weight comes with it; "" without."""
    if isinstance(result.loss, Mixed):
        reason, place = result.loss.reason, result.loss.place
        if reason in (COUNTS, NUMBER):
            reason = (
                "positions are counted from 0 (or numbers are given for each), which "
                "each part of a sequence would do by itself"
            )
        reason += place and f", at {place}"
        return f"{what} is not computed position by position: {reason}"
    return problem_of(result, what)


def _with_length(x: Any, length: int) -> jax.ShapeDtypeStruct:
    shape = tuple(x.shape)
    if len(shape) > 1:
        shape = (shape[0], length, *shape[2:])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _lengths_for(params: Any, batch: Any) -> list[int]:
    """Up to three primes that divide no size of the model, longest first.

    They are at most the length of the batch.
    """
    longest = max(x.shape[1] for x in row_leaves(batch) if len(x.shape) > 1)

    def without_length(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:1], *x.shape[2:]), x.dtype)

    leaves = jax.tree.leaves((params, map_rows(without_length, batch)))
    sizes = {size for x in leaves for size in x.shape}
    primes = _primes_down_from(max(longest, 2 * _SMALLEST))
    usable = (p for p in primes if all(size % p for size in sizes if size))
    if lengths := list(itertools.islice(usable, 3)):
        return lengths
    raise LayoutError(
        f"sequences of {longest} tokens are too short to be split: no smaller prime "
        "divides none of the model's sizes"
    )


def _primes_down_from(length: int) -> Iterator[int]:
    for number in range(length, _SMALLEST - 1, -1):
        if all(number % n for n in range(2, math.isqrt(number) + 1)):
            yield number
