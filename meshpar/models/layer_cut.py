"""Cuts a model at its layers: embed, layer and head from one loss function.

A model that calls its layers one after the other, each with the output of the one
before, needs no description of its layered form. Its loss function is traced once for
every kind of batch, with a mark in the place of each layer (`layer_marks`): what the
first mark is called with is the output of `embed`; what follows from the output of the
last is `head_loss`; what the head reads of other layers travels with the activations
(`layer_reads`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params, vary
from meshpar.errors import MeshparError
from meshpar.jaxprs.live_code import compute_the_same
from meshpar.jaxprs.passed_through import passed_through
from meshpar.layouts.param import Param
from meshpar.metrics import LossResult, loss_result
from meshpar.models.layer_call import (
    Configuration,
    LayerCall,
    array_leaves,
    check_arguments,
    is_array,
)
from meshpar.models.layer_marks import Call, mark, marked_program
from meshpar.models.layer_parts import Named, Parts
from meshpar.models.layer_stack import Key, LayeredModel, fold_key, refuse_updates

OnCall = Callable[[int, Configuration, tuple, dict[str, Any]], Any]
"""(number of the call, configuration of the layer, args, kwargs) -> its output."""


class Stack(Protocol):
    """How layers are stacked: `LayerGroups` or `ScannedLayers`."""

    prefix: str
    num_rows: int
    period: int
    is_given: bool

    def unstacked(self, params: Params) -> Params:
        """{path in the module: array} of stacks."""

    def column(self, stack: Mapping[str, Any], number: int) -> dict[str, Any]:
        """{path within the layer: entry} of one column of the stack or of a row."""

    def split(self, path: str) -> tuple[int, str] | None:
        """(number, path within the layer) of a layer's variable; None for others."""


@dataclasses.dataclass(frozen=True)
class LayerCut:
    """A model whose layers can be taken out.

    Attributes:
      layers: how a user named them.
      stack: how they are stacked.
      params: {path: Param} of the stacked parameters.
      run: (parameters in the module, batch, key, on_call) -> (result of the loss
        function, {path: new value} of what it may have changed).
      call: (configuration, column, parameters of one row, key, args, kwargs) -> output
        of a layer.
    """

    layers: str
    stack: Stack
    params: Mapping[str, Param]
    run: Callable[[Params, Any, Key, OnCall], tuple[Any, Params]]
    call: Callable[[Configuration, int, Params, Key, tuple, dict[str, Any]], Any]

    @classmethod
    def of(cls, found: Any, params: Mapping[str, Param], run: Callable) -> "LayerCut":
        """Cuts a module.

        Args:
          found: its layers, `NnxLayers` or `LinenLayers`.
          params: {path: Param}, layers stacked.
          run: as the attribute.
        """
        own = {p: x for p, x in params.items() if p.startswith(found.stack.prefix)}
        return cls(found.layers, found.stack, own, run, found.call)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes alone: traces stay in their process."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @functools.cached_property
    def named(self) -> Named:
        """The layers, for errors."""
        period = self.stack.period
        return Named(self.layers, self.stack.num_rows * period, period)

    @functools.cached_property
    def _trace(self) -> Any:
        """The loss function with marks; jax keeps its traces."""

        def marked(
            axes: tuple[str, ...], layers: Params, shared: Params, batch: Any, key: Key
        ) -> tuple[LossResult, Params]:
            layers = {path: vary(x, axes) for path, x in layers.items()}
            marks = _Marks(self, axes, key)
            result, updates = self.run({**shared, **layers}, batch, key, marks)
            return loss_result(result), updates

        return jax.jit(marked, static_argnums=0)

    @functools.cached_property
    def _known(self) -> dict[Any, Parts]:
        return {}

    @functools.cached_property
    def _layer_shapes(self) -> Params:
        """{path in the module: shape} of the layers' parameters."""
        stack = {
            path: jax.ShapeDtypeStruct(param.shape, param.dtype)
            for path, param in self.params.items()
        }
        return jax.eval_shape(self.stack.unstacked, stack)

    def _parts(
        self, shared: Params, batch: Any, key: Key, axes: tuple[str, ...]
    ) -> tuple[Parts, list[Array]]:
        """The parts of the loss function, and its inputs but for layers' parameters.

        Args:
          shared: parameters; those of the stack are left out.
          batch: the batch.
          key: random key, or None for evaluation.
          axes: manual axes over which the outputs of layers vary.
        """
        shared = {p: x for p, x in shared.items() if p not in self.params}
        args = shared, batch, key
        traced = self._trace.trace(axes, self._layer_shapes, *args)
        if (parts := self._known.get(traced.jaxpr)) is None:
            parts = self._known[traced.jaxpr] = self._cut(traced, sorted(shared))
        return parts, [jnp.asarray(x) for x in jax.tree.leaves(args)]

    def _cut(self, traced: Any, shared: Sequence[str]) -> Parts:
        """The parts of a trace.

        Raises:
          MeshparError: the layers are not called one after the other, or the loss
            function changes a variable.
        """
        closed, (result, updates) = traced.jaxpr, traced.out_info
        paths = sorted(self._layer_shapes)
        variables = (*paths, *shared)
        numbers = {path: number for number, path in enumerate(variables)}
        sources = passed_through(closed.jaxpr)[len(jax.tree.leaves(result)) :]
        after = zip(sorted(updates), sources, strict=True)
        refuse_updates({p: source for p, source in after if source != numbers[p]})
        return Parts.of(
            self.named,
            marked_program(closed, self.stack.is_given),
            [self._split(path) for path in paths],
            len(shared),
            jax.tree.structure(result),
        )

    def _split(self, path: str) -> tuple[int | None, str]:
        """(number of the layer, path within it); of a whole stack None as number."""
        number, rest = self.stack.split(path)
        return (None if self.stack.is_given else number), rest

    def embed(self, shared: Params, batch: Any, key: Key) -> LayerCall:
        """The activations that the first layer is called with."""
        parts, inputs = self._parts(shared, batch, key, _manual_axes())
        return parts.embed(inputs, self.stack.num_rows)

    def context(self, shared: Params, batch: Any, key: Key) -> tuple[Array, ...]:
        """Other arrays that every layer is called with."""
        parts, inputs = self._parts(shared, batch, key, _manual_axes())
        return jax.lax.stop_gradient(parts.context_arrays(inputs))

    def layer(
        self, params: Params, x: LayerCall, key: Key, context: tuple[Array, ...]
    ) -> LayerCall:
        """Runs the layers of one row of the stack."""
        arrays, read = x.x, []
        for number, column in enumerate(x.columns):
            args, kwargs = column.arguments(arrays, x.kept, context)
            own_key = key if len(x.columns) == 1 else fold_key(key, number)
            output = self.call(
                column.configuration, number, params, own_key, args, kwargs
            )
            leaves = jax.tree.leaves(output)
            own = self.stack.column(params, number)
            name = self.named.name(number)
            read.append(column.reads.followed(name, own, leaves, x.read[number]))
            arrays = tuple(leaves[i] for i in column.returned)
        return dataclasses.replace(x, x=arrays, read=tuple(read))

    def head_loss(
        self, shared: Params, x: LayerCall, batch: Any, key: Key
    ) -> LossResult:
        """The loss function, with x in place of the output of the last layer."""
        varying = (jax.typeof(leaf).manual_axis_type.varying for leaf in x.x)
        axes = tuple(sorted(frozenset().union(*varying)))
        parts, inputs = self._parts(shared, batch, key, axes)
        return parts.head(inputs, x)

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
        )


def _manual_axes() -> tuple[str, ...]:
    """The manual axes of the shard_map around, over which activations vary."""
    return tuple(sorted(jax.sharding.get_abstract_mesh().manual_axes))


class _Output(NamedTuple):
    """The result of a layer.

    Attributes:
      tree: its structure.
      avals: types of its arrays.
      code: the jaxpr of the layer.
    """

    tree: Any
    code: Any


class _Marks:
    """Takes the place of the layers in a trace."""

    def __init__(self, cut: LayerCut, axes: tuple[str, ...], key: Key) -> None:
        self._cut, self._axes, self._key = cut, axes, key
        self._columns: dict[int, tuple[Configuration, _Output]] = {}

    def __call__(
        self, number: int, own: Configuration, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Marks the call of a layer; returns arrays of the types that it returns.

        Raises:
          MeshparError: no layer of a stack is called so, or it computes otherwise than
            the first of its column.
        """
        name, period = self._cut.named.name(number), self._cut.stack.period
        check_arguments(name, args, kwargs)
        column = number % period
        if column not in self._columns:
            output = self._output(column, own, args, kwargs)
            self._columns[column] = own, output
        first, output = self._columns[column]
        if own == first and own.own != first.own:
            other = self._output(column, own, args, kwargs)
            if not compute_the_same(output.code, other.code):
                raise self._computes_otherwise(number, own, first)
        leaves, tree = jax.tree.flatten((args, kwargs))
        flags = {i: leaf for i, leaf in enumerate(leaves) if not is_array(leaf)}
        num_first = len(jax.tree.leaves(args[:1]))
        types = tuple(output.code.out_avals)
        call = Call(name, number, own, tree, flags, types, num_first)
        return jax.tree.unflatten(output.tree, mark(call, array_leaves(leaves)))

    def _computes_otherwise(
        self, number: int, own: Configuration, first: Configuration
    ) -> MeshparError:
        period = self._cut.stack.period
        read = ", ".join(
            f"{name}={value!r} (there {first.own[name]!r})"
            for name, value in sorted(own.own.items())
        )
        return MeshparError(
            f"layers={self._cut.layers!r}: layer {number} computes otherwise than "
            f"layer {number % period}, as it reads an attribute in which all layers "
            f"differ: {read}. Keep it in a variable of the layer (nnx.Variable, or a "
            "collection of Linen's), or leave layers out"
        )

    def _output(
        self, column: int, own: Configuration, args: tuple, kwargs: dict[str, Any]
    ) -> _Output:
        """Traces a layer on the types of its parameters and arguments."""
        cut, trees = self._cut, []
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        row = {
            path: jax.ShapeDtypeStruct(param.shape[1:], param.dtype)
            for path, param in cut.params.items()
        }

        def run(row: Params, values: list[Array], key: Key) -> list[Array]:
            known = dict(zip(arrays, values, strict=True))
            all_leaves = [known.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, all_leaves)
            output = cut.call(own, column, row, key, args, kwargs)
            trees.append(jax.tree.structure(output))
            return [vary(jnp.asarray(x), self._axes) for x in jax.tree.leaves(output)]

        values = [jnp.asarray(leaves[i]) for i in arrays]
        closed = jax.make_jaxpr(run)(row, values, self._key)
        return _Output(trees[0], closed)
