"""Value numbers of an optimizer's update: do all layers get the same update?

Two values of a jaxpr have the same number if they are computed in the same way. Leaves
of layers are numbered by their path within the layer, so that the updates of two layers
have equal numbers exactly if one is the other with its own tensors.

Source: Alpern, Wegman and Zadeck, Detecting Equality of Variables in Programs, POPL
  1988 (value numbers).
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshpar.jaxprs.reach import ELEMENTWISE
from meshpar.jaxprs.value_numbers import ValueNumbers
from meshpar.jaxprs.walk import CALLS, Interpreter


class Leaf(NamedTuple):
    """An argument of an update.

    Attributes:
      role: what it is; equal for the layers of one stack.
      layer: number of the layer that it belongs to; None if to none.
    """

    role: Hashable
    layer: int | None = None


class Value(NamedTuple):
    """A value of a jaxpr.

    Attributes:
      number: equal for values that are computed in the same way.
      layer: the layer whose tensors alone it depends on, beside values of no layer;
        None if of no layer, or of several.
      terms: {(number, layer): how often} of a sum of sums over tensors, else None.
    """

    number: int
    layer: int | None = None
    terms: Mapping[tuple[int, int | None], int] | None = None


@dataclasses.dataclass
class LayerValues(Interpreter[Value]):
    """Numbers the values of updates, by the layers that they depend on.

    Attributes:
      layers: numbers of the layers.
      exact: whether values of different shapes have different numbers. Otherwise an
        elementwise update of a stack has the numbers of those of its layers, and so has
        a sum over all layers.
      sums_layers: whether a sum over a stack is one over its layers; not if the stack
        is padded.
      totals: whether a number that is added to a total over several layers makes
        another such total. Otherwise it makes a number of its own layer.
    """

    layers: Sequence[int]
    exact: bool
    sums_layers: bool = True
    totals: bool = False

    def __post_init__(self) -> None:
        self._numbers = ValueNumbers()
        self._of_stacks = False
        self._over_layers: set[int] = set()

    def leaf(self, leaf: Leaf) -> Value:
        """The value of an argument."""
        return Value(self._numbers.number("leaf", leaf.role), leaf.layer)

    def outputs(
        self, closed: Any, leaves: Sequence[Leaf], of_stacks: bool = False
    ) -> list[Value]:
        """The values of a jaxpr's results.

        Args:
          closed: a closed jaxpr.
          leaves: its arguments.
          of_stacks: whether leaves of layer 0 are stacks of all layers.
        """
        self._of_stacks = of_stacks
        inputs = list(map(self.leaf, leaves))
        return list(map(self.settled, self.evaluate(closed, inputs)))

    def constant(self, value: Any) -> Value:
        """The value of a literal or a constant of a jaxpr."""
        return Value(self._numbers.constant(value))

    def equation(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """The values of an equation's results."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.call(eqn, operands)
        sums = self.sums_layers and not self.exact
        if sums and (total := self._sum(eqn, operands)) is not None:
            return [total]
        operands = list(map(self.settled, operands))
        if name == "cond":
            return self._cond(eqn, operands)
        return self.computed(eqn, operands, self._key(eqn, operands))

    def _key(self, eqn: Any, operands: Sequence[Value]) -> tuple[Hashable, ...]:
        """The key of an equation without its operands."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
        spread = (
            x.layer is not None and atom.aval.shape != out.shape
            for x, atom in zip(operands, eqn.invars, strict=True)
        )
        if not self.exact and not any(spread):
            if name in ELEMENTWISE:
                return name, self._numbers.settings(eqn.params), str(out.dtype)
            if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
                return name, str(out.dtype)
        shapes = (str(v.aval) for v in (*eqn.invars, *eqn.outvars))
        return name, self._numbers.settings(eqn.params), *shapes

    def computed(
        self, eqn: Any, operands: list[Value], key: tuple[Hashable, ...]
    ) -> list[Value]:
        """The values of an equation's results."""
        is_total = self.totals and self._adds_to_total(eqn, operands)
        layer, tagged = _joined(operands, is_total)
        values = [
            Value(self._numbers.number("equation", key, tagged, i), layer)
            for i in range(len(eqn.outvars))
        ]
        if layer is None and any(x.layer is not None for x in operands):
            self._over_layers.update(value.number for value in values)
        return values

    def _adds_to_total(self, eqn: Any, operands: Sequence[Value]) -> bool:
        """Whether a number is added to a total over several layers."""
        is_sum = eqn.primitive.name == "add" and not eqn.outvars[0].aval.shape
        return is_sum and any(x.number in self._over_layers for x in operands)

    def _cond(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """Results of a conditional, each chosen by itself."""
        predicate, *rest = operands
        branches = [
            map(self.settled, self.evaluate(branch, rest))
            for branch in eqn.params["branches"]
        ]
        return [
            self.chosen(eqn, predicate, list(options))
            for options in zip(*branches, strict=True)
        ]

    def chosen(self, eqn: Any, predicate: Value, options: list[Value]) -> Value:
        """The value of one result of a conditional."""
        del eqn
        layer, tagged = _joined([predicate, *options])
        return Value(self._numbers.number("cond", tagged), layer)

    # Sums over all elements of tensors, such as those of a global norm.

    def _sum(self, eqn: Any, operands: Sequence[Value]) -> Value | None:
        """The sum of a whole tensor, or of such sums; None for other equations."""
        name = eqn.primitive.name
        if name == "reduce_sum" and not eqn.outvars[0].aval.shape:
            (x,) = map(self.settled, operands)
            return Value(-1, None, {(x.number, x.layer): 1})
        if name != "add" or eqn.outvars[0].aval.shape:
            return None
        zero = self.constant(np.zeros((), eqn.outvars[0].aval.dtype)).number
        terms: dict[tuple[int, int | None], int] = {}
        for x in operands:
            if x.terms is None and x.number != zero:
                return None
            for term, times in (x.terms or {}).items():
                terms[term] = terms.get(term, 0) + times
        return Value(-1, None, terms)

    def settled(self, value: Value) -> Value:
        """The value with its number, if it is a sum of tensors."""
        if value.terms is None:
            return value
        layers = {layer for _, layer in value.terms} - {None}
        if len(layers) == 1 and not self._of_stacks:
            (layer,) = layers
            return Value(self._numbers.number("sum", self._counts(value, layer)), layer)
        whole = (0,) if self._of_stacks else self.layers
        counts = [self._counts(value, layer) for layer in whole]
        if layers and len(set(counts)) == 1:
            return Value(self._numbers.number("sum over layers", counts[0]))
        return Value(self._numbers.number("sum", frozenset(value.terms.items())))

    def _counts(self, value: Value, layer: int) -> frozenset:
        """The terms of a sum that belong to a layer or to none."""
        return frozenset(
            (number, own is not None, times)
            for (number, own), times in value.terms.items()
            if own in (layer, None)
        )


def _joined(operands: list[Value], is_total: bool = False) -> tuple[int | None, tuple]:
    """(layer of a result, operands as a key).

    Args:
      operands: of an equation.
      is_total: whether the result belongs to no layer, whatever its operands do.
    """
    layers = {x.layer for x in operands} - {None}
    if len(layers) > 1 or is_total:
        return None, tuple((x.number, x.layer) for x in operands)
    return next(iter(layers), None), tuple(x.number for x in operands)
