"""Runs operations on a batch of matrices with one of them alone.

A jaxpr fixes the shapes of its values. Where every operation does the same with each
matrix of a batch, and never mixes two, it can run with a batch of 1 in place of all.
Operations that are not known to do so are refused.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from meshpar import compat
from meshpar.arrays import Array
from meshpar.jaxprs.reach import ELEMENTWISE, REDUCTIONS
from meshpar.jaxprs.walk import CALLS, Interpreter

_FACTORS = frozenset("cholesky eigh lu qr svd triangular_solve".split())


class MixesBatchError(Exception):
    """An operation may mix the matrices of a batch."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A value of which one matrix alone is there.

    Attributes:
      array: with size 1 along the batch; whole if the value has no batch.
      dim: the dim of the batch; None if the value has none.
      constant: dims along which a value without a batch is the same everywhere.
    """

    array: Array
    dim: int | None = None
    constant: frozenset[int] = frozenset()


class OneOfBatch(Interpreter[Part]):
    """Evaluates equations on `Part`s."""

    def constant(self, value: Any) -> Part:
        """The value of a literal or a constant."""
        return Part(value)

    def equation(self, eqn: Any, operands: list[Part]) -> list[Part]:
        """The parts of an equation's results.

        Raises:
          MixesBatchError: it may mix the matrices of a batch.
        """
        name = eqn.primitive.name
        if name in CALLS:
            return self.call(eqn, operands)
        dims = [x.dim for x in operands if x.dim is not None]
        if not dims:
            arrays = compat.bind(eqn, [x.array for x in operands])
            constant = _constant_dims(eqn, operands)
            return [Part(x, None, constant) for x in arrays]
        if name == "scan":
            return self._scan(eqn, operands)
        if name in ELEMENTWISE and name != "sharding_constraint":
            return _elementwise(eqn, operands, dims)
        if name == "dot_general":
            return [_dot_general(eqn, *operands)]
        if name in _FACTORS:
            ranks = (x.array.ndim for x in operands)
            if len(dims) < len(operands) or set(dims) != {0} or min(ranks) < 3:
                raise MixesBatchError(name)
            arrays = compat.bind(eqn, [x.array for x in operands])
            return [Part(x, 0) for x in arrays]
        return [_moved(eqn, operands[0])]

    def _scan(self, eqn: Any, operands: list[Part]) -> list[Part]:
        """The results of a scan, whose body runs with one matrix, too."""
        num_consts, num_carry = compat.scan_counts(eqn)
        consts, rest = operands[:num_consts], operands[num_consts:]
        carry, xs = rest[:num_carry], rest[num_carry:]
        if any(x.dim == 0 for x in xs):
            raise MixesBatchError("scan")
        inner = [None if x.dim is None else x.dim - 1 for x in xs]
        dims: list[int | None] = []

        def body(state: list[Array], slices: list[Array]) -> tuple[list, list]:
            before = [Part(a, x.dim) for a, x in zip(state, carry, strict=True)]
            own = [Part(a, dim) for a, dim in zip(slices, inner, strict=True)]
            parts = self.evaluate(eqn.params["jaxpr"], [*consts, *before, *own])
            dims[:] = [x.dim for x in parts]
            if dims[:num_carry] != [x.dim for x in carry]:
                raise MixesBatchError("scan")
            arrays = [x.array for x in parts]
            return arrays[:num_carry], arrays[num_carry:]

        state, ys = lax.scan(
            body,
            [x.array for x in carry],
            [x.array for x in xs],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        after = [dim if dim is None else dim + 1 for dim in dims[num_carry:]]
        both = zip([*state, *ys], [*dims[:num_carry], *after], strict=True)
        return [Part(x, dim) for x, dim in both]


def mixes_batch(run: Callable, *shapes: Any) -> bool:
    """Whether a function of arrays, traced on shapes, raises MixesBatchError."""
    try:
        jax.eval_shape(run, *shapes)
    except MixesBatchError:
        return True
    return False


def _constant_dims(eqn: Any, operands: Sequence[Part]) -> frozenset[int]:
    """Dims along which a result without a batch is the same everywhere."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if name == "broadcast_in_dim":
        kept, (x, *_) = eqn.params["broadcast_dimensions"], operands
        new = set(range(out.ndim)) - set(kept)
        new |= {kept[dim] for dim in x.constant}
        shape = np.shape(x.array)
        new |= {at for dim, at in enumerate(kept) if shape[dim] < out.shape[at]}
        return frozenset(new)
    if name in ELEMENTWISE:
        each = [x.constant for x in operands if np.ndim(x.array) == out.ndim]
        return frozenset(range(out.ndim)).intersection(*each)
    return frozenset()


def _elementwise(eqn: Any, operands: Sequence[Part], dims: Sequence[int]) -> list[Part]:
    """The results of an elementwise equation."""
    if len(set(dims)) > 1:
        raise MixesBatchError(eqn.primitive.name)
    dim = dims[0]

    def one(x: Part) -> Array:
        if x.dim is not None or np.ndim(x.array) == 0:
            return x.array
        if dim not in x.constant:
            raise MixesBatchError(eqn.primitive.name)
        return lax.slice_in_dim(x.array, 0, 1, axis=dim)

    return [Part(x, dim) for x in compat.bind(eqn, list(map(one, operands)))]


def _dot_general(eqn: Any, lhs: Part, rhs: Part) -> Part:
    """The result of a matmul: over the batch of both, or of one with a plain matrix."""
    (contracted, together) = eqn.params["dimension_numbers"]
    pairs = list(zip(*together, strict=True))
    (array,) = compat.bind(eqn, [lhs.array, rhs.array])
    if lhs.dim is not None and rhs.dim is not None:
        if (lhs.dim, rhs.dim) not in pairs:
            raise MixesBatchError("dot_general")
        return Part(array, pairs.index((lhs.dim, rhs.dim)))
    side = 0 if lhs.dim is not None else 1
    x = (lhs, rhs)[side]
    if x.dim in contracted[side] or x.dim in together[side]:
        raise MixesBatchError("dot_general")
    used = {*contracted[side], *together[side]}
    free = [dim for dim in range(x.array.ndim) if dim not in used]
    before = len(pairs)
    if side == 1:
        taken = {*contracted[0], *together[0]}
        before += lhs.array.ndim - len(taken)
    return Part(array, before + free.index(x.dim))


def _moved(eqn: Any, x: Part) -> Part:
    """The result of an equation of one operand that keeps, moves or sums other dims."""
    name, params, dim, shape = eqn.primitive.name, eqn.params, x.dim, x.array.shape
    if name in REDUCTIONS and dim not in params["axes"]:
        (array,) = compat.bind(eqn, [x.array])
        return Part(array, dim - sum(axis < dim for axis in params["axes"]))
    if name == "transpose":
        (array,) = compat.bind(eqn, [x.array])
        return Part(array, params["permutation"].index(dim))
    if name == "squeeze" and dim not in params["dimensions"]:
        array = lax.squeeze(x.array, params["dimensions"])
        return Part(array, dim - sum(d < dim for d in params["dimensions"]))
    new = list(eqn.outvars[0].aval.shape)
    if name == "broadcast_in_dim":
        at = params["broadcast_dimensions"][dim]
        new[at] = 1
        kept = params["broadcast_dimensions"]
        return Part(lax.broadcast_in_dim(x.array, new, kept), at)
    if name == "reshape":
        size, before = eqn.invars[0].aval.shape[dim], math.prod(shape[:dim])
        for at, other in enumerate(new):
            if other == size and math.prod(new[:at]) == before:
                new[at] = 1
                return Part(lax.reshape(x.array, new), at)
    raise MixesBatchError(name)
