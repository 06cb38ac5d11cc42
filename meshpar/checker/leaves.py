"""Arguments and results of a step: names, shapes and the mesh axes that split them."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.contracts.hlo_text import Instruction, type_bytes

_NAME = re.compile(r"^[^\[.]*")
_DTYPES = {"pred": "bool", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One array that a step is given, or returns.

    Attributes:
      name: such as "state.params['head']".
      shape: of the whole array.
      dtype: its name.
      dims: the mesh axes that split each dim; None if the program does not tell.
      bytes: on one device.
      whole_bytes: of the whole array.
      parameter: its number in the compiled program; None if that does not read it.
      donated: whether the caller gives its memory away.
      aliased: whether a result takes over its memory.
      weak: whether its dtype is that of a Python number; None if that is not known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[tuple[str, ...], ...] | None
    bytes: int
    whole_bytes: int
    parameter: int | None = None
    donated: bool = False
    aliased: bool = False
    weak: bool | None = None

    @property
    def group(self) -> str:
        """The argument of the step that holds it."""
        return _NAME.match(self.name).group()

    @property
    def rest(self) -> str:
        """Its path in the argument that holds it."""
        return self.name[len(self.group) :]

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that split it."""
        return frozenset(axis for dim in self.dims or () for axis in dim)


def arguments_of(
    compiled: jax.stages.Compiled,
    parameters: Sequence[Instruction],
    header: str,
    mesh: Mapping[str, int],
) -> tuple[Leaf, ...]:
    """The arguments of a compiled program.

    Args:
      compiled: the program.
      parameters: those of its text, in order.
      header: the first line of its text.
      mesh: {axis: size}, outer to inner.
    """
    infos, _ = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    shardings = _flat(compiled.input_shardings)
    if len(shardings) != len(infos):
        shardings = [None] * len(infos)
    # Arguments that the program does not read have neither a sharding nor a parameter.
    all_read = len(parameters) == len(infos)
    aliased, leaves, following = set(aliases(header).values()), [], 0
    for (path, info), sharding in zip(infos, shardings, strict=True):
        argument = jax.tree_util.keystr(path[1:2]).strip("[]'")
        name, number = f"argument{argument}{jax.tree_util.keystr(path[2:])}", None
        if (all_read or sharding is not None) and following < len(parameters):
            number, following = following, following + 1
            name = parameter_name(parameters[number]) or name
        fields = _leaf(name, info._aval, sharding, mesh)
        fields |= {"parameter": number, "donated": info.donated}
        leaves.append(Leaf(**fields, aliased=number in aliased))
    return tuple(leaves)


def _flat(shardings: Any) -> list[Any]:
    """The shardings of a tree, None where there is none."""
    return jax.tree.leaves(shardings, is_leaf=lambda x: x is None)


def results_of(
    compiled: jax.stages.Compiled, mesh: Mapping[str, int], jaxpr: Any = None
) -> tuple[Leaf, ...]:
    """The results of a compiled program.

    Args:
      compiled: the program; it does not tell whether dtypes are weak.
      mesh: {axis: size}, outer to inner.
      jaxpr: of the step, which tells it; None if there is none.
    """
    infos, _ = jax.tree_util.tree_flatten_with_path(compiled.out_info)
    shardings = _flat(compiled.output_shardings)
    if len(shardings) != len(infos):
        shardings = [None] * len(infos)
    weak = [None] * len(infos)
    if jaxpr is not None:
        weak = [getattr(x.aval, "weak_type", None) for x in jaxpr.outvars]
    rows = zip(infos, shardings, weak, strict=True)
    return tuple(
        Leaf(
            **_leaf(f"result{jax.tree_util.keystr(path)}", info, sharding, mesh)
            | {"weak": is_weak}
        )
        for (path, info), sharding, is_weak in rows
    )


def _leaf(name: str, aval: Any, sharding: Any, mesh: Mapping[str, int]) -> dict:
    """The fields of a leaf that follow from its type and its sharding."""
    dims = dims_of(sharding, len(aval.shape))
    ways = math.prod(mesh.get(axis, 1) for dim in dims or () for axis in dim)
    local = math.prod(aval.shape)
    if dims is not None:
        local //= ways
    elif sharding is not None:
        local = math.prod(sharding.shard_shape(aval.shape))
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return dict(
        name=name,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        dims=dims,
        bytes=local * itemsize,
        whole_bytes=math.prod(aval.shape) * itemsize,
        weak=getattr(aval, "weak_type", None),
    )


def dims_of(sharding: Any, rank: int) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes of each dim of a sharding; None if it names none."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = [*sharding.spec, *[None] * rank][:rank]
    named = ((dim,) if isinstance(dim, str) else dim for dim in spec)
    # None and unconstrained dims are split by nothing.
    return tuple(dim if isinstance(dim, tuple) else () for dim in named)


def arguments_in_text(
    parameters: Sequence[Instruction], header: str, mesh: Mapping[str, int]
) -> tuple[Leaf, ...]:
    """The arguments of a program of which only the text is given."""
    aliased = set(aliases(header).values())
    return tuple(
        Leaf(
            name=parameter_name(x) or x.name,
            **_annotated(x, mesh),
            parameter=number,
            # Text does not tell which arguments were donated and are not used.
            donated=number in aliased,
            aliased=number in aliased,
        )
        for number, x in enumerate(parameters)
    )


def parameter_name(parameter: Instruction) -> str:
    """The name that jax gave an argument; "" if none."""
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', parameter.line)
    return match.group(1).replace("\\'", "'") if match else ""


def aliases(header: str) -> dict[int, int]:
    """{number of a result: number of the argument over which it is written}."""
    table = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header + ", end=")
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{", table.group(1)) if table else ()
    return {int(result or 0): int(argument) for result, argument in pairs}


def _annotated(parameter: Instruction, mesh: Mapping[str, int]) -> dict:
    """Shape, dtype and dims of a parameter, by the sharding that its line states."""
    dtype, sizes = re.match(r"\(?([a-z]\w*)\[([\d,]*)\]", parameter.type).groups()
    local = tuple(int(d) for d in sizes.split(",") if d)
    dtype = _DTYPES.get(dtype, re.sub(r"^([a-z])(\d+)$", _dtype, dtype))
    stated = re.search(r"\bsharding=\{(.*?)\}(?:, |$)", parameter.line)
    size = type_bytes(parameter.type)
    unknown = dict(shape=local, dtype=dtype, dims=None, bytes=size, whole_bytes=size)
    if stated is None:
        return unknown
    if stated.group(1).startswith(("replicated", "maximal")):
        return unknown | {"dims": ((),) * len(local)}
    tiles = re.match(
        r"devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", stated.group(1)
    )
    if tiles is None:
        return unknown
    grid, dims, order = tiles.groups()
    grid, dims = ([int(x) for x in text.split(",")] for text in (grid, dims))
    ids = np.arange(math.prod(dims)).reshape(dims)
    ids = ids.transpose([int(x) for x in order.split(",")]) if order else ids
    axes = tuple(_split_by(ids.reshape(grid), mesh))[: len(local)]
    shape = tuple(n * g for n, g in zip(local, grid, strict=False))
    whole = size * math.prod(shape) // max(1, math.prod(local))
    return unknown | dict(shape=shape, dims=axes, whole_bytes=whole)


def _dtype(match: re.Match) -> str:
    kinds = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
    return kinds.get(match.group(1), match.group(1)) + match.group(2)


def _split_by(tiles: np.ndarray, mesh: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """The mesh axes along which the devices of a grid of tiles move, by dim."""
    places = np.unravel_index(tiles.ravel(), tuple(mesh.values()))
    for dim in range(tiles.ndim):
        moved = []
        for axis, place in zip(mesh, places, strict=True):
            place = place.reshape(tiles.shape)
            first = np.take(place, [0], axis=dim)
            if (place != first).any():
                moved.append(axis)
        yield tuple(moved)
