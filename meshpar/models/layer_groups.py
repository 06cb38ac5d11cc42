"""Equal layers of a list, stacked: in one row each, or in repeating patterns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array
from meshpar.layouts.param import STACKED_DIM, Param


def group_layers(kinds: Sequence[Any], layers: str) -> list[list[int]]:
    """Numbers of the layers in rows of the shortest pattern that repeats.

    Layers of 3 kinds a, b, b, a, b, b are the rows [[0, 1, 2], [3, 4, 5]].

    Args:
      kinds: one value per layer; equal layers have equal values.
      layers: how a user named the layers.

    Raises:
      ValueError: there are no layers, or no pattern repeats.
    """
    depth = len(kinds)
    if not depth:
        raise ValueError(f"layers={layers!r} matches no layer of the model")
    for period in range(1, depth + 1):
        if depth % period:
            continue
        if all(kinds[i] == kinds[i % period] for i in range(depth)):
            break
    if period == depth and depth > 1:
        differing = next(i for i in range(1, depth) if kinds[i] != kinds[0])
        raise ValueError(
            f"layers={layers!r}: its {depth} layers are not equal, nor a pattern that "
            f"repeats: layer {differing} differs from layer 0 in its attributes, "
            "shapes or dim names, or in what is trained. Leave layers out, or make the "
            "layers equal"
        )
    return [list(range(i, i + period)) for i in range(0, depth, period)]


def stacked_path(prefix: str, groups: list[list[int]], number: int, rest: str) -> str:
    """Path of the stacked variable that holds one variable of a layer.

    Args:
      prefix: first part of the paths of the stack.
      groups: from `group_layers`.
      number: the layer.
      rest: path within the layer.
    """
    period = len(groups[0])
    column = f"{number % period}/" if period > 1 else ""
    return f"{prefix}{column}{rest}"


def stack_params(
    by_layer: Sequence[Mapping[str, Param]], prefix: str, groups: list[list[int]]
) -> dict[str, Param]:
    """{stacked path: Param [rows, ...]} of the layers' {path within a layer: Param}."""
    stacked = {}
    for number in groups[0]:
        for rest, param in by_layer[number].items():
            names = None if param.names is None else (STACKED_DIM, *param.names)
            stacked[stacked_path(prefix, groups, number, rest)] = dataclasses.replace(
                param, shape=(len(groups), *param.shape), names=names, is_stacked=True
            )
    return stacked


def stack_values(
    by_layer: Sequence[Mapping[str, Array]], prefix: str, groups: list[list[int]]
) -> dict[str, Array]:
    """{stacked path: [rows, ...]} of the layers' {path within a layer: array}."""
    return {
        stacked_path(prefix, groups, number, rest): _stack(
            [by_layer[row[column]][rest] for row in groups]
        )
        for column, number in enumerate(groups[0])
        for rest in by_layer[number]
    }


def _stack(rows: list[Array]) -> Array:
    """Stacks arrays where they are: on the host, or on devices."""
    on_host = all(isinstance(x, np.ndarray) for x in rows)
    return np.stack(rows) if on_host else jnp.stack(rows)


def unstack_values(
    stacked: Mapping[str, Array], prefix: str, groups: list[list[int]], number: int
) -> dict[str, Array]:
    """{path within a layer: array} of one layer, from {stacked path: [rows, ...]}."""
    row, column = divmod(number, len(groups[0]))
    own = stacked_path(prefix, groups, column, "")
    return {p[len(own) :]: x[row] for p, x in stacked.items() if p.startswith(own)}
