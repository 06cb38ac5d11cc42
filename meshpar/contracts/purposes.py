"""Purposes of collectives, written where the collectives are written.

They are names of `jax.named_scope`, which a jaxpr keeps beside its equations. `written`
reads them back, and reports show them.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

_PURPOSE, _BACKWARD = "moves: ", " | "
_GATHERS, _UNSPLIT = "gathers", "unsplit"
_AGAIN = "rematted_computation"
"""jax's name for what a backward pass computes again."""


def purpose(why: str, backward: str = "gradients") -> contextlib.AbstractContextManager:
    """Gives collectives that are traced inside a purpose; the innermost one counts.

    Args:
      why: in words that a reader of reports knows.
      backward: what is added to them in a backward pass.
    """
    return jax.named_scope(f"{_PURPOSE}{why}{_BACKWARD}{backward}")


def gathers() -> contextlib.AbstractContextManager:
    """Marks collectives that are traced inside as a gather of a tensor, of any kind.

    A compiler may leave it out where nothing reads the tensor, or where another one has
    gathered the same.
    """
    return jax.named_scope(_GATHERS)


def unsplit() -> contextlib.AbstractContextManager:
    """Marks tensors that are traced inside as whole over all axes that stay automatic.

    It says so where nothing in the code does: no matmul, constraint or weight nearby is
    split over these axes.
    """
    return jax.named_scope(_UNSPLIT)


class Purpose(NamedTuple):
    """The meaning of the names around an equation.

    Attributes:
      why: the innermost purpose; "" if there is none.
      gathers: whether it gathers a tensor.
      again: whether it computes again what the forward pass has computed.
      unsplit: whether no automatic axis splits what it moves.
      backward: whether it is in a backward pass.
    """

    why: str
    gathers: bool
    again: bool
    unsplit: bool
    backward: bool

    @classmethod
    def of(cls, names: Sequence[Any]) -> "Purpose":
        """The purpose in a name stack, outer names first."""
        why, added, gathered, again, backward = "", "", False, False, False
        for entry in names:
            if entry.name.startswith(_PURPOSE):
                why, added = entry.name.removeprefix(_PURPOSE).split(_BACKWARD)
            elif entry.name == _GATHERS:
                gathered = True
            elif entry.name == "transpose":
                backward, again = True, False
            elif entry.name == _AGAIN:
                backward, again = False, True
        words = (why, added if backward else "", "again" if again else "")
        why = ", ".join(filter(None, words)) if why else ""
        unsplit = any(entry.name == _UNSPLIT for entry in names)
        return cls(why, gathered, again, unsplit, backward)
