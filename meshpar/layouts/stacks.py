"""Stacks of all layers, for kernels that read the weights of one layer in place.

A loop over layers slices its row from each stack. Most matmuls read the slice where it
lies, but some kernels cannot, and compilers copy each row for them. Those that know the
stack and the row need no copy.
"""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshpar.arrays import Array, Params, vary


class Stacks(NamedTuple):
    """Stacks of which a layer's weights are one row.

    Attributes:
      arrays: {path: [depth, ...]}.
      row: int32 number of the row; None without stacks.
    """

    arrays: Params
    row: Array | None


class InStack(NamedTuple):
    """The place of one weight.

    Attributes:
      stack: [depth, ...].
      row: int32 number of its row.
      master: the weight in the dtype that the optimizer updates, if that is known.
    """

    stack: Array
    row: Array
    master: Array | None = None

    def varying(self, axes: tuple[str, ...]) -> "InStack":
        """This place in a stack that varies over manual axes."""
        master = None if self.master is None else vary(self.master, axes)
        return self._replace(stack=vary(self.stack, axes), master=master)


_known: contextvars.ContextVar[Sequence[tuple[Array, InStack]]]
_known = contextvars.ContextVar("places of weights in stacks", default=())


@contextlib.contextmanager
def standing(pairs: Iterable[tuple[Array, InStack | None]]) -> Iterator[None]:
    """Lets functions that are called inside find the places of weights.

    Args:
      pairs: (weight, its place if known); the very arrays that the functions get.
    """
    token = _known.set([(x, place) for x, place in pairs if place is not None])
    try:
        yield
    finally:
        _known.reset(token)


def place_of(weight: Array) -> InStack | None:
    """The place of a weight; None where it is not known."""
    return next((place for x, place in _known.get() if x is weight), None)
