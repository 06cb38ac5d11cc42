"""Functions that the row analysis takes at their word, in place of following them.

A mixture of experts sorts the tokens of all rows, and its statistics are sums over the
whole batch that no part computes alone. Each row of its output follows from the same
row of its input all the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshpar.rows.values import Fixed, Mixed, Rows

NAME = "each_row_alone"
"""Name of the jitted function by which the analysis knows them."""

_analysed = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def analysed() -> Iterator[None]:
    """Marks the calls of `each_row_alone` while a function is traced."""
    with _analysed(True):
        yield


def each_row_alone(fn: Callable[..., Any], x: Any, *others: Any) -> Any:
    """fn(x, *others), whose rows the analysis need not follow.

    Args:
      fn: returns a pytree of arrays. Those whose first dim is that of x have rows that
        depend on the same rows of x alone; all others are equal for all parts of a
        batch (sums over the devices), or so by definition (microbatches).
      x: an array [batch, ...].
      *others: pytrees that do not depend on the batch.
    """
    if _analysed.value is None:
        return fn(x, *others)

    def call(x: Any, *others: Any) -> Any:
        return fn(x, *others)

    call.__name__ = NAME
    return jax.jit(call)(x, *others)


def results(eqn: Any, values: Sequence[Any], prime: int) -> list[Any]:
    """The values of a call's results, for the analysis.

    Args:
      eqn: the call.
      values: those of its arguments.
      prime: number of rows.
    """
    x, *others = values
    if any(not isinstance(value, Fixed) for value in others):
        return [Mixed("an argument beside x depends on the batch")] * len(eqn.outvars)
    if isinstance(x, Mixed):
        return [x] * len(eqn.outvars)
    if not isinstance(x, Fixed) and x != Rows(0):
        return [Mixed("x is not [batch, ...]")] * len(eqn.outvars)
    shapes = (getattr(v.aval, "shape", ()) for v in eqn.outvars)
    return [Rows(0) if shape[:1] == (prime,) else Fixed() for shape in shapes]
