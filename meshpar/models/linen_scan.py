"""Layers that a Linen module stacks itself, by `nn.scan`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import flax.linen as nn
from flax.core import lift

from meshpar.arrays import Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import STACKED_DIM, Param
from meshpar.models.linen_calls import Lift

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Scan:
    """A class of modules that `nn.scan` made.

    Attributes:
      layers: how a user named its module.
      lift: how it was made.
    """

    layers: str
    lift: Lift

    @classmethod
    def around(cls, layers: str, module: nn.Module, lifts: Sequence[Lift]) -> "Scan":
        """The scan around a module.

        Args:
          layers: how a user named it.
          module: the module inside.
          lifts: those in which it is called.

        Raises:
          MeshparError: there is none.
        """
        for found in lifts:
            if found.transform is lift.scan:
                return cls(layers, found)
        raise MeshparError(
            f"layers={layers!r} is a {type(module).__name__} and no module of "
            "nn.scan; write a * in place of the number of layers that the model "
            'calls one by one, such as "decoder/block_*"'
        )

    def check(self, rngs: tuple[str, ...]) -> None:
        """Checks that the layers may run one by one.

        Args:
          rngs: names of the random streams.

        Raises:
          MeshparError: they may not.
        """
        settings = self.lift.settings
        axes, split = settings["variable_axes"], settings["split_rngs"]
        if axes.get("params") != 0:
            problem = f"variable_axes={dict(axes)}; meshpar needs {{'params': 0}}"
        elif settings["reverse"]:
            problem = "reverse=True; meshpar runs layers in the order of their rows"
        elif same := [name for name in rngs if split.get(name) is False]:
            problem = (
                f"split_rngs={dict(split)}, so that all layers draw the same numbers "
                f"from {same[0]!r}; split it"
            )
        else:
            return
        raise MeshparError(f"layers={self.layers!r}: nn.scan has {problem}")


@dataclasses.dataclass(frozen=True)
class ScannedLayers:
    """The stack of a module of `nn.scan`, whose parameters are stacked already.

    Attributes:
      path: path of the module.
      depth: number of layers.
      period: number of columns of the stack.
      is_given: whether the module itself stacks its parameters.
    """

    path: str
    depth: int
    period: int = 1
    is_given: bool = True

    @classmethod
    def of(
        cls,
        layers: str,
        scan: Scan,
        params: Mapping[str, Param],
        rngs: tuple[str, ...],
    ) -> "ScannedLayers":
        """The stack of a module.

        Args:
          layers: path of the module.
          scan: how it was made.
          params: {path: Param} of the whole module.
          rngs: names of the random streams.

        Raises:
          MeshparError: it has no parameters, or its layers may not run one by one.
        """
        scan.check(rngs)
        own = cls(layers, 0).column(params, 0)
        if not own:
            raise MeshparError(f"layers={layers!r}: the layers have no parameters")
        return cls(layers, next(iter(own.values())).shape[0])

    @property
    def num_rows(self) -> int:
        """Number of rows of the stack."""
        return self.depth

    @property
    def prefix(self) -> str:
        """First part of the paths of stacked variables."""
        return f"{self.path}/"

    def layer_path(self, _: int) -> str:
        """The path of the module, at which all layers are."""
        return self.path

    def split(self, path: str) -> tuple[int, str] | None:
        """(number, path within the layer) of a layer's variable; None for others."""
        own = self.column({path: None}, 0)
        return next(((0, rest) for rest in own), None)

    def stacked_params(self, params: Mapping[str, Param]) -> dict[str, Param]:
        """{path: Param} that says which are stacked."""
        stacked = dict(params)
        for path, param in params.items():
            if path.startswith(self.prefix):
                names = param.names and (STACKED_DIM, *param.names[1:])
                stacked[path] = dataclasses.replace(param, names=names, is_stacked=True)
        return stacked

    def stacked(self, variables: Params) -> Params:
        """{path: array} with the layers stacked: that of the module."""
        return variables

    def unstacked(self, params: Params) -> Params:
        """The inverse of `stacked`."""
        return params

    def column(self, stack: Mapping[str, _T], _: int) -> dict[str, _T]:
        """{path within the layer: entry} of the stack or of a row."""
        prefix = self.prefix
        return {p[len(prefix) :]: x for p, x in stack.items() if p.startswith(prefix)}
