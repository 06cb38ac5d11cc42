"""Dims of gathers and scatters, as in lookups of an embedding and their gradients.

A split of the dim that indices choose from is a part of a sum: each device looks up the
rows that it has, and zeros for all others.
"""

from typing import Any

_WHOLE = -1


def gather_dims(eqn: Any, operands: list, results: list) -> tuple[tuple, tuple]:
    """Factors of a gather: rows of the operand at places that indices give.

    Args:
      eqn: the equation.
      operands: shapes of operand and indices.
      results: shape of the result.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = [_WHOLE] * len(operands[0]), [_WHOLE] * len(operands[1])
    result = [_WHOLE] * len(results[0])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(operand)) if d not in gone]
    for dim, out in zip(window, sorted(numbers.offset_dims), strict=True):
        if sizes[dim] == operands[0][dim]:
            operand[dim] = result[out] = dim
    for dim in numbers.collapsed_slice_dims:
        operand[dim] = dim  # No dim of the result: summed.
    rest = [d for d in range(len(result)) if d not in numbers.offset_dims]
    for place, out in enumerate(rest):  # The last dim of indices is one index.
        indices[place] = result[out] = len(operand) + place
    _batching(
        operand,
        indices,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    return (tuple(operand), tuple(indices)), (tuple(result),)


def scatter_dims(eqn: Any, operands: list, results: list) -> tuple[tuple, tuple]:
    """Factors of a scatter that adds: places of the updates are summed.

    Args:
      eqn: the equation.
      operands: shapes of operand, indices and updates.
      results: shape of the result.
    """
    numbers = eqn.params["dimension_numbers"]
    rank = len(operands[0])
    operand, indices = [_WHOLE] * rank, [_WHOLE] * len(operands[1])
    updates = [_WHOLE] * len(operands[2])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(rank) if d not in gone]
    for dim, out in zip(window, sorted(numbers.update_window_dims), strict=True):
        if operands[0][dim] == operands[2][out]:
            operand[dim] = updates[out] = dim
    for dim in numbers.inserted_window_dims:
        operand[dim] = dim  # A device adds the updates of the rows that it has.
    rest = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    for place, dim in enumerate(rest):
        indices[place] = updates[dim] = rank + place
    _batching(
        operand,
        indices,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    return (tuple(operand), tuple(indices), tuple(updates)), (tuple(operand),)


def _batching(operand: list, indices: list, one: tuple, other: tuple) -> None:
    """Dims that operand and indices share."""
    for dim, place in zip(one, other, strict=True):
        operand[dim] = indices[place]
