"""The layers of a Linen module: found by their paths, taken out of its calls."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import traverse_util
from flax.core import lift

from meshpar.arrays import Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.models.layer_call import Configuration, comparable, distinguishing
from meshpar.models.layer_cut import OnCall
from meshpar.models.layer_groups import LayerGroups
from meshpar.models.layer_stack import Key
from meshpar.models.linen_calls import Lift, NumberAt, calls_replaced
from meshpar.models.linen_functions import LinenFunctions
from meshpar.models.linen_scan import Scan, ScannedLayers


@dataclasses.dataclass(frozen=True, eq=False)
class LinenLayers:
    """The layers of a Linen module.

    Attributes:
      functions: the whole module.
      layers: path of the layers, with * for their number; of their stack, without.
      stack: how they are stacked.
      ignored: fields in which each layer differs from all others.
      sown: collections that layers fill with results of one step.
    """

    functions: LinenFunctions
    layers: str
    stack: LayerGroups | ScannedLayers
    ignored: frozenset[str]
    sown: frozenset[str]

    @classmethod
    def of(
        cls, functions: LinenFunctions, layers: str, params: Mapping[str, Param]
    ) -> "LinenLayers":
        """Finds the layers of a module.

        Args:
          functions: the whole module.
          layers: path of the layers, with * for their number; of their stack, without.
          params: {path: Param} of the whole module.

        Raises:
          MeshparError: no layers, layers that are numbered otherwise than from 0, that
            keep state, that use modules of others, or that do not repeat.
        """
        if layers.count("*") > 1:
            raise MeshparError(
                f"layers={layers!r}: write the path of the layers with one * in place "
                'of their number, such as "decoder/block_*"'
            )
        found: dict[int, tuple[nn.Module, list[Lift]]] = {}

        def note(number: int, module: nn.Module, run: Callable, *_: Any) -> Any:
            _refuse_outside_modules(layers, number, module)
            lifts = [lift for lift, _ in Lift.running()]
            found.setdefault(number, (_without_variables(module), lifts))
            return run()

        with calls_replaced(_number_at(layers), note):
            variables = functions.abstract(mutable=True)
        ignored = distinguishing([_fields(module) for module, _ in found.values()])
        stack = _stack_of(layers, found, ignored, params, functions.rngs)
        results = functions.results(variables)
        sown = {name for name, path in results if stack.split(path) is not None}
        for path, param in params.items():
            if param.is_state and stack.split(path.split("/", 1)[1]) is not None:
                raise MeshparError(
                    f"layers={layers!r}: a layer keeps {path}, which is no parameter; "
                    "layers that meshpar runs one by one have parameters alone. Leave "
                    "layers out: under data, fsdp and tensor the state is then that of "
                    "the whole batch. Or use a layer without running state"
                )
        return cls(functions, layers, stack, ignored, frozenset(sown))

    def taken_out(self, on_call: OnCall) -> contextlib.AbstractContextManager:
        """A context in which `on_call` takes the place of the layers."""

        def replaced(
            number: int, module: nn.Module, run: Callable, args: tuple, kwargs: dict
        ) -> Any:
            if module.is_initializing():  # To see the shapes of all variables.
                return run()
            for collection in sorted(self.sown):
                if module.is_mutable_collection(collection):
                    raise MeshparError(
                        f"layers={self.layers!r}: the loss function asks for "
                        f"mutable={collection!r}, which layers fill; layers that "
                        "meshpar runs one by one return their activations alone. "
                        f"Leave mutable={collection!r} out, or leave layers out"
                    )
            own = _configuration(_without_variables(module), self.ignored)
            return on_call(number, own, args, kwargs)

        return calls_replaced(_number_at(self.layers), replaced)

    def call(
        self,
        own: Configuration,
        column: int,
        params: Params,
        key: Key,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Runs the layer of one column with the parameters of one row."""
        of_layer = self.stack.column(params, column)
        first, depth = self.stack.layer_path(column), self.layers.count("/") + 1
        keys = {path: self.functions.keys_of(f"{first}/{path}") for path in of_layer}
        flat = {keys[path][depth:]: x for path, x in of_layer.items()}
        variables = {"params": traverse_util.unflatten_dict(flat)}
        apply = nn.apply(lambda module: module(*args, **kwargs), own.value)
        return apply(variables, rngs=self.functions.random_keys(key))


def _number_at(layers: str) -> NumberAt:
    """Finds the calls of the layers."""
    if "*" not in layers:
        return lambda path: 0 if path == layers else None
    pattern = re.compile(re.escape(layers).replace(r"\*", r"(\d+)"))

    def number(path: str) -> int | None:
        match = pattern.fullmatch(path)
        return None if match is None else int(match[1])

    return number


def _stack_of(
    layers: str,
    found: dict[int, tuple[nn.Module, list[Lift]]],
    ignored: frozenset[str],
    params: Mapping[str, Param],
    rngs: tuple[str, ...],
) -> LayerGroups | ScannedLayers:
    """How the layers that a module calls are stacked."""
    if list(found) != list(range(len(found))):
        raise MeshparError(
            f"layers={layers!r}: the model calls layers {list(found)}; they have "
            "to be numbered from 0 in the order in which they are called"
        )
    if "*" in layers:
        configurations = [_configuration(m, ignored) for m, _ in found.values()]
        names = list(map(str, found))
        _refuse_jitted(layers, len(found), params)
        return LayerGroups.of(layers, layers, names, configurations, params)
    if not found:
        raise MeshparError(f"layers={layers!r} is no module that the model calls")
    return ScannedLayers.of(layers, Scan.around(layers, *found[0]), params, rngs)


def _refuse_jitted(layers: str, num: int, params: Mapping[str, Param]) -> None:
    """Refuses layers of which Flax traces one for all.

    Raises:
      MeshparError: there are parameters of layers that no trace has met.
    """
    number_at, depth = _number_at(layers), layers.count("/") + 1
    owners = ("/".join(path.split("/")[:depth]) for path in params)
    numbers = {number_at(path) for path in owners} - {None}
    if len(numbers) > num > 0:
        raise MeshparError(
            f"layers={layers!r}: the model has parameters of {len(numbers)} layers and "
            f"{num} of them are traced; take nn.jit away from the layers (the step is "
            "compiled as a whole)"
        )


def _fields(module: nn.Module) -> dict[str, Any]:
    names = (f.name for f in dataclasses.fields(module))
    names = (name for name in names if name not in ("parent", "name"))
    return {name: getattr(module, name, None) for name in names}


def _configuration(module: nn.Module, ignored: frozenset[str]) -> Configuration:
    """A layer without variables."""
    fields = _fields(module)
    own = {name: fields.pop(name) for name in ignored}
    key = _comparable(type(module)), _comparable(fields)
    return Configuration(module, key, own)


def _without_variables(module: nn.Module) -> nn.Module:
    """A module that is called inside `nn.remat` or not, by itself."""
    inner = made = type(module)
    for found, lifted in Lift.running():
        if found.module_class is not inner or found.transform is lift.scan:
            break
        inner = lifted
        if found.transform is lift.checkpoint:
            made = lifted
    fields = {f.name for f in dataclasses.fields(module) if f.init}
    own = {name: getattr(module, name) for name in fields - {"parent", "name"}}
    return made(**own, parent=None, name=None)


def _refuse_outside_modules(layers: str, number: int, layer: nn.Module) -> None:
    """Refuses a layer that has a module of another part of the model as a field.

    Raises:
      MeshparError: it has one.
    """
    fields = {f.name: getattr(layer, f.name, None) for f in dataclasses.fields(layer)}
    for name, value in fields.items():
        if name == "parent":
            continue
        for module in filter(_is_module, jax.tree.leaves(value, is_leaf=_is_module)):
            bound = module.scope is not None
            if bound and module.path[: len(layer.path)] != layer.path:
                raise MeshparError(
                    f"layers={layers!r}: layer {number} shares the module "
                    f"{'/'.join(module.path)!r} with another part of the model; let "
                    "the model call it outside the layers, and call each of them with "
                    "the result"
                )


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _comparable(value: Any) -> Any:
    """A value that is equal for values that compute the same."""
    return comparable(value, _of_linen)


def _of_linen(value: Any) -> Any:
    """A module or its class as values that can be compared; others as they are."""
    if _is_module(value):
        return _comparable(type(value)), _comparable(_fields(value))
    if isinstance(value, type) and (made := Lift.of(value)):
        inner, settings = map(_comparable, (made.module_class, made.settings))
        return made.transform, inner, settings
    return value
