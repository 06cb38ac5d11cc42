"""Results of a jaxpr that are inputs of it, handed through loops and calls."""

from collections.abc import Sequence
from typing import Any

from meshpar.compat import scan_counts
from meshpar.jaxprs.walk import CALLS, Interpreter

_SAME_VALUE = ("pcast", "pvary")
"""Primitives that change the type of a value alone."""


def passed_through(jaxpr: Any) -> list[int | None]:
    """For each result of a jaxpr the number of the argument that it is, or None."""
    inputs = range(len(jaxpr.invars))
    return _Inputs().run(jaxpr, [None] * len(jaxpr.constvars), inputs)


class _Inputs(Interpreter[int | None]):
    """Follows inputs, by number, through the equations of a jaxpr."""

    def constant(self, value: Any) -> None:
        """No input."""

    def equation(self, eqn: Any, operands: list[int | None]) -> Sequence[int | None]:
        """The inputs that the results of an equation are."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return self.call(eqn, operands)
        if name == "scan":
            first, carried = scan_counts(eqn)
            return _carried(params["jaxpr"].jaxpr, first, carried, operands)
        if name == "while":
            first, operands = params["body_nconsts"], operands[params["cond_nconsts"] :]
            body = params["body_jaxpr"].jaxpr
            return _carried(body, first, len(eqn.outvars), operands)
        return operands if name in _SAME_VALUE else [None] * len(eqn.outvars)


def _carried(
    body: Any, first: int, carried: int, operands: Sequence[int | None]
) -> list[int | None]:
    """The inputs that a loop hands on from round to round.

    Args:
      body: jaxpr of a round.
      first: number of the first argument that is carried.
      carried: how many are.
      operands: of the loop.
    """
    kept = enumerate(passed_through(body))
    return [
        operands[first + i] if i < carried and source == first + i else None
        for i, source in kept
    ]
