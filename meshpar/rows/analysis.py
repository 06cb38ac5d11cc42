"""Abstract interpretation of a loss: how each result depends on the rows of the batch.

The loss is traced with a prime number of rows, which shows in shapes, and its jaxpr is
evaluated on the values of `rows.values`. A second trace with other rows shows which
of its numbers come from the number of rows. Nothing is allocated or compiled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshpar import compat
from meshpar.jaxprs.walk import CALLS, Interpreter, called_jaxpr, equations, opened
from meshpar.rows import draws, indexing, loops, opaque, shapes
from meshpar.rows.arithmetic import elementwise
from meshpar.rows.counting import equal_constant, plain_results
from meshpar.rows.dims import is_elementwise, other_results, truncates
from meshpar.rows.folding import known_value
from meshpar.rows.two_traces import Differences
from meshpar.rows.values import (
    IN_BATCH,
    NUMBER,
    PLAIN,
    REDUCED,
    Counted,
    Fixed,
    Key,
    Mixed,
    PerRow,
    counts,
    degree_by_value,
    failed,
    nonlinear,
)

_RULES: dict[str, Callable[[Any, Sequence[Any], int], Any]] = {
    "reduce_sum": shapes.reduce_sum,
    "reduce_max": shapes.reduce_other,
    "reduce_min": shapes.reduce_other,
    "reduce_prod": shapes.reduce_other,
    "reduce_and": shapes.reduce_other,
    "reduce_or": shapes.reduce_other,
    "argmax": shapes.reduce_other,
    "argmin": shapes.reduce_other,
    "reshape": shapes.reshape,
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "transpose": shapes.transpose,
    "squeeze": shapes.squeeze,
    "slice": shapes.take_part,
    "dynamic_slice": shapes.take_part,
    "pad": shapes.take_part,
    "dynamic_update_slice": shapes.update_part,
    "concatenate": shapes.concatenate,
    "stack": shapes.concatenate,
    "dot_general": shapes.dot_general,
    **indexing.RULES,
}


@dataclasses.dataclass(frozen=True)
class RowAnalysis(Interpreter[Any]):
    """Evaluates jaxprs of a batch whose number of rows is a prime.

    Attributes:
      prime: the number of rows.
      differences: from the trace with another number of rows; None without one, when
        constants show by their values what they have to do with it.
      drawn: takes note of what is drawn from the key of the loss.
      dim: the dim of draws that belongs to rows.
    """

    prime: int
    differences: Differences | None = None
    drawn: draws.Drawn = dataclasses.field(default_factory=draws.Drawn)
    dim: int = 0

    def literal(self, atom: Any, owner: Any, place: int) -> Any:
        """A literal of a jaxpr, or of an equation."""
        return self._constant(atom.val, owner, place)

    def constants(self, closed: Any) -> list[Any]:
        """The constants of a closed jaxpr."""
        return [self._constant(x, closed, i) for i, x in enumerate(closed.consts)]

    def _constant(self, value: Any, owner: Any, index: int) -> Any:
        """A constant of a jaxpr.

        Args:
          value: the array.
          owner: the jaxpr or the equation that holds it.
          index: its place there.
        """
        known = known_value(value)
        if not isinstance(getattr(value, "dtype", np.dtype(float)), np.dtype):
            return Fixed()
        if self.differences is not None:
            degree = self.differences.degree(owner, index)
        else:
            degree = 0 if known is None else degree_by_value(known, self.prime)
        return equal_constant(value, known, degree, self.prime)

    def equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The values of an equation's results."""
        try:
            values = self._equation(eqn, operands)
        except Exception as error:
            # A primitive that no rule foresees must not stop a loss with a weight.
            values = [failed(error)] * len(eqn.outvars)
        return [_placed(value, eqn) for value in values]

    def _equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in CALLS:
            if (rule := opaque.RULES.get(eqn.params.get("name"))) is not None:
                self._note_draws(eqn, values)
                return rule(eqn, values, self.prime)
            return self.call(eqn, values)
        if (side_by_side := self._over_rows(eqn)) is not None:
            return self.evaluate(side_by_side, values)
        if name in loops.RULES:
            outputs = loops.RULES[name](eqn, values, self.evaluate)
        else:
            outputs = self._outputs(eqn, values)
        return list(map(_irregular, outputs)) if self._counts(eqn) else outputs

    def _over_rows(self, eqn: Any) -> Any:
        """A scan that runs its body for each row by itself, as one jaxpr of all rows.

        None for another equation, and where the body holds a number of rows.
        """
        if eqn.primitive.name != "scan" or eqn.params["length"] % self.prime:
            return None
        differences, body = self.differences, eqn.params["jaxpr"]
        if differences is not None and not differences.is_plain(body):
            return None
        return loops.over_rows(eqn)

    def _counts(self, eqn: Any) -> bool:
        """Whether an equation loops over rows, or has a size that is no multiple."""
        if eqn.primitive.name == "scan" and eqn.params["length"] % self.prime == 0:
            return True
        return self.differences is not None and id(eqn) in self.differences.irregular

    def _outputs(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, num = eqn.primitive.name, len(eqn.outvars)
        if mixed := next((v for v in values if isinstance(v, Mixed)), None):
            return [mixed] * num
        if name in draws.NAMES:
            return draws.results(eqn, values, self.prime, self.dim, self.drawn)
        if any(isinstance(v, Key) for v in values):
            return [_of_keys(eqn, values)] * num
        if all(isinstance(v, PLAIN) for v in values):
            return self._plain(eqn, values)
        if name == "optimization_barrier":
            return values
        if name not in indexing.RULES and (counted := _counted(values, name)):
            return [counts(counted)] * num
        if truncates(eqn) and any(isinstance(v, REDUCED) for v in values):
            return [nonlinear("a conversion to integers")] * num
        if name in _RULES:
            return [_RULES[name](eqn, values, self.prime)] * num
        if is_elementwise(eqn):
            return [elementwise(name, values)]
        return other_results(eqn, values, self.prime)

    def _plain(self, eqn: Any, values: list[Any]) -> list[Any]:
        """The results of an equation whose operands hold no data of the batch."""

        def as_rows(values: list[Any]) -> list[Any]:
            return self._outputs(eqn, values)

        each = is_elementwise(eqn) and eqn.primitive.name not in _RULES
        return plain_results(eqn, values, self.prime, each, as_rows)

    def _note_draws(self, eqn: Any, values: list[Any]) -> None:
        """Takes note of draws in a function that is not followed."""
        if not any(isinstance(v, Key) for v in values):
            return
        for inner in equations(opened(called_jaxpr(eqn))[0]):
            if inner.primitive.name == draws.BITS:
                self.drawn.note(inner.params["shape"], self.prime, inner, False)


def _irregular(value: Any) -> Any:
    """A result that depends on the number of rows in another way than as a factor."""
    if isinstance(value, PLAIN):
        return Counted(NUMBER, value.known)
    return value if isinstance(value, Mixed) else Mixed(NUMBER, IN_BATCH)


def _placed(value: Any, eqn: Any) -> Any:
    """Adds the user's line to a value that is refused at an equation."""
    if isinstance(value, Mixed | Counted) and not value.place:
        return value._replace(place=compat.user_line(eqn))
    return value


def _counted(values: Sequence[Any], name: str) -> Counted | None:
    """The first operand that counts rows or numbers them; None if there is none."""
    for value in values:
        if isinstance(value, Counted) and name not in ("concatenate", "stack"):
            return value
        for column in value.columns if isinstance(value, PerRow) else ():
            if isinstance(column, Counted):
                return column
    return None


def _of_keys(eqn: Any, values: Sequence[Any]) -> Any:
    """The result of an operation on random keys."""
    others = [v for v in values if not isinstance(v, Key)]
    if counted := next((v for v in others if isinstance(v, Counted)), None):
        return counts(counted)
    is_key = not isinstance(eqn.outvars[0].aval.dtype, np.dtype)
    if is_key and all(isinstance(v, Fixed) for v in others):
        return Key()
    return Mixed(f"{eqn.primitive.name} of a random key is not followed")
