"""The layers of an NNX module: those of an `nnx.List`, taken out of its calls."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from meshpar.arrays import Params
from meshpar.layouts.param import Param
from meshpar.models.layer_cut import OnCall
from meshpar.models.layer_groups import LayerGroups
from meshpar.models.layer_stack import Key
from meshpar.models.nnx_functions import AbstractModule, NnxFunctions


class _Placeholder(nnx.Module):
    """Takes the place of a layer, and has its attributes; calls go to a function."""

    def __init__(
        self, layer: nnx.Module, on_call: Callable[[Any, tuple, dict], Any]
    ) -> None:
        self.layer, self.on_call = layer, on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.on_call(nnx.graphdef(self.layer), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "layer"), name)


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
      functions: the layers, in order.
      stack: how they are stacked.
    """

    layers: str
    functions: list[NnxFunctions]
    stack: LayerGroups

    @classmethod
    def of(
        cls,
        layers: str,
        modules: Sequence[AbstractModule],
        params: Mapping[str, Param],
    ) -> "NnxLayers":
        """Groups the layers of a module.

        Args:
          layers: attribute path of their list.
          modules: the layers.
          params: {path: Param} of the whole module.

        Raises:
          ValueError: the layers share variables, have none, or do not repeat.
        """
        functions = [NnxFunctions(module) for module in modules]
        path = layers.replace(".", "/") + "/*"
        by_layer = LayerGroups(path, len(modules)).by_layer(params)
        for number, own in enumerate(by_layer):
            for shared in sorted(functions[number].leaves.keys() - own.keys()):
                raise ValueError(
                    f"layers={layers!r}: layer {number} shares its variable {shared!r} "
                    "with another part of the model; let the model use it outside the "
                    "layers, and call each of them with the result"
                )
        graphs = [module.graph for module in modules]
        return cls(layers, functions, LayerGroups.of(layers, path, graphs, params))

    def take_out(self, module: nnx.Module, on_call: OnCall) -> None:
        """Puts placeholders that call `on_call` in the place of a module's layers."""
        layers = module_at(module, self.layers, "layers")

        def placeholder(number: int, layer: nnx.Module) -> _Placeholder:
            return _Placeholder(layer, lambda *call: on_call(number, *call))

        for number, layer in enumerate(layers):
            layers[number] = placeholder(number, layer)

    def call(
        self,
        graph: nnx.GraphDef,
        column: int,
        params: Params,
        key: Key,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Runs the layer of one column with the variables of one row.

        Raises:
          ValueError: the layer changes a variable, or makes one.
        """
        own = self.stack.column(params, column)
        functions = self.functions[column]

        def run(layer: nnx.Module) -> Any:
            return layer(*args, **kwargs)

        return functions.run_layered(run, own, key, graph)
