"""Where the rows of the batch are after a primitive that moves or contracts dims."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshpar.models.row_values import (
    COMBINED,
    REDUCED,
    Fixed,
    Mixed,
    Ratio,
    Rows,
    Summed,
    is_zero,
    nonlinear,
)

_PICKED = Mixed("single rows are picked by their number")


def row_dims(aval: Any, prime: int) -> list[int]:
    """The dims of an array that hold rows."""
    return [
        dim
        for dim, size in enumerate(getattr(aval, "shape", ()))
        if size and size % prime == 0
    ]


def _moved(value: Rows, dim: int) -> Rows:
    return value._replace(dim=dim, columns=())


def reduce_sum(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """A sum over dims, which may hold rows."""
    (value,), axes = values, eqn.params["axes"]
    held = [d for d in row_dims(eqn.invars[0].aval, prime) if d in axes]
    if isinstance(value, Fixed):
        return Summed(len(held) - 1) if held else Fixed()
    if isinstance(value, Summed | Ratio):
        return value._replace(degree=value.degree + len(held))
    if not isinstance(value, Rows):
        return nonlinear("sum")
    if value.dim not in axes:
        dim = value.dim - sum(axis < value.dim for axis in axes)
        return _moved(value, dim)._replace(degree=value.degree + len(held))
    degree = value.degree + len(held) - 1
    return Ratio(degree) if value.is_ratio else Summed(degree)


def reduce_other(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """A maximum, product or another reduction of each operand."""
    del prime
    name, axes = eqn.primitive.name, eqn.params["axes"]
    for value in values:
        if isinstance(value, Rows):
            if value.dim in axes:
                return Mixed(f"{name} runs over rows")
            if value.degree or value.is_ratio:
                return nonlinear(name)
    value = next(v for v in values if not isinstance(v, Fixed))
    if not isinstance(value, Rows):
        return nonlinear(name)
    return _moved(value, value.dim - sum(axis < value.dim for axis in axes))


def reshape(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Splits and merges dims; the rows keep their place in row-major order."""
    value, old = values[0], eqn.invars[0].aval.shape
    if not isinstance(value, Rows):
        return value
    new = eqn.outvars[0].aval.shape
    stride = value.inner * math.prod(old[value.dim + 1 :])
    for dim, size in enumerate(new):
        below = math.prod(new[dim + 1 :])
        if size % prime == 0 and below <= stride < below * size:
            inner, rest = divmod(stride, below)
            if not rest and size % (inner * prime) == 0:
                return value._replace(dim=dim, inner=inner, columns=())
    return COMBINED


def broadcast_in_dim(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Adds dims."""
    del prime
    value = values[0]
    if not isinstance(value, Rows):
        return value
    return _moved(value, eqn.params["broadcast_dimensions"][value.dim])


def transpose(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Permutes dims."""
    del prime
    value = values[0]
    if not isinstance(value, Rows):
        return value
    return _moved(value, tuple(eqn.params["permutation"]).index(value.dim))


def squeeze(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Removes dims of size 1."""
    del prime
    value = values[0]
    if not isinstance(value, Rows):
        return value
    dims = eqn.params["dimensions"]
    return _moved(value, value.dim - sum(dim < value.dim for dim in dims))


def take_part(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """A slice, a dynamic slice or a padded array; it must keep all rows."""
    del prime
    value, *starts = values
    if any(not isinstance(v, Fixed) for v in starts):
        return Mixed(f"{eqn.primitive.name} starts where the batch says")
    if isinstance(value, Rows):
        old, new = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
        if old[value.dim] != new[value.dim]:
            return _PICKED
        return _moved(value, value.dim)
    return value


def concatenate(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Joins arrays along a dim that holds no rows."""
    dim, rows = eqn.params["dimension"], [v for v in values if isinstance(v, Rows)]
    if any(isinstance(v, REDUCED) for v in values):
        return nonlinear("concatenate") if rows or len(set(values)) > 1 else values[0]
    shape = eqn.outvars[0].aval.shape
    if len({(v.dim, v.inner) for v in rows}) > 1 or rows[0].dim == dim:
        return COMBINED
    if len({(v.degree, v.is_ratio) for v in rows}) > 1:
        return nonlinear("concatenate")
    is_column = dim == len(shape) - 1 and shape[dim] == len(values)
    columns = tuple(_without_columns(v) for v in values) if is_column else ()
    return rows[0]._replace(columns=columns)


def _without_columns(value: Any) -> Any:
    return value._replace(columns=()) if isinstance(value, Rows) else value


def dot_general(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """A matrix product, which may contract rows."""
    (contracted, batched) = eqn.params["dimension_numbers"]
    if any(isinstance(v, REDUCED) for v in values):
        sums = [v for v in values if isinstance(v, REDUCED)]
        fixed = [v for v in values if isinstance(v, Fixed)]
        linear = len(fixed) == 1 and isinstance(sums[0], Summed | Ratio)
        return sums[0] if linear else nonlinear("dot_general")
    dims: list[int | None] = []
    for variable in eqn.invars:
        held = row_dims(variable.aval, prime)
        if len(held) > 1:
            return COMBINED
        dims.append(held[0] if held else None)
    rows = [v for v in values if isinstance(v, Rows)]
    degree, ratios = sum(v.degree for v in rows), sum(v.is_ratio for v in rows)
    if len({v.inner for v in rows}) > 1:
        return COMBINED
    if ratios > 1:
        return nonlinear("dot_general")
    places = [
        tuple(side).index(dim) if dim in side else None
        for side, dim in zip(contracted, dims, strict=True)
    ]
    if any(place is not None for place in places):
        if places[0] != places[1]:
            return COMBINED
        return Ratio(degree) if ratios else Summed(degree)
    if not rows:
        return Fixed()
    found = {
        _place_after(side, dim, contracted, batched, eqn)
        for side, dim in enumerate(dims)
        if dim is not None
    }
    if len(found) > 1:
        return COMBINED
    return Rows(found.pop(), rows[0].inner, degree, bool(ratios))


def _place_after(side: int, dim: int, contracted: Any, batched: Any, eqn: Any) -> int:
    """Where a dim of one operand is in the result of a matrix product."""
    if dim in batched[side]:
        return tuple(batched[side]).index(dim)

    def free(side: int) -> list[int]:
        used = {*contracted[side], *batched[side]}
        rank = len(eqn.invars[side].aval.shape)
        return [d for d in range(rank) if d not in used]

    before = len(batched[0]) + (len(free(0)) if side else 0)
    return before + free(side).index(dim)


def gather(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Indexing: a lookup in a table by row, or of one entry in each row."""
    operand, indices = values
    numbers, out_rank = eqn.params["dimension_numbers"], len(eqn.outvars[0].aval.shape)
    outer = [d for d in range(out_rank) if d not in numbers.offset_dims]
    if any(isinstance(v, REDUCED) for v in values):
        linear = isinstance(indices, Fixed) and isinstance(operand, Summed | Ratio)
        return operand if linear else nonlinear("indexing")
    if isinstance(operand, Fixed):
        if indices.dim >= len(outer) or indices.degree or indices.is_ratio:
            return COMBINED
        return Rows(outer[indices.dim], indices.inner)
    dim = _dim_of_indices(eqn, operand, indices, prime)
    if dim is not None:
        if isinstance(indices, Rows) and (indices.dim, indices.inner) != (
            dim,
            operand.inner,
        ):
            return COMBINED
        return operand._replace(dim=outer[dim], columns=())
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if isinstance(indices, Rows) or sizes[operand.dim] != shape[operand.dim]:
        return _PICKED
    kept = [d for d in range(len(shape)) if d not in gone]
    place = numbers.offset_dims[kept.index(operand.dim)]
    return operand._replace(dim=place, columns=())


def _dim_of_indices(eqn: Any, operand: Rows, indices: Any, prime: int) -> int | None:
    """The dim of the indices that walks through the operand's rows in order."""
    numbers = eqn.params["dimension_numbers"]
    if operand.dim in numbers.operand_batching_dims:
        place = tuple(numbers.operand_batching_dims).index(operand.dim)
        return numbers.start_indices_batching_dims[place]
    if operand.dim not in numbers.start_index_map:
        return None
    place = tuple(numbers.start_index_map).index(operand.dim)
    return _counting_dim(indices, place, prime)


def _counting_dim(indices: Any, place: int, prime: int) -> int | None:
    """The dim along which a column of indices counts 0, 1, 2, ... over all rows."""
    column = None
    if isinstance(indices, Fixed) and indices.known is not None:
        column = indices.known[..., place]
    elif isinstance(indices, Rows) and indices.columns:
        known = getattr(indices.columns[place], "known", None)
        column = None if known is None else known[..., 0]
    if column is None:
        return None
    for dim, size in enumerate(column.shape):
        lined_up = np.arange(size).reshape([-1] + [1] * (column.ndim - dim - 1))
        if size % prime == 0 and np.array_equal(
            column, np.broadcast_to(lined_up, column.shape)
        ):
            return dim
    return None


def scatter(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Writes or adds entries at indices: one in each row, or all rows into a table."""
    operand, indices, updates = values
    if any(isinstance(v, REDUCED) for v in values):
        return nonlinear("writing by index")
    numbers, held = (
        eqn.params["dimension_numbers"],
        row_dims(eqn.outvars[0].aval, prime),
    )
    rows = [v for v in values if isinstance(v, Rows)]
    if any(v.degree or v.is_ratio for v in (operand, indices) if isinstance(v, Rows)):
        return nonlinear("writing by index")
    if not held:
        if eqn.primitive.name not in ("scatter_add", "scatter-add"):
            return Mixed("rows overwrite each other")
        degree = updates.degree if isinstance(updates, Rows) else 0
        return Summed(degree, "exact" if is_zero(operand) else "shifted")
    if len(held) > 1 or any(v.degree or v.is_ratio for v in rows):
        return COMBINED
    (dim,) = held
    if dim in numbers.operand_batching_dims:
        return Rows(dim, rows[0].inner)
    if dim in numbers.scatter_dims_to_operand_dims:
        place = tuple(numbers.scatter_dims_to_operand_dims).index(dim)
        if _counting_dim(indices, place, prime) is not None:
            return Rows(dim, rows[0].inner)
    return _PICKED
