"""Rules for primitives that move, reduce or contract dims."""

import math
from collections.abc import Sequence
from typing import Any

from meshpar.rows.arithmetic import joined
from meshpar.rows.values import (
    COMBINED,
    IN_BATCH,
    NUMBER,
    PICKED,
    PLAIN,
    REDUCED,
    Counted,
    Fixed,
    Mixed,
    PerRow,
    Ratio,
    Summed,
    counts,
    nonlinear,
)


def row_dims(aval: Any, prime: int) -> list[int]:
    """The dims of an array that hold rows."""
    return [
        dim
        for dim, size in enumerate(getattr(aval, "shape", ()))
        if size and size % prime == 0
    ]


def _moved(value: PerRow, dim: int) -> PerRow:
    return value._replace(dim=dim, columns=())


def reduce_sum(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Rule for reduce_sum; the dims may hold rows."""
    (value,), axes = values, eqn.params["axes"]
    held = [d for d in row_dims(eqn.invars[0].aval, prime) if d in axes]
    if isinstance(value, Summed) and value.shift is not None:
        value = value._replace(shift=value.shift + len(held))
    if isinstance(value, Summed | Ratio):
        return value._replace(degree=value.degree + len(held))
    if not isinstance(value, PerRow):
        return nonlinear("sum")
    if value.dim not in axes:
        dim = value.dim - sum(axis < value.dim for axis in axes)
        return _moved(value, dim)._replace(degree=value.degree + len(held))
    degree = value.degree + len(held) - 1
    return Ratio(degree) if value.is_ratio else Summed(degree)


def reduce_other(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Rule for all other reductions, such as a maximum or a product."""
    del prime
    name, axes = eqn.primitive.name, eqn.params["axes"]
    for value in values:
        if isinstance(value, PerRow):
            if value.dim in axes:
                return Mixed(f"{name} runs over rows")
            if value.degree or value.is_ratio:
                return nonlinear(name)
    value = next(v for v in values if not isinstance(v, Fixed))
    if not isinstance(value, PerRow):
        return nonlinear(name)
    return _moved(value, value.dim - sum(axis < value.dim for axis in axes))


def reshape(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Splits and merges dims; the rows keep their place in row-major order."""
    value, old = values[0], eqn.invars[0].aval.shape
    if not isinstance(value, PerRow):
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
    if not isinstance(value, PerRow):
        return value
    return _moved(value, eqn.params["broadcast_dimensions"][value.dim])


def transpose(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Permutes dims."""
    del prime
    value = values[0]
    if not isinstance(value, PerRow):
        return value
    return _moved(value, tuple(eqn.params["permutation"]).index(value.dim))


def squeeze(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Removes dims of size 1."""
    del prime
    value = values[0]
    if not isinstance(value, PerRow):
        return value
    dims = eqn.params["dimensions"]
    return _moved(value, value.dim - sum(dim < value.dim for dim in dims))


def take_part(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """A slice, a dynamic slice or a padded array; it must keep all rows."""
    del prime
    value, *starts = values
    if any(not isinstance(v, Fixed) for v in starts):
        return Mixed(f"{eqn.primitive.name} starts where the batch says")
    if isinstance(value, PerRow):
        old, new = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
        if old[value.dim] != new[value.dim]:
            return PICKED
        return _moved(value, value.dim)
    return value


def update_part(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Writes an array into a larger one; both must hold all rows."""
    operand, update, *starts = values
    if any(not isinstance(v, Fixed) for v in starts):
        return Mixed(f"{eqn.primitive.name} starts where the batch says")
    if any(isinstance(v, REDUCED) for v in (operand, update)):
        return nonlinear(eqn.primitive.name)
    rows = [v for v in (operand, update) if isinstance(v, PerRow)]
    held = [row_dims(v.aval, prime) for v in eqn.invars[:2]]
    if held != [[rows[0].dim]] * 2 or len({v.inner for v in rows}) > 1:
        return PICKED
    return joined([_without_columns(v) for v in (operand, update)])


def concatenate(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Joins arrays along a dim that holds no rows, or along a new one."""
    del prime
    is_stack = eqn.primitive.name == "stack"
    dim = eqn.params["axis" if is_stack else "dimension"]
    rows = [v for v in values if isinstance(v, PerRow)]
    counted = next((v for v in values if isinstance(v, Counted)), None)
    if any(isinstance(v, REDUCED) for v in values):
        return nonlinear(eqn.primitive.name) if rows else joined(values)
    shape = eqn.outvars[0].aval.shape
    if len({(v.dim, v.inner) for v in rows}) > 1:
        return COMBINED
    if not is_stack and rows[0].dim == dim:
        return COMBINED
    if len({(v.degree, v.is_ratio) for v in rows}) > 1:
        return nonlinear(eqn.primitive.name)
    if any(v.degree for v in values if isinstance(v, Fixed)):
        return Mixed(NUMBER, IN_BATCH)
    is_column = dim == len(shape) - 1 and shape[dim] == len(values)
    if counted and not is_column:
        return counts(counted)
    columns = tuple(_column(v, is_stack) for v in values) if is_column else ()
    place = rows[0].dim + (is_stack and dim <= rows[0].dim)
    return rows[0]._replace(dim=place, columns=columns)


def _column(value: Any, is_stack: bool) -> Any:
    """A value that is joined along the last dim, without that dim."""
    if isinstance(value, PLAIN) and value.known is not None and not is_stack:
        return value._replace(known=value.known[..., 0])
    return _without_columns(value)


def _without_columns(value: Any) -> Any:
    return value._replace(columns=()) if isinstance(value, PerRow) else value


def dot_general(eqn: Any, values: Sequence[Any], prime: int) -> Any:
    """Rule for dot_general, which may contract rows."""
    (contracted, batched) = eqn.params["dimension_numbers"]
    if any(isinstance(v, REDUCED) for v in values):
        sums = [v for v in values if isinstance(v, REDUCED)]
        fixed = [v for v in values if isinstance(v, Fixed)]
        linear = len(fixed) == 1 and isinstance(sums[0], Summed | Ratio)
        linear = linear and not fixed[0].degree
        return sums[0] if linear else nonlinear("dot_general")
    dims: list[int | None] = []
    for variable in eqn.invars:
        held = row_dims(variable.aval, prime)
        if len(held) > 1:
            return COMBINED
        dims.append(held[0] if held else None)
    rows = [v for v in values if isinstance(v, PerRow)]
    degree, ratios = sum(v.degree for v in values), sum(v.is_ratio for v in rows)
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
    found = {
        _place_after(side, dim, contracted, batched, eqn)
        for side, dim in enumerate(dims)
        if dim is not None
    }
    if len(found) > 1:
        return COMBINED
    return PerRow(found.pop(), rows[0].inner, degree, bool(ratios))


def _place_after(side: int, dim: int, contracted: Any, batched: Any, eqn: Any) -> int:
    """The dim of a matrix product's result that stems from a dim of an operand."""
    if dim in batched[side]:
        return tuple(batched[side]).index(dim)

    def free(side: int) -> list[int]:
        used = {*contracted[side], *batched[side]}
        rank = len(eqn.invars[side].aval.shape)
        return [d for d in range(rank) if d not in used]

    before = len(batched[0]) + (len(free(0)) if side else 0)
    return before + free(side).index(dim)
