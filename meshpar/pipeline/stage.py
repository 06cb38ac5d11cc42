"""The operations of one pipeline stage: F, B and W, embedding and head."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.shard_keys import for_microbatch
from meshpar.collectives.varying import sum_varying
from meshpar.contracts.purposes import purpose
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.rows import Rows
from meshpar.fsdp.saved import Residuals, Saved, Slot
from meshpar.layouts.axes import PIPE
from meshpar.lowering.totals import Totals
from meshpar.mesh.order import in_turn
from meshpar.metrics import LossResult, masked
from meshpar.models.layer_stack import (
    LAYERS_KEY,
    Key,
    LayeredModel,
    check_floating,
    fold_key,
)
from meshpar.pipeline.buffers import put_slot, take_slot


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineStage:
    """One stage inside shard_map; chunks and microbatches are int32 scalars.

    Random keys depend on key, rows and layer, as without a pipeline.

    Attributes:
      layered: the model.
      shared: whole weights of embedding and head, or this stage's slice of them.
      stack: leaves of its layers, {path: [chunks * rows, ...]}.
      constants: entries of both that are not trained.
      batches: microbatches of this data shard, [M, ...].
      key: random key; None in evaluation mode.
      numbers: the layer in every row of `stack`, negative for padding.
      num_chunks: chunks of layers.
      layers: (key, context) -> the scan over layers.
      head_loss: that of `layered`.
      totals: (result of the loss, whether its microbatch is the last) -> totals.
      vary: marks an array as differing over the manual axes.
      after: (sums of its layers' gradients, tree) -> the tree, which waits for them
        where platforms need it.
      saves_residuals: whether `forward` saves the layers' residuals instead of their
        input.
      in_place: as `TickLoop.in_place`.
      shares_vocabulary: whether all stages run embedding and head together.
    """

    layered: LayeredModel
    shared: Params
    stack: Params
    constants: Params
    batches: Any
    key: Key
    numbers: Array
    num_chunks: int
    layers: Callable[[Key, Any], LayerScan]
    head_loss: Callable[[Params, Any, Any, Key], LossResult]
    totals: Callable[[LossResult, Any], Totals]
    vary: Callable[[Array], Array]
    after: Callable[[Params, Any], Any]
    saves_residuals: bool
    in_place: bool
    shares_vocabulary: bool

    @property
    def _num_microbatches(self) -> int:
        return len(jax.tree.leaves(self.batches)[0])

    def _batch(self, microbatch: Array) -> Any:
        if self._num_microbatches == 1:
            return jax.tree.map(lambda x: x[0], self.batches)
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False),
            self.batches,
        )

    def _key(self, microbatch: Array) -> Key:
        """The key of a microbatch."""
        if self.key is None or self._num_microbatches == 1:
            return self.key
        return for_microbatch(self.key, microbatch, self._num_microbatches)

    @functools.cached_property
    def _shared_constants(self) -> Params:
        return self.layered.split(self.constants)[0]

    @property
    def _whole_shared(self) -> Params:
        return self._shared_constants | self.shared

    @functools.cached_property
    def _stack_constants(self) -> Params:
        return self.layered.split(self.constants)[1]

    def _layers(self, microbatch: Array) -> LayerScan:
        batch, key = self._batch(microbatch), self._key(microbatch)
        context = self.layered.context(self._whole_shared, batch, key)
        return self.layers(fold_key(key, LAYERS_KEY), context)

    def _rows(self, chunk: Array) -> Rows:
        if self.num_chunks == 1:
            return Rows(0, self.numbers)
        rows = len(self.numbers) // self.num_chunks
        start = chunk * rows
        return Rows(start, lax.dynamic_slice_in_dim(self.numbers, start, rows))

    def embed(self, microbatch: Array) -> Any:
        """The embedding of a microbatch: x, the input of the first chunk."""
        return self._embed(self.shared, microbatch)

    def _embed(self, shared: Params, microbatch: Array) -> Any:
        key = self._key(microbatch)
        shared = self._shared_constants | shared
        x = self.layered.embed(shared, self._batch(microbatch), key)
        stages = f"{PIPE}={lax.axis_size(PIPE)}"
        check_floating(x, f"{stages} sends what `embed` returns from stage to stage")
        return jax.tree.map(self.vary, x)

    def embed_backward(self, microbatch: Array, dx: Any, on: Array) -> Params:
        """The embedding's gradient of the shared weights, zeros unless `on`.

        Args:
          microbatch: the microbatch.
          dx: gradient of the embedding's output.
          on: whether this stage holds dx.
        """
        dx = jax.tree.map(lambda x: jnp.where(on, x, jnp.zeros_like(x)), dx)
        vjp = jax.vjp(lambda shared: self._embed(shared, microbatch), self.shared)[1]
        return vjp(dx)[0]

    def run(self, chunk: Array, microbatch: Array, x: Any) -> Any:
        """The output of a chunk; saves nothing."""
        layers = self._layers(microbatch)
        return layers.run(self.stack, self._stack_constants, x, self._rows(chunk))

    def saved(self, chunk: Array, microbatch: Array, x: Any) -> Any:
        """The values that the backward pass of a chunk needs."""
        return self._forward(chunk, microbatch, x)[1] if self.saves_residuals else x

    def forward(
        self, chunk: Array, microbatch: Array, x: Any, buffer: Any, slot: Array
    ) -> tuple[Any, Any]:
        """F: (the output of a chunk, the buffer with what `saved` gives in a slot)."""
        if not self.saves_residuals:
            return self.run(chunk, microbatch, x), put_slot(buffer, slot, x)
        if not self._is_written(buffer.layers):
            y, saved = self._forward(chunk, microbatch, x)
            return y, put_slot(buffer, slot, saved)
        own = Slot(buffer.layers, slot)
        y, residuals = self._forward(chunk, microbatch, x, own)
        kept = put_slot(buffer.kept, slot, residuals.kept)
        return y, Residuals(residuals.layers.buffer, kept)

    def in_slot(self, buffer: Any, slot: Array) -> Any:
        """The values that `forward` has put into a slot."""
        if not self.saves_residuals or not self._is_written(buffer.layers):
            return take_slot(buffer, slot)
        return Residuals(Slot(buffer.layers, slot), take_slot(buffer.kept, slot))

    def state_in_slot(self, buffer: Any, slot: Array) -> Any:
        """The state that `backward_input` has put into a slot."""
        written = self._is_written(buffer)
        return Slot(buffer, slot) if written else take_slot(buffer, slot)

    def _is_written(self, buffer: Saved | list[Saved]) -> bool:
        """Whether layers write into a buffer: without a loop each has own arrays."""
        return self.in_place and isinstance(buffer, Saved)

    def _forward(
        self, chunk: Array, microbatch: Array, x: Any, slot: Slot | None = None
    ) -> tuple[Any, Residuals]:
        layers, rows = self._layers(microbatch), self._rows(chunk)
        return layers.forward(self.stack, self._stack_constants, x, rows, slot)

    def _residuals(
        self, chunk: Array, microbatch: Array, saved: Any
    ) -> tuple[LayerScan, Residuals]:
        """The layers and their residuals, computed again if only x was saved."""
        layers = self._layers(microbatch)
        if self.saves_residuals:
            return layers, saved
        return layers, layers.forward(
            self.stack, self._stack_constants, saved, self._rows(chunk)
        )[1]

    def backward(
        self,
        chunk: Array,
        microbatch: Array,
        saved: Any,
        dy: Any,
        sums: Params,
        on: Array,
    ) -> tuple[Any, Params]:
        """B with W: (dx, sums with the weights' gradient added if `on`)."""
        layers, residuals = self._residuals(chunk, microbatch, saved)
        rows = self._rows(chunk)
        return layers.backward(
            self.stack, self._stack_constants, residuals, dy, rows, sums, on
        )

    def state(self, chunk: Array, microbatch: Array, saved: Any, dy: Any) -> Any:
        """The values that `backward_weights` of a chunk needs."""
        return self._backward_input(chunk, microbatch, saved, dy)[1]

    def backward_input(
        self,
        chunk: Array,
        microbatch: Array,
        saved: Any,
        dy: Any,
        buffer: Any,
        slot: Array,
    ) -> tuple[Any, Any]:
        """B where W is split off: (dx, the buffer with the state in a slot)."""
        args = chunk, microbatch, saved, dy
        if not self._is_written(buffer):
            dx, state = self._backward_input(*args)
            return dx, put_slot(buffer, slot, state)
        dx, own = self._backward_input(*args, Slot(buffer, slot))
        return dx, own.buffer

    def _backward_input(
        self,
        chunk: Array,
        microbatch: Array,
        saved: Any,
        dy: Any,
        slot: Slot | None = None,
    ) -> tuple[Any, Any]:
        layers, residuals = self._residuals(chunk, microbatch, saved)
        rows = self._rows(chunk)
        return layers.backward_input(
            self.stack, self._stack_constants, residuals, dy, rows, slot
        )

    def backward_weights(
        self, chunk: Array, state: Any, sums: Params, on: Array
    ) -> Params:
        """W: sums with the weights' gradient added if `on`."""
        # Key and context are not used: `state` holds those of its layers.
        layers, rows = self.layers(self.key, ()), self._rows(chunk)
        return layers.backward_weights(
            self.stack, self._stack_constants, state, rows, sums, on
        )

    def head(self, microbatch: Array, y: Any, on: Array) -> tuple[Totals, Any, Params]:
        """Head and loss: (totals, dy, gradient of the shared weights).

        Args:
          microbatch: the microbatch.
          y: output of the last chunk.
          on: whether this stage holds y; the backward pass starts there.
        """

        def loss(shared: Params, y: Any) -> tuple[Array, Totals]:
            totals = self._loss(shared, microbatch, y, on)
            return totals.loss, totals

        weighted, vjp, totals = jax.vjp(loss, self.shared, y, has_aux=True)
        start = jnp.where(on, 1.0, jnp.zeros_like(weighted))
        gradients = vjp(in_turn(weighted, start))  # Both passes may have loops.
        gradient, dy = jax.tree.map(lambda g: masked(totals.weight, g), gradients)
        return totals, dy, gradient

    def head_totals(self, microbatch: Array, y: Any, on: Array) -> Totals:
        """The totals of `head`, without gradients."""
        return self._loss(self.shared, microbatch, y, on)

    def _loss(self, shared: Params, microbatch: Array, y: Any, on: Array) -> Totals:
        if self.shares_vocabulary:
            masked = jax.tree.map(lambda y: jnp.where(on, y, jnp.zeros_like(y)), y)
            # The vjp adds gradients up over pipe here, and not inside the model.
            with purpose("vocab=pipe: input of the head"):
                y = jax.tree.map(lambda y: self.vary(sum_varying(y, PIPE)), masked)
        batch, key = self._batch(microbatch), self._key(microbatch)
        shared = self._shared_constants | shared
        is_last = microbatch == len(jax.tree.leaves(self.batches)[0]) - 1
        if not self.shares_vocabulary:
            return self.totals(self.head_loss(shared, y, batch, key), is_last)
        # What of the loss is the same on all stages meets what is not.
        with purpose("vocab=pipe: the loss"):
            return self.totals(self.head_loss(shared, y, batch, key), is_last)
