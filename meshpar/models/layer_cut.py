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

from meshpar.arrays import Params
from meshpar.layouts.param import Param
from meshpar.models.layer_call import LayerCall
from meshpar.models.layer_stack import Key, LayeredModel, fold_key
from meshpar.models.model import loss_and_aux

OnCall = Callable[[int, tuple, dict[str, Any]], Any]
"""(number of a layer, args, kwargs) -> what the call of that layer returns."""


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

    def _name(self, number: int) -> str:
        return f"layer {number} of {self.layers!r}"

    def embed(self, shared: Params, batch: Any, key: Key) -> LayerCall:
        """What the first layer is called with.

        Raises:
          ValueError: the loss function calls no layer.
        """

        class Reached(Exception):  # noqa: N818, it is no error
            """Ends the run at the first layer."""

        found: list[LayerCall] = []

        def on_call(number: int, args: tuple, kwargs: dict[str, Any]) -> None:
            found.append(LayerCall.of(self._name(number), args, kwargs))
            raise Reached

        try:
            self.run(shared, batch, key, on_call)
        except Reached:
            return found[0]
        raise ValueError(
            f"layers={self.layers!r}: the loss function calls none of them"
        )

    def layer(self, params: Params, x: LayerCall, key: Key) -> LayerCall:
        """Runs the layers of one row of the stack."""
        for column, number in enumerate(self.groups[0]):
            args, kwargs = x.arguments()
            own_key = key if len(self.groups[0]) == 1 else fold_key(key, column)
            output = self.call(column, params, own_key, args, kwargs)
            x = x.followed_by(self._name(number), output)
        return x

    def head_loss(
        self, shared: Params, x: LayerCall, batch: Any, key: Key
    ) -> tuple[Any, dict]:
        """The loss function, with x in place of the output of every layer."""
        head = _Head(self, x)
        result = self.run(shared, batch, key, head)
        total = sum(map(len, self.groups))
        if head.num_called != total:
            raise ValueError(
                f"layers={self.layers!r}: the loss function calls {head.num_called} of "
                f"{total} layers; it has to call each of them once"
            )
        return loss_and_aux(result)

    def layered_model(self) -> LayeredModel:
        """The model layer by layer."""
        return LayeredModel(
            prefix=self.prefix,
            depth=len(self.groups),
            embed=self.embed,
            layer=self.layer,
            head_loss=self.head_loss,
        )


class _Head:
    """Takes the place of all layers: each returns the same activations.

    Attributes:
      num_called: layers called so far.
    """

    def __init__(self, cut: LayerCut, x: LayerCall) -> None:
        self._cut, self._x = cut, x
        self._first: LayerCall | None = None
        self.num_called = 0

    def __call__(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Checks that a layer is called as the layered form assumes.

        Raises:
          ValueError: it is not.
        """
        cut = self._cut
        call = LayerCall.of(cut._name(number), args, kwargs)
        if number != self.num_called:
            raise ValueError(
                f"layers={cut.layers!r}: the loss function calls layer {number} when "
                f"layer {self.num_called} is due; each layer runs once, in order"
            )
        raw = jax.tree.leaves((args, kwargs))[len(call.x) :]
        if self._first is None:
            self._first, self._raw = call, raw
        if number and not all(a is b for a, b in zip(call.x, self._x.x, strict=False)):
            raise ValueError(
                f"layers={cut.layers!r}: the model computes between layers "
                f"{number - 1} and {number}; move that into the layer, so that each "
                "layer takes what the one before returned"
            )
        same = call.structure == self._x.structure and all(
            a is b for a, b in zip(raw, self._raw, strict=True) if hasattr(a, "dtype")
        )
        if not same:
            raise ValueError(
                f"layers={cut.layers!r}: layer {number} is called with other arguments "
                "than layer 0, beside its activations; make them attributes of the "
                "layer, or compute them once before the layers"
            )
        self.num_called += 1
        return self._returned(number)

    def _returned(self, number: int) -> Any:
        """The activations in the structure of a layer's output."""
        column = number % len(self._cut.groups[0])
        row = {
            path: jax.ShapeDtypeStruct(param.shape[1:], param.dtype)
            for path, param in self._cut.params.items()
        }
        args, kwargs = self._x.arguments()
        output = jax.eval_shape(
            lambda row, args: self._cut.call(column, row, None, args, kwargs), row, args
        )
        return jax.tree.unflatten(jax.tree.structure(output), self._x.x)
