"""Cuts a model at its layers: embed, layer and head from one loss function.

A model that calls its layers one after the other, each with the output of the one
before, needs no description of its layered form. Its loss function runs with the layers
taken out: what the first layer is called with is the output of `embed`; what follows
the last layer, with activations put in the place of its output, is `head_loss`.
Equations that a part does not need are removed by the compiler.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core

from meshpar.arrays import Array, Params
from meshpar.layouts.param import Param
from meshpar.models.layer_call import Arguments, LayerCall, is_floating
from meshpar.models.layer_stack import Key, LayeredModel, fold_key
from meshpar.models.metrics import LossResult, loss_result

OnCall = Callable[[int, tuple, dict[str, Any]], Any]
"""(number of a layer, args, kwargs) -> what the call of that layer returns."""


class _Reached(Exception):  # noqa: N818, it is no error
    """Ends a run at the first layer."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments


@dataclasses.dataclass(frozen=True)
class LayerCut:
    """A model whose layers can be taken out.

    Attributes:
      layers: how a user named them.
      groups: numbers of the layers by rows of the stack. The layers of one row run one
        after the other; layers of one column are equal.
      prefix: first part of the paths of stacked parameters.
      params: {path: Param} of the stacked parameters.
      run: (shared parameters, batch, key, on_call) -> result of the loss function.
      call: (column, parameters of one row, key, args, kwargs) -> output of a layer.
    """

    layers: str
    groups: list[list[int]]
    prefix: str
    params: Mapping[str, Param]
    run: Callable[[Params, Any, Key, OnCall], Any]
    call: Callable[[int, Params, Key, tuple, dict[str, Any]], Any]

    def name(self, number: int) -> str:
        """A layer, for errors."""
        return f"layer {number} of {self.layers!r}"

    def _run(self, shared: Params, batch: Any, key: Key, on_call: OnCall) -> Any:
        shared = {p: x for p, x in shared.items() if p not in self.params}
        return self.run(shared, batch, key, on_call)

    def _first_arguments(self, shared: Params, batch: Any, key: Key) -> Arguments:
        """The arguments of the first layer.

        Raises:
          ValueError: the loss function calls no layer.
        """

        def on_call(number: int, args: tuple, kwargs: dict[str, Any]) -> None:
            raise _Reached(Arguments(self.name(number), args, kwargs))

        try:
            self._run(shared, batch, key, on_call)
        except _Reached as reached:
            return reached.arguments
        raise ValueError(
            f"layers={self.layers!r}: the loss function calls none of them"
        )

    def _first_call(
        self, shared: Params, batch: Any, key: Key
    ) -> tuple[LayerCall, tuple[Array, ...]]:
        """(activations, context) of the first layer.

        Integers are context, and so is what no parameter has an influence on.
        """
        arguments = self._first_arguments(shared, batch, key)
        if not arguments.arrays:
            return arguments.call(())

        def others(shared: Params) -> dict[int, Array]:
            return self._first_arguments(shared, batch, key).arrays

        influenced = _influenced(others, shared)
        return arguments.call(
            [
                i
                for i, x in arguments.arrays.items()
                if not is_floating(x) or i not in influenced
            ]
        )

    def embed(self, shared: Params, batch: Any, key: Key) -> LayerCall:
        """The activations that the first layer is called with."""
        return self._first_call(shared, batch, key)[0]

    def context(self, shared: Params, batch: Any, key: Key) -> tuple[Array, ...]:
        """Other arrays that every layer is called with."""
        return jax.lax.stop_gradient(self._first_call(shared, batch, key)[1])

    def layer(
        self, params: Params, x: LayerCall, key: Key, context: tuple[Array, ...]
    ) -> LayerCall:
        """Runs the layers of one row of the stack."""
        for column, number in enumerate(self.groups[0]):
            args, kwargs = x.arguments(context)
            own_key = key if len(self.groups[0]) == 1 else fold_key(key, column)
            output = self.call(column, params, own_key, args, kwargs)
            x = x.followed_by(self.name(number), output)
        return x

    def head_loss(
        self, shared: Params, x: LayerCall, batch: Any, key: Key
    ) -> LossResult:
        """The loss function, with x in place of the output of every layer."""
        head = _Head(self, x, key)
        result = self._run(shared, batch, key, head)
        total = sum(map(len, self.groups))
        if head.num_called != total:
            raise ValueError(
                f"layers={self.layers!r}: the loss function calls {head.num_called} of "
                f"{total} layers; it has to call each of them once"
            )
        return loss_result(result)

    def layered_model(self) -> LayeredModel:
        """The model layer by layer."""
        return LayeredModel(
            prefix=self.prefix,
            depth=len(self.groups),
            embed=self.embed,
            layer=self.layer,
            head_loss=self.head_loss,
            context=self.context,
            pattern=len(self.groups[0]),
        )


class _Head:
    """Takes the place of all layers: each returns the same activations.

    Attributes:
      num_called: layers called so far.
    """

    def __init__(self, cut: LayerCut, x: LayerCall, key: Key) -> None:
        self._cut, self._x, self._key = cut, x, key
        self._first: Arguments | None = None
        self.num_called = 0

    def __call__(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Checks that a layer is called as the layered form assumes.

        Raises:
          ValueError: it is not.
        """
        cut = self._cut
        arguments = Arguments(cut.name(number), args, kwargs)
        self._first = first = self._first or arguments
        if number != self.num_called:
            raise ValueError(
                f"layers={cut.layers!r}: the loss function calls layer {number} when "
                f"layer {self.num_called} is due; each layer runs once, in order"
            )
        if number and not _are_same(arguments.x, self._x.x):
            raise ValueError(
                f"layers={cut.layers!r}: the model computes between layers "
                f"{number - 1} and {number}; move that into the layer, so that each "
                "layer takes what the one before returned"
            )
        arrays = (list(a.arrays.values()) for a in (arguments, first))
        if arguments.fixed != first.fixed or not _are_same(*arrays):
            raise ValueError(
                f"layers={cut.layers!r}: layer {number} is called with other arguments "
                "than layer 0, beside its activations; make them attributes of the "
                "layer, or compute them once before the layers"
            )
        self.num_called += 1
        return self._returned(number, args, kwargs)

    def _returned(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The activations in the structure of a layer's output."""
        column = number % len(self._cut.groups[0])
        row = {
            path: jax.ShapeDtypeStruct(param.shape[1:], param.dtype)
            for path, param in self._cut.params.items()
        }
        output = jax.eval_shape(
            lambda row: self._cut.call(column, row, self._key, args, kwargs), row
        )
        return jax.tree.unflatten(jax.tree.structure(output), self._x.x)


def _are_same(first: list[Any], second: list[Any]) -> bool:
    """Whether two lists hold the very same arrays."""
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(a is b for a, b in pairs)


def _influenced(fn: Callable[[Params], dict[int, Array]], params: Params) -> set[int]:
    """Keys of the results of fn(params) that depend on any of the params."""
    keys: list[int] = []

    def flat(params: Params) -> list[Array]:
        results = fn(params)
        keys.extend(results)
        return list(results.values())

    jaxpr = jax.make_jaxpr(flat)(params).jaxpr
    reached = set(jaxpr.invars)

    def is_reached(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in reached

    for eqn in jaxpr.eqns:
        if any(map(is_reached, eqn.invars)):
            reached.update(eqn.outvars)
    outputs = zip(keys, jaxpr.outvars, strict=True)
    return {key for key, atom in outputs if is_reached(atom)}
