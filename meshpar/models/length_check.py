"""Refuses models that are wrong once the length of their sequences is split.

Each device computes the loss of its own part of every sequence. That is right where
tokens are computed one by one, and positions are mixed and counted by functions of
`ops.context` alone. The analysis of rows (`rows.positions`) proves it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from meshpar.arrays import abstract
from meshpar.errors import LayoutError
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.layout import Layout
from meshpar.layouts.token_order import check_length
from meshpar.models.metrics import LossResult
from meshpar.models.model import Model
from meshpar.models.row_check import problem_of, values_of
from meshpar.rows import opaque
from meshpar.rows.positions import PositionAnalysis
from meshpar.rows.values import Fixed, Mixed, Rows

_SMALLEST = 5
"""Smallest length to trace with: smaller numbers divide most sizes of a model."""

_REMEDY = (
    "mix positions by meshpar.ops.context.attention alone, number them by "
    "meshpar.ops.context.positions, take sizes from the arrays, or use lowering=jit"
)


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
    for x in jax.tree.leaves(batch):
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
    prime = _length_for(params, batch)
    batch = jax.tree.map(lambda x: _with_length(x, prime), batch)
    inputs = [
        *(Fixed() for _ in jax.tree.leaves(params)),
        *(Rows(1) if len(x.shape) > 1 else Fixed() for x in jax.tree.leaves(batch)),
        *(Fixed() for _ in key),
    ]

    def traced(*arguments: Any) -> LossResult:
        return fn(*arguments)

    try:
        with opaque.analysed():
            make = jax.make_jaxpr(traced, return_shape=True)
            closed, shape = make(params, batch, *key)
    except Exception as error:
        raise LayoutError(
            f"{what} cannot be traced with sequences of {prime} tokens, by which it is "
            f"checked ({why} splits the length of sequences); {_REMEDY} "
            f"({type(error).__name__}: {error})"
        ) from error
    result = values_of(closed, shape, inputs, PositionAnalysis(prime))
    if problem := _problem(result, what):
        raise LayoutError(
            f"{problem} ({why} splits the length of sequences, and each of their "
            f"positions counts as a row here); {_REMEDY}"
        )


def _problem(result: LossResult, what: str) -> str:
    """The first problem of a loss, whatever weight comes with it; "" without."""
    if isinstance(result.loss, Mixed):
        return f"{what} is not computed position by position: {result.loss.reason}"
    return problem_of(result, what)


def _with_length(x: Any, length: int) -> jax.ShapeDtypeStruct:
    shape = tuple(x.shape)
    if len(shape) > 1:
        shape = (shape[0], length, *shape[2:])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _length_for(params: Any, batch: Any) -> int:
    """A prime that divides no size of the model, at most the length of the batch."""
    leaves = jax.tree.leaves(batch)
    longest = max(x.shape[1] for x in leaves if len(x.shape) > 1)
    sizes = {size for x in jax.tree.leaves(params) for size in x.shape}
    sizes |= {size for x in leaves for size in (*x.shape[:1], *x.shape[2:])}
    for length in range(max(longest, 2 * _SMALLEST), _SMALLEST - 1, -1):
        is_prime = all(length % n for n in range(2, math.isqrt(length) + 1))
        if is_prime and all(size % length for size in sizes if size):
            return length
    raise LayoutError(
        f"sequences of {longest} tokens are too short to be split: no smaller prime "
        "divides none of the model's sizes"
    )
