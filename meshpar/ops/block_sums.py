"""Sums over a few blocks, as additions.

The backward kernel of splash attention writes a gradient of the queries for each block
of keys, and jax sums these arrays by one reduction, with which TPU compilers fuse no
other operation. Those of v5e, v5p and v6e count 3.5, 5 and 7 times as many cycles for
it as for additions.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from meshpar import compat
from meshpar.arrays import Array
from meshpar.jaxprs.walk import CALLS, Interpreter, written

MOST_ADDED = 8
"""The most blocks that are added; each is read by one operation of the fusion."""


def by_additions(fn: Callable) -> Callable:
    """A function of arrays whose sums over few blocks are additions.

    The blocks are added in the precision in which they were summed.

    Args:
      fn: a pure function of pytrees of arrays.
    """

    def added(*args: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        traced = written(fn, *shapes)
        results = _Adding().evaluate(traced.jaxpr, jax.tree.leaves(args))
        return traced.returned(results)

    return added


@dataclasses.dataclass(frozen=True)
class _Adding(Interpreter[Array]):
    """Runs jaxprs, and adds what they sum over few blocks.

    Attributes:
      cast: {id of a value: (the value, what it was cast from)}.
    """

    cast: dict[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)

    def constant(self, value: Any) -> Any:
        return value

    def equation(self, eqn: Any, operands: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.call(eqn, operands)
        if name == "reduce_sum" and (added := self._added(eqn, *operands)) is not None:
            return [added]
        results = list(compat.bind(eqn, operands))
        if name == "convert_element_type":
            self.cast[id(results[0])] = results[0], operands[0]
        return results

    def _added(self, eqn: Any, x: Array) -> Array | None:
        """The sum of an equation by additions; None if it is over more."""
        axis, *others = eqn.params["axes"]
        if others or not 1 < x.shape[axis] <= MOST_ADDED:
            return None
        # Blocks are cast one by one: a cast of all would be written to memory.
        _, source = self.cast.get(id(x), (x, x))
        blocks = (
            lax.index_in_dim(source, i, axis, keepdims=False).astype(x.dtype)
            for i in range(x.shape[axis])
        )
        return functools.reduce(operator.add, blocks)
