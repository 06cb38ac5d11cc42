"""Layers that a Linen module stacks itself, by `nn.scan`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax.core import lift

from meshpar.arrays import Params
from meshpar.layouts.param import STACKED_DIM, Param

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Scan:
    """A lifted class of modules, `nn.scan(module_class, **settings)`.

    Attributes:
      module_class: class of one layer.
      settings: arguments of `nn.scan`.
    """

    module_class: type[nn.Module]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, layers: str, module: nn.Module) -> "Scan":
        """Reads how the class of a module was made.

        Flax has no public way to ask; the function that it makes holds both values.

        Raises:
          ValueError: it was not made by `nn.scan`.
        """
        call = vars(type(module)).get("__call__")
        while call is not None:
            names, cells = call.__code__.co_freevars, call.__closure__ or ()
            made = dict(zip(names, cells, strict=True))
            if "trafo_kwargs" in made:
                break
            call = getattr(call, "__wrapped__", None)
        if call is None or made["transform"].cell_contents is not lift.scan:
            raise ValueError(
                f"layers={layers!r} is a {type(module).__name__} and no module of "
                "nn.scan; write a * in place of the number of layers that the model "
                'calls one by one, such as "decoder/block_*"'
            )
        settings = made["trafo_kwargs"].cell_contents
        return cls(made["module_class"].cell_contents, settings)

    def check(self, layers: str, rngs: tuple[str, ...]) -> None:
        """Checks that the layers may run one by one.

        Args:
          layers: how a user named them.
          rngs: names of the random streams.

        Raises:
          ValueError: they may not.
        """
        axes, split = (self.settings[k] for k in ("variable_axes", "split_rngs"))
        if axes.get("params") != 0:
            problem = f"variable_axes={dict(axes)}; meshpar needs {{'params': 0}}"
        elif self.settings["reverse"]:
            problem = "reverse=True; meshpar runs layers in the order of their rows"
        elif same := [name for name in rngs if split.get(name) is False]:
            problem = (
                f"split_rngs={dict(split)}, so that all layers draw the same numbers "
                f"from {same[0]!r}; split it"
            )
        else:
            return
        raise ValueError(f"layers={layers!r}: nn.scan has {problem}")

    def layer(self, layers: str, module: nn.Module, args: tuple) -> nn.Module:
        """One layer, without variables.

        Args:
          layers: how a user named them.
          module: of the lifted class.
          args: of its call.

        Raises:
          ValueError: the layers get arrays of their own.
        """
        in_axes, inputs = self.settings["in_axes"], args[1:]
        each = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(inputs)
        for axis, x in zip(each, inputs, strict=False):
            if jax.tree.leaves(x) and axis is not nn.broadcast:
                raise ValueError(
                    f"layers={layers!r}: nn.scan has in_axes={in_axes}, so that each "
                    "layer gets inputs of its own; make them parameters or attributes "
                    "of the layer, or set in_axes=nn.broadcast"
                )
        fields = (f.name for f in dataclasses.fields(module) if f.init)
        own = {name: getattr(module, name) for name in fields}
        return self.module_class(**(own | {"parent": None, "name": None}))


@dataclasses.dataclass(frozen=True)
class ScannedLayers:
    """The stack of a module of `nn.scan`, whose parameters are stacked already.

    Attributes:
      path: path of the module.
      depth: number of layers.
    """

    path: str
    depth: int
    period: int = 1
    num_calls: int = 1

    @classmethod
    def of(
        cls,
        layers: str,
        module: nn.Module,
        params: Mapping[str, Param],
        rngs: tuple[str, ...],
    ) -> "ScannedLayers":
        """The stack of a module.

        Args:
          layers: path of the module.
          module: the module.
          params: {path: Param} of the whole module.
          rngs: names of the random streams.

        Raises:
          ValueError: `nn.scan` did not make it, it has no parameters, or its layers may
            not run one by one.
        """
        Scan.of(layers, module).check(layers, rngs)
        own = cls(layers, 0).column(params, 0)
        if not own:
            raise ValueError(f"layers={layers!r}: the layers have no parameters")
        return cls(layers, next(iter(own.values())).shape[0])

    @property
    def num_rows(self) -> int:
        """Number of rows of the stack."""
        return self.depth

    @property
    def prefix(self) -> str:
        """First part of the paths of stacked variables."""
        return f"{self.path}/"

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
