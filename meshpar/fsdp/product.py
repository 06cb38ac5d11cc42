"""Gradients of weights as matmuls that are still to be done.

The gradient of a matmul's weight is a matmul of its input and its output's gradient. A
ring can have it part by part: each matmul adds the sum that arrives, so that no whole
gradient is held, and no pass over memory cuts and adds.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition
  in Large Deep Learning Models, ASPLOS 2023 (einsum and reduce-scatter).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar import compat
from meshpar.arrays import Array
from meshpar.jaxprs.straight_line import Atom, Slot, Step, StraightLine
from meshpar.mesh.order import computed


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs", "rhs"],
    meta_fields=["numbers", "order", "dtype", "precision", "source"],
)
@dataclasses.dataclass(frozen=True)
class Product:
    """A matmul that is still to be done; stands for its result.

    Attributes:
      lhs: one operand.
      rhs: the other.
      numbers: `dimension_numbers` of the matmul, as in `jax.lax.dot_general`.
      order: dims of the matmul's result, in the order of those of this one.
      dtype: of the result.
      precision: of the matmul, as in `jax.lax.dot_general`.
      source: `source_info` of the equation that it stands for, if any.
    """

    lhs: Any
    rhs: Any
    numbers: Any
    order: tuple[int, ...]
    dtype: Any
    precision: Any = None
    source: Any = None

    @property
    def _dims(self) -> list[tuple[int | None, int | None]]:
        """The dims of (lhs, rhs) that each dim of the result comes from."""
        (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = self.numbers
        dims: list[tuple[int | None, int | None]]
        dims = list(zip(lhs_batch, rhs_batch, strict=True))
        for at, used in ((0, lhs_summed + lhs_batch), (1, rhs_summed + rhs_batch)):
            free = (d for d in range((self.lhs, self.rhs)[at].ndim) if d not in used)
            dims += [(None, d) if at else (d, None) for d in free]
        return [dims[dim] for dim in self.order]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple(
            self.rhs.shape[right] if left is None else self.lhs.shape[left]
            for left, right in self._dims
        )

    def moved(self, dim: int) -> "Product":
        """This product with a dim moved to the front."""
        others = (d for i, d in enumerate(self.order) if i != dim)
        return dataclasses.replace(self, order=(self.order[dim], *others))

    def whole(self) -> Array:
        """The result."""
        return self._times(self.lhs, self.rhs).astype(self.dtype)

    def _times(self, lhs: Array, rhs: Array) -> Array:
        """The matmul of operands or their parts, in float32 or wider."""
        dtype, source = jnp.promote_types(self.dtype, jnp.float32), self.source
        with contextlib.nullcontext() if source is None else compat.written_at(source):
            result = lax.dot_general(
                lhs, rhs, self.numbers, self.precision, preferred_element_type=dtype
            )
        return result.transpose(self.order)

    def part(self, dim: int, number: Array, size: int, total: Array | None) -> Array:
        """One of `size` equal parts of the result, added to a total of it if given.

        Args:
          dim: that is cut.
          number: of the part.
          size: number of parts.
          total: of the shape of the part.
        """
        operands = [self.lhs, self.rhs]
        for at, cut in enumerate(self._dims[dim]):
            if cut is not None:
                x = operands[at]
                length = x.shape[cut] // size
                start = number * length
                operands[at] = lax.dynamic_slice_in_dim(x, start, length, cut)
        if total is None:
            return self._times(*operands).astype(self.dtype)
        # Otherwise a compiler would do the matmul before the total is there, and add
        # in another pass over memory.
        total, *operands = computed((total, *operands))
        result = self._times(*operands)
        return (result + total.astype(result.dtype)).astype(self.dtype)


def whole(gradient: Array | Product) -> Array:
    """The gradient as an array."""
    return gradient.whole() if isinstance(gradient, Product) else gradient


_KEEPS = "transpose", "convert_element_type", "copy", "pvary", "pcast"
"""Primitives through which the result of a matmul is still a `Product`."""


def _find(value: Atom, makers: dict[Slot, Step]) -> tuple[Step, tuple[int, ...]] | None:
    """The matmul whose result a value is, and its dims in order.

    Args:
      value: of a program.
      makers: {value: the step that makes it}.
    """
    order, step = tuple(range(len(value.aval.shape))), _maker(value, makers)
    while step is not None and step.eqn.primitive.name in _KEEPS:
        if step.eqn.primitive.name == "transpose":
            order = tuple(step.eqn.params["permutation"][dim] for dim in order)
        step = _maker(step.operands[0], makers)
    if step is None or step.eqn.primitive.name != "dot_general":
        return None
    return step, order


def _maker(value: Atom, makers: dict[Slot, Step]) -> Step | None:
    return makers.get(value) if isinstance(value, Slot) else None


def with_products(
    fn: Callable[[Any, Any], tuple[dict[str, Array], Any]], weights: Any, args: Any
) -> tuple[dict[str, Array | Product], Any]:
    """fn(weights, args), where gradients that are matmuls are left to be done.

    Args:
      fn: (weights, args) -> ({path: gradient of a weight}, other results).
      weights: a pytree of arrays.
      args: a pytree of arrays.
    """
    inputs, tree = jax.tree.flatten((weights, args))
    closed, results = jax.make_jaxpr(
        lambda *x: fn(*jax.tree.unflatten(tree, x)), return_shape=True
    )(*inputs)
    program = StraightLine.of(closed)
    makers = {slot: step for step in program.steps for slot in step.results}
    paths = sorted(results[0])
    outputs = dict(zip(paths, program.outputs, strict=False))
    matmuls = {path: _find(value, makers) for path, value in outputs.items()}
    found = {path: matmul for path, matmul in matmuls.items() if matmul is not None}
    others = [path for path in paths if path not in found]
    rest = program.outputs[len(paths) :]
    factors = [x for step, _ in found.values() for x in step.operands]
    known = dict(zip(program.inputs, inputs, strict=True))
    wanted = [*(outputs[path] for path in others), *rest, *factors]
    values = iter(program.evaluate(wanted, known))
    gradients: dict[str, Array | Product] = {path: next(values) for path in others}
    results_rest = [next(values) for _ in rest]
    for path, (step, order) in found.items():
        gradients[path] = Product(
            next(values),
            next(values),
            _as_tuples(step.eqn.params["dimension_numbers"]),
            order,
            outputs[path].aval.dtype,
            step.eqn.params["precision"],
            step.eqn.source_info,
        )
    rest_tree = jax.tree.structure(results[1])
    return gradients, jax.tree.unflatten(rest_tree, results_rest)


def _as_tuples(numbers: Any) -> Any:
    return tuple(tuple(tuple(dims) for dims in pair) for pair in numbers)
