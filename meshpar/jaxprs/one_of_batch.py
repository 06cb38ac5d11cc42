"""Runs operations on a batch of matrices with one of them alone.

A jaxpr fixes the shapes of its values. Where every operation does the same with each
matrix of a batch, and never mixes two, it can run with a batch of 1 in place of all.
Operations that are not known to do so are refused.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
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
      dim: the first dim of the batch; None if the value has none.
      constant: dims along which a value without a batch is the same everywhere.
      span: dims of the batch, one after the other, such as those of layers and experts.
    """

    array: Array
    dim: int | None = None
    constant: frozenset[int] = frozenset()
    span: int = 1

    def like(self, array: Array, further: int = 0) -> "Part":
        """A value with its batch so many dims further than here."""
        dim = None if self.dim is None else self.dim + further
        return Part(array, dim, span=self.span)

    @property
    def place(self) -> tuple[int | None, int]:
        """Where the batch stands: its first dim, and how many there are."""
        return self.dim, self.span

    @property
    def batch(self) -> range:
        """The dims of the batch."""
        return range(0) if self.dim is None else range(self.dim, self.dim + self.span)


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
        places = {x.place for x in operands if x.dim is not None}
        if not places:
            arrays = compat.bind(eqn, [x.array for x in operands])
            constant = _constant_dims(eqn, operands)
            return [Part(x, None, constant) for x in arrays]
        if name == "scan":
            return self._scan(eqn, operands)
        if name in ELEMENTWISE and name != "sharding_constraint":
            return _elementwise(eqn, operands, places)
        if name == "dot_general":
            return [_dot_general(eqn, *operands)]
        if name in _FACTORS:
            span = operands[0].span
            of_matrices = all(x.array.ndim - span >= 2 for x in operands)
            if {x.place for x in operands} != {(0, span)} or not of_matrices:
                raise MixesBatchError(name)
            arrays = compat.bind(eqn, [x.array for x in operands])
            return [Part(x, 0, span=span) for x in arrays]
        return [_moved(eqn, operands[0])]

    def _scan(self, eqn: Any, operands: list[Part]) -> list[Part]:
        """The results of a scan, whose body runs with one matrix, too."""
        num_consts, num_carry = compat.scan_counts(eqn)
        consts, rest = operands[:num_consts], operands[num_consts:]
        carry, xs = rest[:num_carry], rest[num_carry:]
        if any(x.dim == 0 for x in xs):
            raise MixesBatchError("scan")
        found: list[Part] = []

        def body(state: list[Array], slices: list[Array]) -> tuple[list, list]:
            before = [x.like(a) for a, x in zip(state, carry, strict=True)]
            own = [x.like(a, -1) for a, x in zip(slices, xs, strict=True)]
            parts = self.evaluate(eqn.params["jaxpr"], [*consts, *before, *own])
            found[:] = parts
            if [x.place for x in parts[:num_carry]] != [x.place for x in carry]:
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
        last, stacked = found[:num_carry], found[num_carry:]
        return [
            *(part.like(x) for x, part in zip(state, last, strict=True)),
            *(part.like(x, 1) for x, part in zip(ys, stacked, strict=True)),
        ]


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


def _elementwise(
    eqn: Any, operands: Sequence[Part], places: Collection[tuple[int | None, int]]
) -> list[Part]:
    """The results of an elementwise equation."""
    if len(places) > 1:
        raise MixesBatchError(eqn.primitive.name)
    with_batch = next(x for x in operands if x.dim is not None)

    def one(x: Part) -> Array:
        array = x.array
        if x.dim is not None or np.ndim(array) == 0:
            return array
        for dim in with_batch.batch:
            if dim not in x.constant:
                raise MixesBatchError(eqn.primitive.name)
            array = lax.slice_in_dim(array, 0, 1, axis=dim)
        return array

    return [with_batch.like(x) for x in compat.bind(eqn, list(map(one, operands)))]


def _dot_general(eqn: Any, lhs: Part, rhs: Part) -> Part:
    """The result of a matmul: over the batch of both, or of one with a plain matrix."""
    (contracted, together) = eqn.params["dimension_numbers"]
    pairs = list(zip(*together, strict=True))
    (array,) = compat.bind(eqn, [lhs.array, rhs.array])
    if lhs.dim is not None and rhs.dim is not None:
        own = list(zip(lhs.batch, rhs.batch, strict=False))
        if lhs.span != rhs.span or not set(own) <= set(pairs):
            raise MixesBatchError("dot_general")
        return _at(array, [pairs.index(pair) for pair in own], "dot_general")
    side = 0 if lhs.dim is not None else 1
    x = (lhs, rhs)[side]
    used = {*contracted[side], *together[side]}
    if used.intersection(x.batch):
        raise MixesBatchError("dot_general")
    free = [dim for dim in range(x.array.ndim) if dim not in used]
    before = len(pairs)
    if side == 1:
        taken = {*contracted[0], *together[0]}
        before += lhs.array.ndim - len(taken)
    return _at(array, [before + free.index(dim) for dim in x.batch], "dot_general")


def _at(array: Array, dims: Sequence[int], name: str) -> Part:
    """A value with its batch at some dims, which have to follow each other in order."""
    if list(dims) != list(range(dims[0], dims[0] + len(dims))):
        raise MixesBatchError(name)
    return Part(array, dims[0], span=len(dims))


def _moved(eqn: Any, x: Part) -> Part:
    """The result of an equation of one operand that keeps, moves or sums other dims."""
    name, params, batch = eqn.primitive.name, eqn.params, x.batch
    if name in REDUCTIONS and not set(batch) & set(params["axes"]):
        (array,) = compat.bind(eqn, [x.array])
        return x.like(array, -sum(axis < x.dim for axis in params["axes"]))
    if name == "transpose":
        (array,) = compat.bind(eqn, [x.array])
        return _at(array, [params["permutation"].index(dim) for dim in batch], name)
    if name == "squeeze" and not set(batch) & set(params["dimensions"]):
        array = lax.squeeze(x.array, params["dimensions"])
        return x.like(array, -sum(dim < x.dim for dim in params["dimensions"]))
    new = list(eqn.outvars[0].aval.shape)
    if name == "broadcast_in_dim":
        kept = params["broadcast_dimensions"]
        dims = [kept[dim] for dim in batch]
        for at in dims:
            new[at] = 1
        return _at(lax.broadcast_in_dim(x.array, new, kept), dims, name)
    if name == "reshape":
        return _reshaped(x, eqn.invars[0].aval.shape, new)
    raise MixesBatchError(name)


def _reshaped(x: Part, old: Sequence[int], new: Sequence[int]) -> Part:
    """A value of another shape, whose dims of the batch may be merged or split.

    Args:
      x: the value.
      old: shape of the value with its whole batch.
      new: that of the result.
    """
    size = math.prod(old[dim] for dim in x.batch)
    before = math.prod(old[: x.dim])
    for at, end in itertools.combinations(range(len(new) + 1), 2):
        if math.prod(new[at:end]) == size and math.prod(new[:at]) == before:
            span = end - at
            shape = (*new[:at], *(1,) * span, *new[end:])
            return Part(lax.reshape(x.array, shape), at, span=span)
    raise MixesBatchError("reshape")
