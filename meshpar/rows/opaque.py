"""Functions that the row analysis trusts instead of following them.

A mixture of experts sorts the tokens of all rows, and its statistics are sums over the
whole batch that no part computes alone. Each row of its output follows from the same
row of its input all the same, and each token from the tokens of its sequence.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshpar.layouts.scope import unsharded
from meshpar.rows.values import Counted, Fixed, Key, Mixed, PerRow, counts, nonlinear

NAME = "split_as_arguments"
"""Name of the jitted function by which the analysis knows `split_as_arguments`."""

_analysed = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def analysed() -> Iterator[None]:
    """Marks the calls of `split_as_arguments` while a function is traced."""
    with _analysed(True), unsharded():
        yield


def is_analysed() -> bool:
    """Whether a function is traced for the analysis alone, with a prime size."""
    return _analysed.value is not None


def split_as_arguments(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls fn(*args), whose results the analysis takes to split as its arguments do.

    Args:
      fn: returns a pytree of arrays. Those with the dim along which its arguments are
        split are split along it, too; all others are equal for all parts (sums over the
        devices), or so by definition (microbatches).
      *args: pytrees of arrays; any split of their other dims changes nothing.
    """
    if _analysed.value is None:
        return fn(*args)

    def call(*args: Any) -> Any:
        return fn(*args)

    call.__name__ = NAME
    return jax.jit(call)(*args)


def results(eqn: Any, values: Sequence[Any], prime: int) -> list[Any]:
    """The values of the results of a call of `split_as_arguments`, for the analysis.

    Args:
      eqn: the call.
      values: those of its arguments.
      prime: number of rows.
    """
    if mixed := next((v for v in values if isinstance(v, Mixed)), None):
        return [mixed] * len(eqn.outvars)
    if counted := next((v for v in values if isinstance(v, Counted)), None):
        return [counts(counted)] * len(eqn.outvars)
    split = {v for v in values if not isinstance(v, Fixed | Key)}
    dims = {v.dim for v in split if isinstance(v, PerRow)}
    if len(dims) > 1 or any(v != PerRow(v.dim) for v in split if isinstance(v, PerRow)):
        return [Mixed("arguments are split along several dims")] * len(eqn.outvars)
    if any(not isinstance(v, PerRow) for v in split):
        return [nonlinear("a function of ops")] * len(eqn.outvars)
    dim = dims.pop() if dims else 0
    shapes = (getattr(v.aval, "shape", ()) for v in eqn.outvars)
    return [PerRow(dim) if s[dim : dim + 1] == (prime,) else Fixed() for s in shapes]


RULES = {NAME: results}
"""{name of a jitted function: rule for the values of its results}."""
