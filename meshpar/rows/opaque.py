"""Functions that the row analysis takes at their word, in place of following them.

A mixture of experts sorts the tokens of all rows, and its statistics are sums over the
whole batch that no part computes alone. Each row of its output follows from the same
row of its input all the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshpar.rows.values import Fixed, Mixed, Rows, nonlinear

NAME = "each_row_alone"
"""Name of the jitted function by which the analysis knows `each_row_alone`."""

SPLIT_NAME = "split_as_arguments"
"""Name of the jitted function by which the analysis knows `split_as_arguments`."""

_NO_ROWS = "a mixture of experts, or a like function, is split along another dim"

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


def split_as_arguments(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args) of a function that follows the layout, however a batch is split.

    Args:
      fn: returns an array, split into parts along the dim along which its arguments
        are; any split of the others changes nothing.
      *args: arrays.
    """
    if _analysed.value is None:
        return fn(*args)

    def call(*args: Any) -> Any:
        return fn(*args)

    call.__name__ = SPLIT_NAME
    return jax.jit(call)(*args)


def split_results(eqn: Any, values: Sequence[Any], prime: int) -> list[Any]:
    """The values of the results of a call of `split_as_arguments`, for the analysis.

    Args:
      eqn: the call.
      values: those of its arguments.
      prime: number of rows.
    """
    if mixed := next((v for v in values if isinstance(v, Mixed)), None):
        return [mixed] * len(eqn.outvars)
    split = {v for v in values if not isinstance(v, Fixed)}
    dims = {v.dim for v in split if isinstance(v, Rows)}
    if len(dims) > 1 or any(v != Rows(v.dim) for v in split if isinstance(v, Rows)):
        return [Mixed("arguments are split along several dims")] * len(eqn.outvars)
    if any(not isinstance(v, Rows) for v in split):
        return [nonlinear("a function of ops")] * len(eqn.outvars)
    dim = dims.pop() if dims else 0
    shapes = (getattr(v.aval, "shape", ()) for v in eqn.outvars)
    return [Rows(dim) if s[dim : dim + 1] == (prime,) else Fixed() for s in shapes]


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
        return [Mixed(_NO_ROWS)] * len(eqn.outvars)
    shapes = (getattr(v.aval, "shape", ()) for v in eqn.outvars)
    return [Rows(0) if shape[:1] == (prime,) else Fixed() for shape in shapes]


RULES = {NAME: results, SPLIT_NAME: split_results}
"""{name of a jitted function: rule for the values of its results}."""
