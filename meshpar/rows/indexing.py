"""Rules for primitives that read and write by index: gather and scatter."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshpar.rows.shapes import row_dims
from meshpar.rows.values import (
    COMBINED,
    PICKED,
    REDUCED,
    Counted,
    Fixed,
    Mixed,
    PerRow,
    Ratio,
    Summed,
    counts,
    is_zero,
    nonlinear,
)


def gather(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Rule for gather: a lookup in a table for each row, or in each row."""
    operand, indices = values
    numbers, out_rank = eqn.params["dimension_numbers"], len(eqn.outvars[0].aval.shape)
    outer = [d for d in range(out_rank) if d not in numbers.offset_dims]
    if any(isinstance(v, REDUCED) for v in values):
        linear = isinstance(indices, Fixed) and isinstance(operand, Summed | Ratio)
        return operand if linear else nonlinear("indexing")
    counted = _counted(indices)
    if isinstance(operand, Counted):
        return counts(operand)
    if isinstance(operand, Fixed):
        if counted and not row_dims(eqn.invars[0].aval, prime):
            return counts(counted)
        if indices.dim >= len(outer) or indices.degree or indices.is_ratio:
            return COMBINED
        return PerRow(outer[indices.dim], indices.inner)
    dim = _dim_of_indices(eqn, operand, indices, prime)
    if counted and (dim is None or operand.dim in numbers.operand_batching_dims):
        return counts(counted)
    if dim is not None:
        if isinstance(indices, PerRow) and (indices.dim, indices.inner) != (
            dim,
            operand.inner,
        ):
            return COMBINED
        return operand._replace(dim=outer[dim], columns=())
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if isinstance(indices, PerRow) or sizes[operand.dim] != shape[operand.dim]:
        return PICKED
    kept = [d for d in range(len(shape)) if d not in gone]
    place = numbers.offset_dims[kept.index(operand.dim)]
    return operand._replace(dim=place, columns=())


def _dim_of_indices(eqn: Any, operand: PerRow, indices: Any, prime: int) -> int | None:
    """The dim of the indices that walks through the operand's rows in order."""
    numbers = eqn.params["dimension_numbers"]
    if operand.dim in numbers.operand_batching_dims:
        place = tuple(numbers.operand_batching_dims).index(operand.dim)
        return numbers.start_indices_batching_dims[place]
    if operand.dim not in numbers.start_index_map:
        return None
    place = tuple(numbers.start_index_map).index(operand.dim)
    return _counting_dim(indices, place, prime)


def _counted(indices: Any, but: int | None = None) -> Counted | None:
    """The indices, or the column of them, that count rows; None if none do."""
    if isinstance(indices, Counted):
        return indices
    columns = indices.columns if isinstance(indices, PerRow) else ()
    found = (v for i, v in enumerate(columns) if isinstance(v, Counted) and i != but)
    return next(found, None)


def _counting_dim(indices: Any, place: int, prime: int) -> int | None:
    """The dim along which a column of indices counts 0, 1, 2, ... over all rows."""
    column = others = None
    if isinstance(indices, Counted) and indices.known is not None:
        column = indices.known[..., place]
        others = np.delete(indices.known, place, axis=-1)
    elif isinstance(indices, PerRow) and indices.columns:
        if _counted(indices, place):
            return None
        column = getattr(indices.columns[place], "known", None)
    if column is None:
        return None
    for dim, size in enumerate(column.shape):
        lined_up = np.arange(size).reshape([-1] + [1] * (column.ndim - dim - 1))
        if size % prime == 0 and np.array_equal(
            column, np.broadcast_to(lined_up, column.shape)
        ):
            first = None if others is None else np.take(others, [0], axis=dim)
            return dim if others is None or np.all(others == first) else None
    return None


def scatter(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Rule for scatter: writes or adds one entry in each row, or rows into a table."""
    operand, indices, updates = values
    if any(isinstance(v, REDUCED) for v in values):
        return nonlinear("writing by index")
    numbers, held = (
        eqn.params["dimension_numbers"],
        row_dims(eqn.outvars[0].aval, prime),
    )
    rows = [v for v in values if isinstance(v, PerRow)]
    if any(v.degree or v.is_ratio for v in (operand, indices) if isinstance(v, PerRow)):
        return nonlinear("writing by index")
    counted = _counted(indices)
    if other := next((v for v in (operand, updates) if isinstance(v, Counted)), None):
        return counts(other)
    if counted and (not held or held[0] in numbers.operand_batching_dims):
        return counts(counted)
    if not held:
        if eqn.primitive.name not in ("scatter_add", "scatter-add"):
            return Mixed("rows overwrite each other")
        degree = updates.degree if isinstance(updates, PerRow | Fixed) else 0
        return Summed(degree, shift=None if is_zero(operand) else operand.degree)
    if len(held) > 1 or any(v.degree or v.is_ratio for v in rows):
        return COMBINED
    (dim,) = held
    if dim in numbers.operand_batching_dims:
        return PerRow(dim, rows[0].inner)
    if dim in numbers.scatter_dims_to_operand_dims:
        place = tuple(numbers.scatter_dims_to_operand_dims).index(dim)
        if _counting_dim(indices, place, prime) is not None:
            return PerRow(dim, rows[0].inner)
    elif isinstance(indices, Fixed) and row_dims(eqn.invars[2].aval, prime):
        return PerRow(dim, rows[0].inner)
    return counts(counted) if counted else PICKED


RULES = {
    "gather": gather,
    "scatter": scatter,
    "scatter_add": scatter,
    "scatter-add": scatter,
}
"""{primitive: rule for the value of its result}."""
