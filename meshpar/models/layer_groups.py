"""Paths of a model's layers, and of the stack that is made of them.

Layers of the kinds a, b, b, a, b, b are a stack of two rows and three columns. Layers
of one column are equal and stacked; those of one row run one after the other.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array, Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import STACKED_DIM, Param

_T = TypeVar("_T")


def _numbered(params: Mapping[str, Param]) -> str:
    """Names the modules of a model that are numbered, as a user would give them."""
    numbers: dict[str, set[str]] = {}
    for path in params:
        for name in re.finditer(r"\d+(?=[^/\d]*/)", path):
            rest = path[name.end() :].partition("/")[0]
            numbers.setdefault(f"{path[: name.start()]}*{rest}", set()).add(name[0])
    found = [repr(path) for path, own in numbers.items() if len(own) > 1]
    if not found:
        return "none of its modules are numbered"
    return f"its numbered modules are {', '.join(found[:5])}"


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """The layers of a model that calls each of them by itself.

    Attributes:
      path: path of a layer, with * for its name, such as "decoder/block_*".
      names: of the layers, in order; their numbers, where a list holds them.
      period: number of columns of the stack.
      is_given: whether the module itself stacks its parameters.
    """

    path: str
    names: tuple[str, ...]
    period: int = 1
    is_given: bool = False

    @classmethod
    def of(
        cls,
        layers: str,
        path: str,
        names: Sequence[str],
        configurations: Sequence[Any],
        params: Mapping[str, Param],
    ) -> "LayerGroups":
        """Groups layers by the shortest pattern that repeats.

        Args:
          layers: how a user named the layers.
          path: path of a layer, with * for its name.
          names: of the layers.
          configurations: one value per layer; equal for layers that compute the same.
          params: {path: Param} of the whole module.

        Raises:
          MeshparError: no layers, no pattern that repeats, layers without parameters,
            or a stack whose paths other parameters have.
        """
        groups = cls(path, tuple(names))
        if not configurations:
            raise MeshparError(
                f"layers={layers!r} matches no layer of the model; {_numbered(params)}"
            )
        by_layer = groups.by_layer(params)
        if not all(by_layer):
            raise MeshparError(f"layers={layers!r}: the layers have no parameters")
        for other in params:
            if other.startswith(groups.prefix) and groups.split(other) is None:
                raise MeshparError(
                    f"layers={layers!r}: the stack of layers gets the path "
                    f"{groups.prefix[:-1]!r}, but the model has {other!r}; rename it"
                )
        kinds = list(zip(configurations, by_layer, strict=True))
        return dataclasses.replace(groups, period=_period(layers, kinds))

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows of the stack."""
        return self.depth // self.period

    @property
    def prefix(self) -> str:
        """First part of the paths of stacked variables."""
        return self.path.replace("*", "").rstrip("_/.-") + "/"

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """{path of a layer: its number}."""
        return {self.layer_path(number): number for number in range(self.depth)}

    def layer_path(self, number: int) -> str:
        """The path of a layer in the module."""
        return self.path.replace("*", self.names[number])

    def split(self, path: str) -> tuple[int, str] | None:
        """(number, path within the layer) of a layer's variable; None for others."""
        parts = path.split("/")
        depth = self.path.count("/") + 1
        number = self._numbers.get("/".join(parts[:depth]))
        return None if number is None else (number, "/".join(parts[depth:]))

    def by_layer(self, variables: Mapping[str, _T]) -> list[dict[str, _T]]:
        """{path within the layer: variable} of every layer."""
        by_layer: list[dict[str, _T]] = [{} for _ in range(self.depth)]
        for path, x in variables.items():
            if (found := self.split(path)) is not None:
                by_layer[found[0]][found[1]] = x
        return by_layer

    def _others(self, variables: Mapping[str, _T]) -> dict[str, _T]:
        """The variables outside the layers."""
        return {p: x for p, x in variables.items() if self.split(p) is None}

    def _column(self, number: int) -> str:
        """First part of the paths of the stacked variables of one column."""
        return f"{self.prefix}{number}/" if self.period > 1 else self.prefix

    def stacked_params(self, params: Mapping[str, Param]) -> dict[str, Param]:
        """{path: Param} with the layers stacked, from the module's {path: Param}."""
        stacked = self._others(params)
        for number, own in enumerate(self.by_layer(params)[: self.period]):
            for rest, param in own.items():
                names = None if param.names is None else (STACKED_DIM, *param.names)
                stacked[self._column(number) + rest] = dataclasses.replace(
                    param,
                    shape=(self.num_rows, *param.shape),
                    names=names,
                    is_stacked=True,
                )
        return stacked

    def rows(self, params: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """{path of a stack: the module's path of each row}, from {path: anything}."""
        rows = {}
        for number, own in enumerate(self.by_layer(params)[: self.period]):
            layers = range(number, self.depth, self.period)
            for rest in own:
                paths = (f"{self.layer_path(n)}/{rest}" for n in layers)
                rows[self._column(number) + rest] = tuple(paths)
        return rows

    def stacked(self, variables: Params) -> Params:
        """{path: array} with the layers stacked, from the module's {path: array}."""
        by_layer = self.by_layer(variables)
        stacked = self._others(variables)
        for number in range(self.period):
            for rest in by_layer[number]:
                rows = [own[rest] for own in by_layer[number :: self.period]]
                stacked[self._column(number) + rest] = _stack(rows)
        return stacked

    def unstacked(self, params: Params) -> Params:
        """The inverse of `stacked`."""
        own = {p: x for p, x in params.items() if not p.startswith(self.prefix)}
        for number in range(self.depth):
            row, column = divmod(number, self.period)
            path = self.layer_path(number)
            for rest, x in self.column(params, column).items():
                own[f"{path}/{rest}"] = x[row]
        return own

    def column(self, stack: Mapping[str, _T], number: int) -> dict[str, _T]:
        """{path within the layer: entry} of one column of the stack or of a row."""
        own = self._column(number)
        return {p[len(own) :]: x for p, x in stack.items() if p.startswith(own)}


def _period(layers: str, kinds: Sequence[Any]) -> int:
    """Length of the shortest pattern that repeats.

    Raises:
      MeshparError: none does.
    """
    depth = len(kinds)
    periods = (n for n in range(1, depth + 1) if depth % n == 0)
    period = next(n for n in periods if kinds[n:] == kinds[: depth - n])
    if period == depth > 1:
        differing = next(i for i in range(1, depth) if kinds[i] != kinds[0])
        raise MeshparError(
            f"layers={layers!r}: its {depth} layers are not equal, nor a pattern that "
            f"repeats: layer {differing} differs from layer 0 in its attributes, "
            "shapes, dim names or trained parameters. Leave layers out, or make the "
            "layers equal"
        )
    return period


def _stack(rows: list[Array]) -> Array:
    """Stacks arrays where they are: on the host, or on devices."""
    on_host = all(isinstance(x, np.ndarray) for x in rows)
    return np.stack(rows) if on_host else jnp.stack(rows)
