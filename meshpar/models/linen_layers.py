"""The layers of a Linen module: found by their paths, taken out of its calls."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

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
from meshpar.models.linen_functions import LinenFunctions


def layer_pattern(layers: str) -> re.Pattern:
    """The pattern of the paths of layers such as "decoder/block_*".

    Raises:
      ValueError: there is not exactly one "*".
    """
    if layers.count("*") != 1:
        raise ValueError(
            f"layers={layers!r}: write the path of the layers with one * in place of "
            'their number, such as "decoder/block_*"'
        )
    return re.compile(re.escape(layers).replace(r"\*", r"(\d+)"))


def calls_replaced(pattern: re.Pattern, on_call: Callable) -> Any:
    """A context in which calls of the layers are replaced.

    Args:
      pattern: of the layers' paths.
      on_call: (number, module, next_fun, args, kwargs) -> what the call returns.
    """

    def interceptor(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        match = pattern.fullmatch("/".join(context.module.path))
        if match is None or context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        return on_call(int(match[1]), context.module, next_fun, args, kwargs)

    return nn.intercept_methods(interceptor)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenLayers:
    """The layers of a Linen module.

    Attributes:
      functions: the whole module.
      layers: path of the layers, with * for their number.
      modules: the layers, unbound, in order.
      groups: their numbers in rows, see `group_layers`.
    """

    functions: LinenFunctions
    layers: str
    modules: tuple[nn.Module, ...]
    groups: list[list[int]]

    @classmethod
    def of(
        cls, functions: LinenFunctions, layers: str, params: Mapping[str, Param]
    ) -> "LinenLayers":
        """Finds the layers of a module.

        Args:
          functions: the whole module.
          layers: path of the layers, with * for their number.
          params: {path: Param} of the whole module.

        Raises:
          ValueError: no layers, layers that are numbered otherwise than from 0, that
            keep state, or that do not repeat.
        """
        pattern, found = layer_pattern(layers), {}

        def on_call(
            number: int, module: nn.Module, next_fun: Callable, args: Any, kwargs: Any
        ) -> Any:
            found.setdefault(number, module.clone(parent=None, name=None))
            return next_fun(*args, **kwargs)

        with calls_replaced(pattern, on_call):
            jax.eval_shape(functions.variables, jax.random.key(0))
        if list(found) != list(range(len(found))):
            raise ValueError(
                f"layers={layers!r}: the model calls layers {list(found)}; they have "
                "to be numbered from 0 in the order in which they are called"
            )
        by_layer = _by_layer(pattern, layers, params, len(found))
        kinds = [(_comparable(found[i]), by_layer[i]) for i in range(len(found))]
        modules = tuple(found[i] for i in range(len(found)))
        return cls(functions, layers, modules, group_layers(kinds, layers))

    @property
    def prefix(self) -> str:
        """First part of the paths of stacked parameters."""
        return self.layers.replace("*", "").rstrip("_/.-") + "/"

    @property
    def _pattern(self) -> re.Pattern:
        return layer_pattern(self.layers)

    def stacked_params(self, params: Mapping[str, Param]) -> dict[str, Param]:
        """{path: Param} with the layers stacked."""
        by_layer = _by_layer(self._pattern, self.layers, params, len(self.modules))
        shared = {p: x for p, x in params.items() if _split(self._pattern, p) is None}
        return shared | stack_params(by_layer, self.prefix, self.groups)

    def stacked(self, params: Params) -> Params:
        """{path: array} with the layers stacked, from that of the module."""
        by_layer = _by_layer(self._pattern, self.layers, params, len(self.modules))
        shared = {p: x for p, x in params.items() if _split(self._pattern, p) is None}
        return shared | stack_values(by_layer, self.prefix, self.groups)

    def unstacked(self, params: Params) -> Params:
        """The inverse of `stacked`."""
        stack = {p: x for p, x in params.items() if p.startswith(self.prefix)}
        own = {p: x for p, x in params.items() if p not in stack}
        for number in range(len(self.modules)):
            layer = unstack_values(stack, self.prefix, self.groups, number)
            name = self.layers.replace("*", str(number))
            own |= {f"{name}/{rest}": x for rest, x in layer.items()}
        return own

    def taken_out(self, on_call: OnCall) -> Any:
        """A context in which `on_call` takes the place of the layers."""
        return calls_replaced(
            self._pattern,
            lambda number, module, next_fun, args, kwargs: on_call(
                number, args, kwargs
            ),
        )

    def call(
        self, column: int, params: Params, key: Key, args: tuple, kwargs: dict
    ) -> Any:
        """Runs the layer of one column with the parameters of one row."""
        row = {path: x[None] for path, x in params.items()}
        own = unstack_values(row, self.prefix, self.groups, column)
        known = {path: Param(x.shape, x.dtype, None) for path, x in own.items()}
        variables = self.functions.collections(own, known)
        random_keys = self.functions.random_keys(key)
        rngs = {"rngs": random_keys} if random_keys else {}
        return self.modules[column].apply(variables, *args, **rngs, **kwargs)


def _split(pattern: re.Pattern, path: str) -> tuple[int, str] | None:
    """(number, path within the layer) of a layer's variable; None for others."""
    parts = path.split("/")
    depth = pattern.pattern.count("/") + 1
    match = pattern.fullmatch("/".join(parts[:depth]))
    return None if match is None else (int(match[1]), "/".join(parts[depth:]))


def _by_layer(
    pattern: re.Pattern, layers: str, variables: Mapping[str, Any], depth: int
) -> list[dict[str, Any]]:
    """{path within the layer: anything} of every layer.

    Raises:
      ValueError: a layer keeps other variables than parameters.
    """
    by_layer: list[dict[str, Any]] = [{} for _ in range(depth)]
    for path, x in variables.items():
        if (
            isinstance(x, Param)
            and x.is_state
            and _split(pattern, path.split("/", 1)[1])
        ):
            raise ValueError(
                f"layers={layers!r}: a layer keeps {path}, which is no parameter; "
                "layers that meshpar runs one by one have parameters alone. Leave "
                "layers out, or use a layer without running state"
            )
        if (found := _split(pattern, path)) is not None:
            by_layer[found[0]][found[1]] = x
    return by_layer


def _comparable(value: Any) -> Any:
    """A value that is equal for modules that compute the same."""
    if isinstance(value, nn.Module):
        fields = (f.name for f in dataclasses.fields(value))
        names = (name for name in fields if name not in ("parent", "name"))
        return type(value), [(n, _comparable(getattr(value, n, None))) for n in names]
    if isinstance(value, tuple | list):
        return [_comparable(x) for x in value]
    if callable(value) and hasattr(value, "__code__"):
        cells = [_comparable(c.cell_contents) for c in value.__closure__ or ()]
        return value.__code__, value.__defaults__, cells
    return value
