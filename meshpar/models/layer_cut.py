"""Cuts a model at its layers: embed, layer and head from one loss function.

A model that calls its layers one after the other, each with the output of the one
before, needs no description of its layered form. Its loss function runs with the layers
taken out: what the first layer is called with is the output of `embed`; what follows
the last layer, with activations put in the place of its output, is `head_loss`.
Equations that a part does not need are removed by the compiler.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.extend import core

from meshpar import compat
from meshpar.arrays import Array, Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.metrics import LossResult, loss_result
from meshpar.models.layer_call import (
    Arguments,
    Column,
    LayerCall,
    in_structure,
    influenced,
    is_floating,
)
from meshpar.models.layer_stack import Key, LayeredModel, fold_key

OnCall = Callable[[int, Any, tuple, dict[str, Any]], Any]
"""(number of the call, configuration of the layer, args, kwargs) -> its output."""


class Stack(Protocol):
    """How layers are stacked: `LayerGroups` or `ScannedLayers`."""

    prefix: str
    num_rows: int
    period: int
    num_calls: int

    def unstacked(self, params: Params) -> Params:
        """{path in the module: array} of stacks."""


@dataclasses.dataclass(frozen=True)
class LayerCut:
    """A model whose layers can be taken out.

    Attributes:
      layers: how a user named them.
      stack: how they are stacked.
      params: {path: Param} of the stacked parameters.
      run: (shared parameters, batch, key, on_call) -> result of the loss function.
      call: (configuration, column, parameters of one row, key, args, kwargs) -> output
        of a layer.
    """

    layers: str
    stack: Stack
    params: Mapping[str, Param]
    run: Callable[[Params, Any, Key, OnCall], Any]
    call: Callable[[Any, int, Params, Key, tuple, dict[str, Any]], Any]

    def name(self, number: int) -> str:
        """A layer, for errors."""
        return f"layer {number} of {self.layers!r}"

    def _run(self, shared: Params, batch: Any, key: Key, on_call: OnCall) -> Any:
        """Runs the loss function; its layers have to be called where it runs.

        Raises:
          ValueError: it transforms the function that calls them.
        """
        shared = {p: x for p, x in shared.items() if p not in self.params}
        outside = _trace_state()

        def checked(number: int, *call: Any) -> Any:
            if _trace_state() != outside:
                raise ValueError(
                    f"layers={self.layers!r}: the model calls {self.name(number)} "
                    "inside a transformation of jax (jit, checkpoint, vmap, scan); "
                    "take it away (the layout sets remat, and the step is compiled as "
                    "a whole), or leave layers out"
                )
            return on_call(number, *call)

        return self.run(shared, batch, key, checked)

    def _first_row(
        self, shared: Params, batch: Any, key: Key
    ) -> tuple[Arguments, list[Column]]:
        """The arguments of the first layer, and the layers of the first row.

        Raises:
          ValueError: the loss function calls no layer.
        """
        first_row = _FirstRow(self, key)
        try:
            self._run(shared, batch, key, first_row)
        except _Reached:
            return first_row.arguments, first_row.columns
        raise ValueError(
            f"layers={self.layers!r}: the loss function calls "
            f"{len(first_row.columns)} of {self.stack.num_calls} layers; it has to "
            "call each of them once, by the layer's __call__"
        )

    def _first_call(
        self, shared: Params, batch: Any, key: Key
    ) -> tuple[LayerCall, tuple[Array, ...]]:
        """(activations, context) of the first layer.

        Integers are context, and so is what no parameter has an influence on.
        """
        arguments, columns = self._first_row(shared, batch, key)
        if not arguments.arrays:
            return arguments.call((), columns)

        def others(shared: Params) -> dict[int, Array]:
            return self._first_row(shared, batch, key)[0].arrays

        reached = influenced(others, shared)
        is_context = [
            i
            for i, x in arguments.arrays.items()
            if not is_floating(x) or i not in reached
        ]
        return arguments.call(is_context, columns)

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
        for number, column in enumerate(x.columns):
            args, kwargs = x.arguments(context)
            own_key = key if len(x.columns) == 1 else fold_key(key, number)
            output = self.call(
                column.configuration, number, params, own_key, args, kwargs
            )
            x = x.followed_by(self.name(number), output)
        return x

    def head_loss(
        self, shared: Params, x: LayerCall, batch: Any, key: Key
    ) -> LossResult:
        """The loss function, with x in place of the output of every layer."""
        head = _Head(self, x)
        result = self._run(shared, batch, key, head)
        if head.num_called != self.stack.num_calls:
            raise ValueError(
                f"layers={self.layers!r}: the loss function calls {head.num_called} of "
                f"{self.stack.num_calls} layers; it has to call each of them once"
            )
        return loss_result(result)

    def _with(self, layers: Params) -> "LayerCut":
        """The model whose loss function also finds the parameters of layers.

        Args:
          layers: {path in the module: array}.
        """

        def run(shared: Params, *args: Any) -> Any:
            return self.run({**shared, **layers}, *args)

        return dataclasses.replace(self, run=run)

    def check_reads(self, params: Params, batch: Any, key: Key) -> None:
        """Refuses a loss that reads what the parts of the model do not have.

        Args:
          params: {path: ShapeDtypeStruct}, layers stacked.
          batch: abstract batch.
          key: abstract random key, or None for evaluation.

        Raises:
          MeshparError: the loss function reads parameters of layers, or outputs of
            layers before the last.
        """
        stack = {path: x for path, x in params.items() if path in self.params}
        shared = {path: x for path, x in params.items() if path not in stack}
        layers = jax.eval_shape(self.stack.unstacked, stack)

        def embed(layers: Params, *args: Any) -> LayerCall:
            return self._with(layers).embed(*args)

        def head(layers: Params, outputs: list[list[Array]], *args: Any) -> LossResult:
            shared, x, batch, key = args
            cut = self._with(layers)
            return loss_result(cut._run(shared, batch, key, _Head(cut, x, outputs)))

        x = jax.eval_shape(embed, layers, shared, batch, key)
        outputs = [list(x.x)] * self.stack.num_calls

        closed = jax.make_jaxpr(head)(layers, outputs, shared, x, batch, key)
        read, inputs = compat.used_inputs(closed), iter(closed.jaxpr.invars)
        for path, variable in zip(sorted(layers), inputs, strict=False):
            if variable in read:
                raise MeshparError(
                    f"layers={self.layers!r}: the loss reads the parameter {path} of a "
                    f"layer ({compat.user_line(read[variable])}), and meshpar runs it "
                    "without the layers; leave layers out (layers=''), or let the "
                    "optimizer do it (weight decay: optax.add_decayed_weights)"
                )
        earlier = itertools.islice(inputs, len(x.x) * (self.stack.num_calls - 1))
        for number, variable in enumerate(earlier):
            if variable in read:
                line = compat.user_line(read[variable])
                raise MeshparError(
                    f"layers={self.layers!r}: the loss reads the output of "
                    f"{self.name(number // len(x.x))} ({line}), and only that of the "
                    "last layer is kept; leave layers out (layers=''), or carry what "
                    "it needs along in the activations"
                )

    def layered_model(self) -> LayeredModel:
        """The model layer by layer."""
        return LayeredModel(
            prefix=self.stack.prefix,
            depth=self.stack.num_rows,
            embed=self.embed,
            layer=self.layer,
            head_loss=self.head_loss,
            context=self.context,
            kept=lambda x: x.kept,
            pattern=self.stack.period,
            check_reads=self.check_reads,
        )


class _Reached(Exception):  # noqa: N818, it is no error
    """Ends a run of the loss function after the first row of layers."""


class _FirstRow:
    """Takes the place of the layers of the first row.

    Attributes:
      arguments: those of the first layer.
      columns: the layers so far.
    """

    arguments: Arguments

    def __init__(self, cut: LayerCut, key: Key) -> None:
        self._cut, self._key = cut, key
        self.columns: list[Column] = []

    def __call__(
        self, number: int, configuration: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Notes the call of a layer.

        Raises:
          ValueError: another layer is due.
        """
        cut = self._cut
        _check_order(cut, number, len(self.columns))
        arguments = Arguments(cut.name(number), args, kwargs)
        if not number:
            self.arguments = arguments
        row = {
            path: jax.ShapeDtypeStruct(param.shape[1:], param.dtype)
            for path, param in cut.params.items()
        }
        output = jax.tree.structure(
            jax.eval_shape(
                lambda row: cut.call(
                    configuration, number, row, self._key, args, kwargs
                ),
                row,
            )
        )
        returned = in_structure(cut.name(number), output, self.arguments.x)
        self.columns.append(Column(configuration, output))
        if len(self.columns) == cut.stack.period:
            raise _Reached
        return returned


class _Head:
    """Takes the place of all layers: each returns the same activations.

    Attributes:
      num_called: layers called so far.
    """

    def __init__(
        self,
        cut: LayerCut,
        x: LayerCall,
        outputs: Sequence[Sequence[Array]] | None = None,
    ) -> None:
        self._cut, self._x = cut, x
        self._outputs = outputs or [x.x] * cut.stack.num_calls
        self._first: Arguments | None = None
        self.num_called = 0

    def __call__(
        self, number: int, configuration: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Checks that a layer is called as the layered form assumes.

        Raises:
          ValueError: it is not.
        """
        cut, x = self._cut, self._x
        arguments = Arguments(cut.name(number), args, kwargs)
        self._first = first = self._first or arguments
        _check_order(cut, number, self.num_called)
        if number and not _are_same(arguments.x, self._outputs[number - 1]):
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
        column = x.columns[number % len(x.columns)]
        if configuration != column.configuration:
            raise ValueError(
                f"layers={cut.layers!r}: the loss function gives layer {number} other "
                f"attributes than layer {number % len(x.columns)}, which has its place "
                "in the pattern; give them the same ones"
            )
        self.num_called += 1
        return in_structure(cut.name(number), column.output, self._outputs[number])


def _trace_state() -> Any:
    """A value that is equal for calls under the same transformations of jax."""
    return core.get_opaque_trace_state(convention="nnx")


def _check_order(cut: LayerCut, number: int, due: int) -> None:
    """Raises ValueError if a layer is called when another one is due."""
    if number != due:
        raise ValueError(
            f"layers={cut.layers!r}: the loss function calls layer {number} when "
            f"layer {due} is due; each layer runs once, in order"
        )


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two lists hold the very same arrays."""
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(a is b for a, b in pairs)
