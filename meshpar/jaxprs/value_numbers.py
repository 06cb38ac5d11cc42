"""Value numbers: values of programs that are computed in the same way are equal.

Two operations are equal if they do the same to equal operands; a compiler may run them
once.

Source: Alpern, Wegman and Zadeck, Detecting Equality of Variables in Programs, POPL
  1988.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core

from meshpar.arrays import is_key
from meshpar.compat import has_side_effects
from meshpar.jaxprs.walk import CALLS, Interpreter, opened

T = TypeVar("T")

_KEEPS_VALUES = frozenset(("copy", "copy_p", "pbroadcast", "pcast", "pvary"))
"""Primitives of one operand whose result has its value."""


class ValueNumbers(Interpreter[int]):
    """Numbers the values of programs: equal keys have equal numbers in all of them."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, *key: Hashable) -> int:
        """The number of a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def new(self) -> int:
        """The number of a value that equals no other."""
        return self.number("new", len(self._numbers))

    def constant(self, value: Any) -> int:
        """The number of an array; equal arrays have equal numbers."""
        if isinstance(value, jax.core.Tracer):
            return self.number("constant", id(value))
        x = np.asarray(jax.random.key_data(value) if is_key_array(value) else value)
        return self.number("constant", str(x.dtype), x.shape, x.tobytes())

    def literal(self, atom: Any, owner: Any = None, place: int = 0) -> int:
        """The number of a literal."""
        return self.constant(np.asarray(atom.val, atom.aval.dtype))

    def equation(self, eqn: Any, operands: Sequence[int]) -> list[int]:
        """The numbers of an equation's results."""
        if eqn.primitive.name in CALLS:
            return self.call(eqn, operands)
        if eqn.primitive.name in _KEEPS_VALUES and len(operands) == 1:
            return list(operands)
        operation = self.operation(eqn, operands)
        return [self.number(operation, i) for i in range(len(eqn.outvars))]

    def operation(self, eqn: Any, operands: Sequence[int]) -> int:
        """The number of an equation; equal equations have equal numbers."""
        own = id(eqn) if has_side_effects(eqn) else None
        read = operands_read(eqn, operands)
        return self.number(eqn.primitive, self.settings(eqn.params), own, *read)

    def settings(self, params: Mapping[str, Any]) -> Hashable:
        """The parameters of an equation as a key; equivalent jaxprs have equal keys."""
        return tuple((name, self._setting(x)) for name, x in sorted(params.items()))

    def _setting(self, value: Any) -> Hashable:
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            return self._function(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._setting, value))
        try:
            hash(value)
        except TypeError:
            return id(value)
        return type(value), value

    def _function(self, jaxpr: Any) -> Hashable:
        """A jaxpr as a key."""
        variables = opened(jaxpr)[0].invars
        kinds = tuple(str(variable.aval) for variable in variables)
        inputs = [self.number("input", i, kind) for i, kind in enumerate(kinds)]
        return kinds, tuple(self.evaluate(jaxpr, inputs))


def is_key_array(value: Any) -> bool:
    """Whether a constant of a jaxpr holds random keys."""
    return isinstance(value, jax.Array) and is_key(value)


def operands_read(eqn: Any, operands: Sequence[T]) -> Sequence[T]:
    """The operands that make the value of an equation's results.

    An index along a dim that is read as a whole makes none of it.

    Args:
      eqn: the equation.
      operands: what stands for each of its operands.
    """
    if eqn.primitive.name != "dynamic_slice":
        return operands
    whole, parts = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    x, *indices = operands
    sizes = zip(whole, parts, indices, strict=True)
    return [x, *(index for whole, part, index in sizes if part < whole)]
