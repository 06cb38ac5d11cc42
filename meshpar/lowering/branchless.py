"""Runs an update where devices hold values of their own, without conditionals.

Inside shard_map the branches of `lax.cond` have to agree on the manual axes along which
their results differ, and optax does not see to that. Here all branches run, and the
results of one are selected.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar import compat
from meshpar.arrays import Array, vary
from meshpar.jaxprs.walk import CALLS, Interpreter, written


def without_branches(fn: Callable, axes: tuple[str, ...], *args: Any) -> Any:
    """fn(*args), in which every value is marked as differing over manual axes.

    Args:
      fn: a pure function of pytrees of arrays.
      axes: the manual axes.
      *args: its arguments.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    traced = written(fn, *shapes)
    results = _Branchless(axes).evaluate(traced.jaxpr, jax.tree.leaves(args))
    return traced.returned(results)


@dataclasses.dataclass(frozen=True)
class _Branchless(Interpreter[Array]):
    """Runs jaxprs on arrays that differ over manual axes.

    Attributes:
      axes: the manual axes.
    """

    axes: tuple[str, ...]

    def constant(self, value: Any) -> Array:
        return self._marked(value)

    def run(
        self, jaxpr: Any, constants: Sequence[Array], inputs: Sequence[Any]
    ) -> list[Array]:
        return super().run(jaxpr, constants, list(map(self._marked, inputs)))

    def equation(self, eqn: Any, operands: list[Array]) -> list[Array]:
        if eqn.primitive.name == "cond":
            results = self._select(eqn.params["branches"], *operands)
        elif eqn.primitive.name == "scan":
            results = self._scan(eqn, operands)
        elif eqn.primitive.name in CALLS:
            results = self.call(eqn, operands)
        else:
            results = compat.bind(eqn, operands)
        return list(map(self._marked, results))

    def _marked(self, value: Any) -> Array:
        return vary(jnp.asarray(value), self.axes)

    def _select(self, branches: Sequence[Any], index: Any, *args: Any) -> list[Any]:
        """The results of the branch with a number."""
        results = [self.evaluate(branch, args) for branch in branches]
        if len(branches) == 2:
            index = index.astype(bool)
        return [lax.select_n(index, *cases) for cases in zip(*results, strict=True)]

    def _scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """The results of a scan, whose body is marked as well."""
        body, settings = eqn.params["jaxpr"], eqn.params
        num_consts, num_carry = compat.scan_counts(eqn)
        consts, rest = inputs[:num_consts], inputs[num_consts:]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.evaluate(body, [*consts, *carry, *xs])
            return results[:num_carry], results[num_carry:]

        carry, ys = lax.scan(
            step,
            rest[:num_carry],
            rest[num_carry:],
            length=settings["length"],
            reverse=settings["reverse"],
            unroll=settings["unroll"],
        )
        return [*carry, *ys]
