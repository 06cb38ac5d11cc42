"""What one stage of a pipeline does in a tick: its F, B and W, embedding and head."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.varying import sum_varying
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.saved import Saved
from meshpar.models.layer_stack import Key, LayeredModel, fold_key
from meshpar.pipeline.buffers import AXIS


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineStage:
    """One stage inside shard_map; chunks and microbatches are int32 scalars.

    Noise follows from key, microbatch and layer, as without a pipeline.

    Attributes:
      layered: the model.
      shared: whole weights of embedding and head, or this stage's slice of them.
      stack: leaves of its layers, {path: [chunks * rows, ...]}.
      batches: its microbatches, [M, ...].
      key: random key; None in evaluation mode.
      numbers: the layer in every row of `stack`, negative for padding.
      num_chunks: chunks of layers.
      layers: key -> the scan over layers with that key.
      weigh: (loss, aux) -> (loss times its weight, metrics in that unit).
      vary: marks an array as differing over the manual axes.
      residuals: whether `forward` keeps the layers' residuals, and not their input.
      shares_vocabulary: whether all stages run embedding and head together.
    """

    layered: LayeredModel
    shared: Params
    stack: Params
    batches: Any
    key: Key
    numbers: Array
    num_chunks: int
    layers: Callable[[Key], LayerScan]
    weigh: Callable[[Array, Params], tuple[Array, Params]]
    vary: Callable[[Array], Array]
    residuals: bool
    shares_vocabulary: bool

    def _batch(self, microbatch: Array) -> Any:
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False),
            self.batches,
        )

    def _key(self, microbatch: Array, part: int) -> Key:
        """The key of embedding (0), layers (1) or head (2)."""
        num = len(jax.tree.leaves(self.batches)[0])
        key = fold_key(self.key, microbatch) if num > 1 else self.key
        return fold_key(key, part)

    def _layers(self, microbatch: Array) -> LayerScan:
        return self.layers(self._key(microbatch, 1))

    def _rows(self, chunk: Array) -> tuple[Any, Array]:
        if self.num_chunks == 1:
            return 0, self.numbers
        rows = len(self.numbers) // self.num_chunks
        start = chunk * rows
        return start, lax.dynamic_slice_in_dim(self.numbers, start, rows)

    def embed(self, microbatch: Array) -> Any:
        """X, what the first chunk reads."""
        return self._embed(self.shared, microbatch)

    def _embed(self, shared: Params, microbatch: Array) -> Any:
        key = self._key(microbatch, 0)
        x = self.layered.embed(shared, self._batch(microbatch), key)
        return jax.tree.map(self.vary, x)

    def embed_backward(self, microbatch: Array, dx: Any, on: Array) -> Params:
        """Gradient of the shared weights from that of x, on the stage that has it."""
        dx = jax.tree.map(lambda x: jnp.where(on, x, jnp.zeros_like(x)), dx)
        back = jax.vjp(lambda shared: self._embed(shared, microbatch), self.shared)[1]
        return back(dx)[0]

    def run(self, chunk: Array, microbatch: Array, x: Any) -> Any:
        """The output of a chunk, keeping nothing."""
        layers = self._layers(microbatch)
        return layers.run(self.stack, {}, x, self._rows(chunk))

    def forward(self, chunk: Array, microbatch: Array, x: Any) -> tuple[Any, Any]:
        """The output of a chunk, and what its backward pass needs."""
        if not self.residuals:
            return self.run(chunk, microbatch, x), x
        layers = self._layers(microbatch)
        return layers.forward(self.stack, {}, x, self._rows(chunk))

    def _again(
        self, chunk: Array, microbatch: Array, kept: Any
    ) -> tuple[LayerScan, Saved]:
        """The layers and their residuals, computed again if only x was saved."""
        if self.residuals:
            return self.layers(self.key), kept
        layers = self._layers(microbatch)
        return layers, layers.forward(self.stack, {}, kept, self._rows(chunk))[1]

    def backward(
        self, chunk: Array, microbatch: Array, kept: Any, dy: Any, sums: Params, on: Any
    ) -> tuple[Any, Params]:
        """Dx, and sums with the gradient of the weights added where `on`."""
        layers, kept = self._again(chunk, microbatch, kept)
        rows = self._rows(chunk)
        return layers.backward(self.stack, {}, kept, dy, rows, sums, on)

    def backward_input(
        self, chunk: Array, microbatch: Array, kept: Any, dy: Any
    ) -> tuple[Any, Saved]:
        """The first part of `backward` (B): dx, and the state that `weights` needs."""
        layers, kept = self._again(chunk, microbatch, kept)
        rows = self._rows(chunk)
        return layers.backward_input(self.stack, {}, kept, dy, rows)

    def weights(self, chunk: Array, state: Saved, sums: Params, on: Array) -> Params:
        """The second part of `backward` (W): the sums."""
        layers, rows = self.layers(self.key), self._rows(chunk)
        return layers.backward_weights(self.stack, {}, state, rows, sums, on)

    def head(self, microbatch: Array, y: Any, on: Array) -> tuple[Params, Any, Params]:
        """(metrics, dy, gradient of the shared weights), on the stage that has y."""

        def loss(shared: Params, y: Any) -> tuple[Array, Params]:
            return self._loss(shared, microbatch, y, on)

        weighted, back, metrics = jax.vjp(loss, self.shared, y, has_aux=True)
        gradient, dy = back(jnp.where(on, 1.0, jnp.zeros_like(weighted)))
        return metrics, dy, gradient

    def head_metrics(self, microbatch: Array, y: Any, on: Array) -> Params:
        """The metrics of `head` alone."""
        return self._loss(self.shared, microbatch, y, on)[1]

    def _loss(
        self, shared: Params, microbatch: Array, y: Any, on: Array
    ) -> tuple[Array, Params]:
        if self.shares_vocabulary:
            mine = jax.tree.map(lambda y: jnp.where(on, y, jnp.zeros_like(y)), y)
            y = jax.tree.map(lambda y: sum_varying(y, AXIS), mine)
        batch, key = self._batch(microbatch), self._key(microbatch, 2)
        return self.weigh(*self.layered.head_loss(shared, y, batch, key))
