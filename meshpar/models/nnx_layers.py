"""The layers of an NNX module: those of an `nnx.List`, taken out of its calls."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from meshpar.arrays import Params
from meshpar.layouts.param import Param
from meshpar.models.layer_cut import OnCall
from meshpar.models.layer_groups import (
    group_layers,
    stack_params,
    stack_values,
    unstack_values,
)
from meshpar.models.layer_stack import Key
from meshpar.models.nnx_functions import AbstractModule, NnxFunctions, path_of


class _Placeholder(nnx.Module):
    """Takes the place of a layer: calls go to a function, attributes to the layer."""

    def __init__(
        self, on_call: Callable[[tuple, dict], Any], attribute: Callable[[str], Any]
    ) -> None:
        self.on_call, self.attribute = on_call, attribute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.on_call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "attribute")(name)


def module_at(module: nnx.Module, path: str, option: str) -> Any:
    """The value at an attribute path such as "decoder.blocks".

    Args:
      module: the module.
      path: attribute path.
      option: what the path was given as, for the error.

    Raises:
      ValueError: there is none.
    """
    for name in path.split("."):
        if not hasattr(module, name):
            kinds = nnx.Module, nnx.List
            modules = (k for k, v in vars(module).items() if isinstance(v, kinds))
            raise ValueError(
                f"{option}: {type(module).__name__} has no "
                f"attribute {name!r}; its modules are {', '.join(sorted(modules))}"
            )
        module = getattr(module, name)
    return module


def listed_layers(module: nnx.Module, layers: str) -> list[nnx.Module]:
    """The layers in an `nnx.List` of a module.

    Raises:
      ValueError: there is no such list.
    """
    found = module_at(module, layers, f"layers={layers!r}")
    if not isinstance(found, nnx.List):
        raise ValueError(
            f"layers={layers!r} is a {type(found).__name__}; name an nnx.List of "
            "layers, or describe stacked layers with a meshpar.LayerStack"
        )
    return list(found)


@dataclasses.dataclass(frozen=True, eq=False)
class NnxLayers:
    """The layers of an NNX module.

    Attributes:
      layers: attribute path of their list.
      functions: every layer, in order.
      groups: their numbers in rows, see `group_layers`.
    """

    layers: str
    functions: list[NnxFunctions]
    groups: list[list[int]]

    @classmethod
    def of(
        cls,
        layers: str,
        modules: list[AbstractModule],
        params: Mapping[str, Param],
    ) -> "NnxLayers":
        """Groups the layers of a module.

        Args:
          layers: attribute path of their list.
          modules: the layers.
          params: {path: Param} of the whole module.

        Raises:
          ValueError: the layers do not repeat.
        """
        functions = [NnxFunctions(module) for module in modules]
        by_layer = _by_layer(layers, params, len(modules))
        kinds = [(m.graph, own) for m, own in zip(modules, by_layer, strict=True)]
        return cls(layers, functions, group_layers(kinds, layers))

    @property
    def prefix(self) -> str:
        """First part of the paths of stacked variables."""
        return self.layers.replace(".", "/") + "/"

    def stacked_params(self, params: Mapping[str, Param]) -> dict[str, Param]:
        """{path: Param} with the layers stacked."""
        by_layer = _by_layer(self.layers, params, len(self.functions))
        shared = {p: x for p, x in params.items() if not p.startswith(self.prefix)}
        return shared | stack_params(by_layer, self.prefix, self.groups)

    def stacked(self, variables: Params) -> Params:
        """{path: array} with the layers stacked, from that of the module."""
        by_layer = _by_layer(self.layers, variables, len(self.functions))
        shared = {p: x for p, x in variables.items() if not p.startswith(self.prefix)}
        return shared | stack_values(by_layer, self.prefix, self.groups)

    def unstacked(self, params: Params) -> Params:
        """The inverse of `stacked`."""
        stack = {p: x for p, x in params.items() if p.startswith(self.prefix)}
        own = {p: x for p, x in params.items() if p not in stack}
        for number in range(len(self.functions)):
            layer = unstack_values(stack, self.prefix, self.groups, number)
            own |= {f"{self.prefix}{number}/{rest}": x for rest, x in layer.items()}
        return own

    def take_out(self, module: nnx.Module, on_call: OnCall) -> None:
        """Puts placeholders that call `on_call` in the place of a module's layers."""
        layers = module_at(module, self.layers, "layers")

        def placeholder(number: int, layer: nnx.Module) -> _Placeholder:
            return _Placeholder(
                lambda args, kwargs: on_call(number, args, kwargs),
                lambda name: getattr(layer, name),
            )

        for number, layer in enumerate(layers):
            layers[number] = placeholder(number, layer)

    def call(
        self, column: int, params: Params, key: Key, args: tuple, kwargs: dict
    ) -> Any:
        """Runs the layer of one column with the variables of one row."""
        row = {path: x[None] for path, x in params.items()}
        own = unstack_values(row, self.prefix, self.groups, column)
        functions = self.functions[column]
        return functions.run_layered(lambda layer: layer(*args, **kwargs), own, key)


def _by_layer(
    layers: str, variables: Mapping[str, Any], depth: int
) -> list[dict[str, Any]]:
    """{path within the layer: anything} of every layer."""
    by_layer: list[dict[str, Any]] = [{} for _ in range(depth)]
    keys = layers.split(".")
    for path, x in variables.items():
        parts = path.split("/")
        if parts[: len(keys)] == keys:
            by_layer[int(parts[len(keys)])][path_of(parts[len(keys) + 1 :])] = x
    return by_layer
