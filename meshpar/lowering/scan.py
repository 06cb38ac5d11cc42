"""The scan runner: all layers on every device, one microbatch after the other."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.collectives.shard_keys import for_microbatch
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.differentiable_scan import Segment, differentiable
from meshpar.fsdp.late_weights import LateWeights
from meshpar.fsdp.terms import LayerPass
from meshpar.fsdp.zero import Zero
from meshpar.layouts import layer_uses
from meshpar.layouts.layer_uses import FEATURES, ROWS, Run
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held
from meshpar.lowering.row_layers import RowLayers
from meshpar.lowering.row_terms import bounded_exchanges, declared_weights
from meshpar.lowering.runner import Runner
from meshpar.lowering.totals import Totals
from meshpar.metrics import LossResult
from meshpar.models.layer_stack import LAYERS_KEY, Key, fold_key
from meshpar.models.row_dims import RowDims


@dataclasses.dataclass(frozen=True)
class ScanRunner(Runner):
    """Runs the loss and its gradient on one shard of the batch.

    Attributes:
      dims: where activations hold rows, for layers that split them over `tensor`.
    """

    dims: RowDims | None = None

    @property
    def copied_experts(self) -> int:
        """Bytes of a layer's experts, if they are gathered in an order of their own."""
        return self.frame.expert_bytes if self.zero.gathers_layers else 0

    @property
    def layer_passes(self) -> list[LayerPass]:
        """Every pass over the layers that split features, in one step."""
        return self._passes(FEATURES)

    @property
    def row_passes(self) -> list[LayerPass]:
        """Every pass over the layers that split rows over `tensor`."""
        return self._passes(ROWS)

    def _passes(self, use: str) -> list[LayerPass]:
        counts = [s.count for s, *_ in self._stack if s.use == use]
        runs, depth = self.frame.layout.microbatches, sum(counts)
        return [LayerPass(n, runs, depth, len(counts)) for n in ("forward", "backward")]

    @property
    def _stack(self) -> tuple[Run, ...]:
        layout = self.frame.layout
        return layer_uses.runs(layout.layers, layout.remat, self.frame.layered.depth)

    @functools.cached_property
    def row_zero(self) -> Zero:
        """The policy of the layers that split rows over `tensor`."""
        return self.frame.over_rows.zero()

    @property
    def sums_dtype(self) -> Any:
        """Float32 for sums over microbatches; one microbatch adds up nothing."""
        return jnp.float32 if self.frame.layout.microbatches > 1 else None

    def declared_row_moves(
        self, passes: Sequence[LayerPass]
    ) -> Iterator[DeclaredCollective]:
        """The formula of what layers move that split rows over `tensor`."""
        counts = [s.count for s, *_ in self._stack if s.use == ROWS]
        if counts:
            yield from declared_weights(self.frame, self.row_zero, passes, counts)

    def bounds(self, batch: Any) -> Iterator[DeclaredCollective]:
        """Collectives of a compiler between layers that split rows and others."""
        if self.dims is not None:
            changes = sum(run.num_changes for run in self._stack)
            yield from bounded_exchanges(self.frame, self.dims, changes, batch)

    def sums(self, params: Params, batch: Any, key: Array) -> tuple[Totals, Params]:
        """Totals and gradients summed over this shard's samples."""
        leaves, constants = self.zero.leaves(params)

        def gradients(
            batch: Any, key: Array, is_last: Any, sums: Params
        ) -> tuple[Totals, Params, Params]:
            """Totals, gradients, and the sums with those of their paths added."""
            trained = {path: x for path, x in leaves.items() if path not in sums}

            def loss_fn(trained: Params, sums: Params) -> tuple[Array, Totals]:
                result = self._loss(leaves | trained, constants, batch, key, sums)
                totals = self.frame.totals(result, is_last)
                return totals.loss, totals

            weighted, backward, totals = jax.vjp(loss_fn, trained, sums, has_aux=True)
            return totals, *backward(jnp.ones_like(weighted))

        with self.frame.scope():
            if self.frame.layout.microbatches == 1:
                return gradients(batch, key, True, {})[:2]
            return self._accumulate(gradients, leaves, batch, key)

    def _accumulate(
        self,
        gradients: Callable[[Any, Array, Any, Params], tuple[Totals, Params, Params]],
        leaves: Params,
        batch: Any,
        key: Array,
    ) -> tuple[Totals, Params]:
        """Sums of `gradients` over the microbatches, in float32."""
        num = self.frame.layout.microbatches
        batches = split_microbatches(batch, num)
        zeros = {p: jnp.zeros(x.shape, jnp.float32) for p, x in leaves.items()}
        sums = jax.tree.map(self.frame.vary, zeros)
        shared, stack = self.frame.layered.split(sums)
        first = jax.tree.map(lambda x: x[0], batches)
        key_of_first = for_microbatch(key, jnp.int32(0), num)
        totals, *_ = jax.eval_shape(gradients, first, key_of_first, True, stack)
        empty = jax.tree.map(self.frame.vary, totals.empty())

        def body(carry: Any, m_batch: tuple[Array, Any]) -> tuple[Any, None]:
            (total, shared, stack), (m, batch) = carry, m_batch
            args = batch, for_microbatch(key, m, num), m == num - 1, stack
            totals, new, stack = gradients(*args)
            shared = jax.tree.map(lambda a, b: a + b.astype(a.dtype), shared, new)
            return (total.added(totals), shared, stack), None

        carry = empty, shared, stack
        (totals, shared, stack), _ = lax.scan(body, carry, (jnp.arange(num), batches))
        return totals, shared | stack

    def held(self, traced: TracedLayer, held: Held) -> Held:
        """Bytes held all through a step; sums over microbatches are in float32.

        Gradients that are reduced once a step are whole until then.
        """
        plan = self.frame.plan
        if self.frame.layout.microbatches == 1:
            return held
        early = self.zero.reduces_early
        held_by = plan.gradients if early else plan.trained(plan.weights)
        shared = self.frame.layered.split(held_by)[0]  # Layers add theirs in place.
        gradients = sum(leaf.bytes_per_device for leaf in shared.values())
        sums = sum(
            leaf.bytes_per_device * 4 // jnp.dtype(leaf.dtype).itemsize
            for leaf in held_by.values()
        )
        return held._replace(gradients=gradients, sums=sums)

    def _segments(self, key: Key, context: Any) -> Iterator[Segment]:
        """The segments of the stack, as they run."""
        for (use, remat, count), enters, exits in self._stack:
            if use == FEATURES:
                layers = self.zero.layers(key, context, remat)
            else:
                args = self.frame, self.row_zero, remat, key, context, self.dims
                layers = RowLayers(*args, enters, exits)
            yield Segment(layers, count)

    def _loss(
        self, leaves: Params, constants: Params, batch: Any, key: Key, sums: Params
    ) -> LossResult:
        """The model's loss, with weights made whole as ZeRO says.

        Differentiated by sums of the stack's gradients, it adds to them in place.
        """
        layered = self.frame.layered
        shared_constants, stack_constants = layered.split(constants)
        shared, stack = layered.split(leaves)

        def unread() -> Params:
            def whole() -> Params:
                return self.frame.cast(self.zero.shared(shared, shared_constants))

            abstract = jax.eval_shape(whole)
            return {path: jnp.zeros(x.shape, x.dtype) for path, x in abstract.items()}

        late = LateWeights.of(
            self.zero,
            shared,
            lambda: layered.read_by_head_alone(unread(), batch, key),
        )
        whole = self.zero.shared(*late.split(shared, shared_constants))
        placeholders = unread() if late.leaves else {}
        params = placeholders | self.frame.cast(whole)
        x = layered.embed(params, batch, key)
        context = layered.context(params, batch, key)
        run = differentiable(*self._segments(fold_key(key, LAYERS_KEY), context))
        x = self.zero.after(whole, jax.tree.map(self.frame.vary, x))
        x, own = late.before_head(run(stack, stack_constants, x, sums or None), whole)
        return layered.head(params | self.frame.cast(own), x, batch, key)
