"""Operations of a jaxpr that are equal: a compiler may run them once.

Two operations are equal if they do the same to equal operands. `Values` gives every
value of a walk through a program a number; equal values have one number.

Source: Alpern, Wegman and Zadeck, Detecting Equality of Variables in Programs, POPL
  1988 (value numbers).
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from meshpar.compat import scan_counts

_KEEPS_VALUES = frozenset(("copy", "copy_p", "pbroadcast", "pcast", "pvary"))
"""Primitives of one operand whose result has its value."""


class Values:
    """Numbers of the values of one program."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def new(self, variables: Iterable[Any]) -> dict[Any, int]:
        """{variable: number} of values that equal no others."""
        return {x: self._number("new", len(self._numbers)) for x in variables}

    def read(self, atom: Any, known: dict[Any, int]) -> int:
        """The number of an operand; of a variable that is not known, a new one."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val).tobytes()
            return self._number("literal", str(atom.aval), value)
        if atom not in known:
            known |= self.new([atom])
        return known[atom]

    def operation(self, eqn: Any, known: dict[Any, int]) -> int:
        """The number of an operation: equal for equal ones."""
        operands = (self.read(x, known) for x in operands_read(eqn))
        return self._number("operation", eqn.primitive, str(eqn.params), *operands)

    def results(self, eqn: Any, known: dict[Any, int]) -> dict[Any, int]:
        """{variable: number} of the results of an operation without jaxprs in it."""
        if eqn.primitive.name in _KEEPS_VALUES and len(eqn.invars) == 1:
            return {eqn.outvars[0]: self.read(eqn.invars[0], known)}
        number = self.operation(eqn, known)
        return {x: self._number(number, i) for i, x in enumerate(eqn.outvars)}

    def arguments(self, eqn: Any, called: Any, known: dict[Any, int]) -> dict[Any, int]:
        """{variable: number} of the arguments of a jaxpr that an equation calls."""
        given = [self.read(x, known) for x in eqn.invars]
        specs = eqn.params.get("in_specs", [None] * len(given))
        views = map(self._view, given, specs)
        return dict(zip(called.invars, views, strict=True))

    def returned(self, eqn: Any, called: Any, known: dict[Any, int]) -> dict[Any, int]:
        """{variable: number} of the results of an equation that calls a jaxpr."""
        found = [self.read(x, known) for x in called.outvars]
        specs = eqn.params.get("out_specs", [None] * len(found))
        views = map(self._view, found, specs)
        return dict(zip(eqn.outvars, views, strict=True))

    def constants(self, eqn: Any, body: Any, known: dict[Any, int]) -> dict[Any, int]:
        """{variable: number} of what every round of a scan is given."""
        given = eqn.invars[: scan_counts(eqn)[0]]
        numbers = [self.read(x, known) for x in given]
        return dict(zip(body.invars, numbers, strict=False))

    def _view(self, number: int, spec: Any) -> int:
        """A value inside shard_map of one outside, or the other way round."""
        return number if spec is None else self._number("view", number, str(spec))

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def operands_read(eqn: Any) -> Sequence[Any]:
    """The operands that make the value of an equation's results.

    An index along a dim that is read as a whole makes none of it.
    """
    if eqn.primitive.name != "dynamic_slice":
        return eqn.invars
    x, *indices = eqn.invars
    sizes = zip(x.aval.shape, eqn.params["slice_sizes"], indices, strict=True)
    return [x, *(index for whole, part, index in sizes if part < whole)]
