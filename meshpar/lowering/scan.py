"""The scan runner: all layers on every device, one microbatch after the other."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.fsdp.layer_scan import differentiable
from meshpar.fsdp.terms import LayerPass
from meshpar.lowering.runner import Runner
from meshpar.lowering.state import Metrics
from meshpar.models.layer_stack import Key, fold_key


@dataclasses.dataclass(frozen=True)
class ScanRunner(Runner):
    """Runs the loss and its gradient on one shard of the batch."""

    @property
    def layer_passes(self) -> list[LayerPass]:
        """Every pass over the layers in one step."""
        runs, depth = self.frame.layout.microbatches, self.frame.layered.depth
        return [LayerPass("forward", runs, depth), LayerPass("backward", runs, depth)]

    @property
    def sums_dtype(self) -> Any:
        """Float32 for sums over microbatches; one microbatch adds up nothing."""
        return jnp.float32 if self.frame.layout.microbatches > 1 else None

    def sums(self, params: Params, batch: Any, key: Array) -> tuple[Metrics, Params]:
        """Metrics and gradients summed over this shard's samples."""
        leaves, constants = self.zero.leaves(params)

        def gradients(batch: Any, key: Array) -> tuple[Metrics, Params]:
            def loss_fn(leaves: Params) -> tuple[Array, Metrics]:
                return self.frame.weigh(*self._loss(leaves, constants, batch, key))

            weighted, backward, metrics = jax.vjp(loss_fn, leaves, has_aux=True)
            return metrics, backward(jnp.ones_like(weighted))[0]

        with self.frame.scope():
            if self.frame.layout.microbatches == 1:
                return gradients(batch, key)
            return self._accumulate(gradients, batch, key)

    def _accumulate(
        self,
        gradients: Callable[[Any, Array], tuple[Metrics, Params]],
        batch: Any,
        key: Array,
    ) -> tuple[Metrics, Params]:
        """Sums of `gradients` over the microbatches, in float32."""
        num = self.frame.layout.microbatches
        batches = split_microbatches(batch, num)
        first = jax.tree.map(lambda x: x[0], batches)
        zeros = jax.tree.map(
            lambda x: self.frame.vary(jnp.zeros(x.shape, jnp.float32)),
            jax.eval_shape(gradients, first, key),
        )

        def body(sums: Any, m_batch: tuple[Array, Any]) -> tuple[Any, None]:
            new = gradients(m_batch[1], fold_key(key, m_batch[0]))
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new), None

        return lax.scan(body, zeros, (jnp.arange(num), batches))[0]

    def _loss(
        self, leaves: Params, constants: Params, batch: Any, key: Key
    ) -> tuple[Array, Metrics]:
        """The model's loss, with weights made whole as ZeRO says."""
        layered = self.frame.layered
        shared_constants, stack_constants = layered.split(constants)
        shared, stack = layered.split(leaves)

        def scan(_: Any, stack: Params, x: Any, key: Key, context: Any) -> Any:
            run = differentiable(self.zero.layers(key, context))
            return run(stack, stack_constants, jax.tree.map(self.frame.vary, x))

        shared = self.zero.shared(shared, shared_constants)
        return layered.loss({**self.frame.cast(shared), **stack}, batch, key, scan)
