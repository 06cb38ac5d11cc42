"""The layers of an NNX module: found by their attributes, taken out of its calls."""

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from meshpar.arrays import Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.models.layer_call import Configuration, comparable, distinguishing
from meshpar.models.layer_cut import OnCall
from meshpar.models.layer_groups import LayerGroups
from meshpar.models.layer_stack import Key
from meshpar.models.nnx_functions import AbstractModule, NnxFunctions


class _Placeholder(nnx.Module):
    """Takes the place of a layer, and has its attributes; calls go to a function."""

    def __init__(
        self, layer: nnx.Module, on_call: Callable[[nnx.Module, tuple, dict], Any]
    ) -> None:
        self.layer, self.on_call = layer, on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.on_call(self.layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "layer"), name)


def module_at(module: nnx.Module, path: str, option: str) -> Any:
    """The value at an attribute path such as "decoder.blocks".

    Args:
      module: the module.
      path: attribute path.
      option: what the path was given as, for the error.

    Raises:
      MeshparError: there is none.
    """
    for name in path.split("."):
        if not hasattr(module, name):
            kinds = nnx.Module, nnx.List
            modules = (k for k, v in vars(module).items() if isinstance(v, kinds))
            known = ", ".join(sorted(modules)) or "none"
            raise MeshparError(
                f"{option}: {type(module).__name__} has no attribute {name!r}; its "
                f"modules are {known}; name one of them, or leave it out"
            )
        module = getattr(module, name)
    return module


class Found(NamedTuple):
    """Where the layers of a module are.

    Attributes:
      parent: the list, the dict or the module that holds them.
      keys: of each layer in its parent: number, key or attribute.
    """

    parent: Any
    keys: tuple[Any, ...]

    @classmethod
    def in_module(cls, module: nnx.Module, layers: str) -> "Found":
        """The layers of a module.

        Args:
          module: the module.
          layers: attribute path of an `nnx.List` or an `nnx.Dict`, or of attributes,
            with * for their number.

        Raises:
          MeshparError: there are none.
        """
        option = f"layers={layers!r}"
        layers = _attribute_path(layers)
        if "*" in layers:
            path, _, name = layers.rpartition(".")
            parent = module_at(module, path, option) if path else module
            pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)"))
            modules = (k for k, v in vars(parent).items() if isinstance(v, nnx.Module))
            matches = filter(None, map(pattern.fullmatch, modules))
            ordered = sorted(matches, key=lambda match: int(match[1]))
            return cls(parent, tuple(match[0] for match in ordered))
        found = module_at(module, layers, option)
        if isinstance(found, nnx.Dict):
            return cls(found, tuple(found))
        if isinstance(found, nnx.List):
            return cls(found, tuple(range(len(found))))
        raise MeshparError(
            f"{option} is a {type(found).__name__}; name an nnx.List or an nnx.Dict of "
            'layers, write a * for the number in the names of attributes ("layer_*"), '
            "or describe stacked layers with a meshpar.LayerStack"
        )

    @property
    def modules(self) -> list[nnx.Module]:
        """The layers."""
        return [self._get(key) for key in self.keys]

    def _get(self, key: Any) -> nnx.Module:
        by_name = isinstance(key, str)
        return getattr(self.parent, key) if by_name else self.parent[key]

    def put(self, modules: Sequence[nnx.Module]) -> None:
        """Puts others in the place of the layers."""
        for key, module in zip(self.keys, modules, strict=True):
            if isinstance(key, str):
                setattr(self.parent, key, module)
            else:
                self.parent[key] = module


def _attribute_path(layers: str) -> str:
    """The attribute path of layers that may be given as a path of their parameters."""
    return layers.replace("/", ".").removesuffix(".*")


def _path_and_names(layers: str, keys: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """(path of a layer with * for its name, the names)."""
    layers = _attribute_path(layers)
    if "*" not in layers:
        return layers.replace(".", "/") + "/*", tuple(map(str, keys))
    before, after = layers.rpartition(".")[2].split("*")
    end = -len(after) or None
    return layers.replace(".", "/"), tuple(key[len(before) : end] for key in keys)


def _attributes(layer: nnx.Module) -> dict[str, Any]:
    """{path: value} of the attributes of a layer that are no data."""
    return {
        "/".join(map(str, (*path, name))): value
        for path, module in nnx.iter_modules(layer)
        for name, value in vars(module).items()
    }


def _configuration(layer: nnx.Module, shared: Mapping[str, Any]) -> Configuration:
    """A layer without its variables.

    Args:
      layer: the layer.
      shared: {path: value} of attributes in which all layers differ; the values are
        the same for all layers.
    """
    graph, attributes = nnx.graphdef(layer), _attributes(layer)
    own = {path: value for path, value in attributes.items() if path in shared}
    functions = {p: value for p, value in attributes.items() if _is_function(value)}
    modules = {"/".join(map(str, path)): m for path, m in nnx.iter_modules(layer)}

    def write(values: Mapping[str, Any]) -> None:
        for path, value in values.items():
            parent, _, name = path.rpartition("/")
            vars(modules[parent])[name] = value

    write({**shared, **dict.fromkeys(functions)})
    try:
        key = nnx.graphdef(layer), comparable(functions)
        return Configuration(graph, key, own)
    finally:
        write({**own, **functions})


def _is_function(value: Any) -> bool:
    """Whether an attribute is a function that each layer may have made for itself."""
    return isinstance(value, types.FunctionType | functools.partial)


class Described(NamedTuple):
    """The layers of a module, without arrays.

    Attributes:
      keys: as in `Found`.
      configurations: of each layer.
      shared: {path of an attribute in which all layers differ: that of the first}.
    """

    keys: tuple[Any, ...]
    configurations: list[Configuration]
    shared: dict[str, Any]

    @classmethod
    def of(cls, found: Found) -> "Described":
        """Describes layers."""
        modules = found.modules
        attributes = list(map(_attributes, modules))
        shared = {path: attributes[0][path] for path in distinguishing(attributes)}
        return cls(found.keys, [_configuration(m, shared) for m in modules], shared)


@dataclasses.dataclass(frozen=True, eq=False)
class NnxLayers:
    """The layers of an NNX module.

    Attributes:
      layers: how they are named, as in `Found.in_module`.
      functions: the layers, in order.
      stack: how they are stacked.
      described: what they are beside their variables.
    """

    layers: str
    functions: list[NnxFunctions]
    stack: LayerGroups
    described: Described

    @classmethod
    def of(
        cls,
        layers: str,
        modules: Sequence[AbstractModule],
        described: Described,
        params: Mapping[str, Param],
    ) -> "NnxLayers":
        """Groups the layers of a module.

        Args:
          layers: how they are named.
          modules: the layers.
          described: the same.
          params: {path: Param} of the whole module.

        Raises:
          MeshparError: the layers share variables, have none, or do not repeat.
        """
        functions = [NnxFunctions(module) for module in modules]
        path, names = _path_and_names(layers, described.keys)
        by_layer = LayerGroups(path, names).by_layer(params)
        for number, own in enumerate(by_layer):
            for shared in sorted(functions[number].leaves.keys() - own.keys()):
                raise MeshparError(
                    f"layers={layers!r}: layer {number} shares its variable {shared!r} "
                    "with another part of the model; let the model use it outside the "
                    "layers, and call each of them with the result"
                )
        every = described.configurations
        stack = LayerGroups.of(layers, path, names, every, params)
        return cls(layers, functions, stack, described)

    def take_out(self, module: nnx.Module, on_call: OnCall) -> None:
        """Puts placeholders that call `on_call` in the place of a module's layers."""

        def placeholder(number: int, layer: nnx.Module) -> _Placeholder:
            def called(layer: nnx.Module, args: tuple, kwargs: dict) -> Any:
                own = _configuration(layer, self.described.shared)
                return on_call(number, own, args, kwargs)

            return _Placeholder(layer, called)

        found = Found.in_module(module, self.layers)
        found = found._replace(keys=self.described.keys)  # Merging sorts a dict.
        found.put([placeholder(*pair) for pair in enumerate(found.modules)])

    def call(
        self,
        own: Configuration,
        column: int,
        params: Params,
        key: Key,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Runs the layer of one column with the variables of one row.

        Raises:
          MeshparError: the layer changes a variable, or makes one.
        """
        variables = self.stack.column(params, column)
        functions = self.functions[column]

        def run(layer: nnx.Module) -> Any:
            return layer(*args, **kwargs)

        return functions.run_layered(run, variables, key, own.value)
