"""The shard_map lowering: one shard_map, manual over the batch axes; we write the rest.

Every reduction over the batch axes is written here or in `fsdp`, so that the number and
bytes of collectives are known before compiling; `tensor` stays automatic inside. The
lowering is a frame (`frame`), a ZeRO policy (`fsdp.zero`) and a runner (`runner`).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.contracts.collective import Collective
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.formula import formula_violations, without_purpose
from meshpar.contracts.host_transfers import HostTransfer
from meshpar.contracts.written import WrittenCollective, written_terms
from meshpar.fsdp.gather import all_reduce_grads
from meshpar.fsdp.terms import (
    LayerPass,
    declare_all_reduces,
    declared_gathers,
    declared_scatters,
)
from meshpar.fsdp.zero import Zero
from meshpar.layouts.axes import TENSOR
from meshpar.layouts.layer_uses import splits_rows
from meshpar.layouts.offload import ACTIVATIONS
from meshpar.layouts.refusals.combination import SHARD_MAP
from meshpar.layouts.remat import repeated_share
from meshpar.lowering.automatic_axes import declared_bounds
from meshpar.lowering.base import Lowering
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_trace import TracedLayer, trace_layer, whole_bytes
from meshpar.lowering.matrix_owners import FROM_OWNERS, TO_OWNERS, OwnedUpdate
from meshpar.lowering.memory import Held
from meshpar.lowering.runner import Runner
from meshpar.lowering.state import TrainState
from meshpar.lowering.totals import Gradients, Totals


@dataclasses.dataclass(frozen=True)
class ShardMapLowering(Lowering):
    """Writes every collective over the batch axes; for models with layers.

    Attributes:
      runner: how the layers run; holds the frame and the ZeRO policy.
    """

    name = SHARD_MAP
    types_replicas = orders_collectives = True

    runner: Runner

    @property
    def frame(self) -> Frame:
        """Manual axes, specs, keys, sums and means."""
        return self.runner.frame

    @property
    def token_order(self) -> str:
        """The order in which batches have the tokens of sequences."""
        return self.layout.token_order

    @property
    def zero(self) -> Zero:
        """When weights are whole and gradients are reduced."""
        return self.runner.zero

    # The functions of a step.

    def gradients(self, state: TrainState, batch: Any) -> Gradients:
        """Totals of the batch and its gradients, before clipping."""
        totals, sums, extra = self.gradient_sums(state, batch)
        return Gradients(totals, self.mean_gradients(sums, totals), extra)

    def gradient_sums(self, state: TrainState, batch: Any) -> Gradients:
        """`gradients` before `mean_gradients`, in the dtype of the backward pass."""
        out_specs = PartitionSpec(), self.plan.trained(self.frame.specs)
        mapped = self.frame.mapped(self._sums, batch, out_specs)
        totals, grads = mapped(state.params, state.key(), batch)
        return Gradients(totals, grads, {})  # Models with layers keep no state.

    def _sums(self, params: Params, key: Array, batch: Any) -> tuple[Totals, Params]:
        """`gradient_sums` on one shard of the batch."""
        totals, grads = self.runner.sums(
            params, batch, self.frame.shard_key(key, batch)
        )
        shared, stack = self.frame.layered.split(grads)
        totals, shared = self.zero.after(stack, (totals, shared))
        grads = {**shared, **stack}
        totals = self.frame.over_devices(totals)
        if self.zero.transports.widens:
            grads = {path: x.astype(jnp.float32) for path, x in grads.items()}
        numbers = {str(i): x for i, x in enumerate(jax.tree.leaves(totals))}
        grads = self.zero.scattered(grads, numbers)
        return totals, all_reduce_grads(grads, self.zero.shardings)

    def mean_gradients(self, sums: Params, totals: Totals) -> Params:
        """Gradients of the batch's mean loss from sums over its samples."""
        # A compiler may divide, or multiply by the reciprocal: this leaves no choice.
        scale = 1 / totals.nonzero_divisor
        return {
            path: (x.astype(jnp.float32) * scale).astype(
                self.plan.parameters[path].dtype
            )
            for path, x in sums.items()
        }

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Totals]:
        """One step of the optimizer; adds grad_norm."""
        if self.runner.trains:
            return self.runner.train_step(state, batch)
        return super().train_step(state, batch)

    def evaluate(self, params: Params, batch: Any) -> Totals:
        """Totals of the batch in evaluation mode."""
        if not self.runner.evaluates:
            return super().evaluate(params, batch)

        def shard(params: Params, _: Array, batch: Any) -> Totals:
            return self.runner.evaluate(params, batch)

        mapped = self.frame.mapped(shard, batch, PartitionSpec())
        return mapped(params, jax.random.key(0), batch)

    # Facts about a step, known before it is compiled.

    @property
    def reason_not_equal(self) -> str:
        """Why the steps differ from one device on purpose; "" if they are equal."""
        return self.runner.reason_not_equal

    def bounds(
        self, batch: Any, written: Sequence[DeclaredCollective]
    ) -> Iterator[DeclaredCollective]:
        """The most that compilers add: over axes that stay automatic inside."""
        yield from super().bounds(batch, written)
        passes = self.runner.layer_passes
        yield from declared_bounds(self.frame, batch, passes, written)
        yield from self.runner.bounds(batch)

    def formula(self) -> Iterator[DeclaredCollective]:
        """Collectives of weights and gradients, by the layout alone."""
        runner = self.runner
        if self.frame.manual_axes:
            own, passes = runner.declared_reductions(), runner.layer_passes
            yield from self.declared_state_moves(passes) if own is None else own
        yield from runner.declared_row_moves(runner.row_passes)
        yield from self.owners_terms()

    @functools.cached_property
    def owned_update(self) -> OwnedUpdate | None:
        """The update at owners of matrices; None if the runner updates weights."""
        return None if self.runner.trains else super().owned_update

    def formula_violations(self, written: Sequence[WrittenCollective]) -> list[str]:
        """Differences between written traffic of weights and gradients and `formula`.

        What gives no purpose is in no formula.
        """
        purposes = *self.runner.purposes, TO_OWNERS, FROM_OWNERS
        own = [x for x in written if x.why.startswith(purposes)]
        lines = formula_violations(written_terms(own), self.formula())
        return [*lines, *without_purpose(written)]

    def host_transfers(
        self, batch: Any, traced: TracedLayer | None = None
    ) -> Iterator[HostTransfer]:
        """Transfers between one device and host memory in one training step.

        Args:
          batch: abstract batch of one replica.
          traced: of one layer, if it was traced before.
        """
        yield from super().host_transfers(batch)
        if ACTIVATIONS in self.layout.offloaded:
            layered, runs = self.model.layered, self.layout.microbatches
            if traced is None:
                traced = trace_layer(layered, self.plan, self.mesh, batch)
            size = runs * layered.depth * traced.saved
            why = "activations of the layers, as traced"
            yield HostTransfer(why, size, size, bound=True)
        if self.zero.streams:
            depth, plans = self.model.layered.depth, self.plan.parameters
            whole = sum(plans[path].bytes_per_device for path in self.zero.on_host)
            # The last layer of a scan fetches the first one's weights again.
            ahead = sum(plans[path].bytes_per_device for path in self.zero.prefetched)
            again = ahead // depth
            for run in self.runner.layer_passes:
                size = run.runs * (whole + run.scans * again)
                yield HostTransfer(f"weights layer by layer, {run.name}", size, 0)

    def declared_state_moves(
        self, passes: list[LayerPass]
    ) -> Iterator[DeclaredCollective]:
        """The formula of what ZeRO moves: weights gathered, gradients reduced.

        Args:
          passes: those over the layers.
        """
        frame, zero, sizes = self.frame, self.zero, self.mesh.shape
        trained, dtype = self.plan.trained, self.runner.sums_dtype
        weights, sums = frame.stage_weights(), frame.stage_weights(dtype)
        yield from declared_gathers(zero, weights, sizes, passes)
        gradients = trained(weights), trained(sums)
        yield from declared_scatters(zero, *gradients, sizes, passes)
        key = "declared all_reduces", dtype
        yield from frame.of_leaves(key, lambda: [*self._replicated_gradients(dtype)])

    def _replicated_gradients(self, dtype: Any) -> Iterator[DeclaredCollective]:
        """Declares the all_reduces of gradients of a dtype."""
        why = "gradients, over the axes that replicate the tensor"
        shards = self.plan.trained(self.frame.stage_shards(dtype))
        yield from declare_all_reduces(
            shards, self.zero.shardings, self.mesh.shape, why
        )

    def held(self, traced: TracedLayer) -> Held:
        """Bytes held all through a step, from one traced layer."""
        held = super().held(traced)
        if self.zero.casts_layers or self.zero.streams or not self.zero.loops:
            shared = self.model.layered.split(self.plan.weights)[0]
            copies = sum(leaf.bytes_per_device for leaf in shared.values())
            held = held._replace(weights=copies)
        if not self.zero.loops:
            depth, remat = self.model.layered.depth, self.layout.remat
            repeats, fused = repeated_share(remat, depth) > 0, depth * traced.fused
            held = held._replace(loops=False, repeats=repeats, activations=fused)
        if self.zero.gathers_layers:
            stack = self.model.layered.split(self.plan.weights)[1].values()
            rows = splits_rows(self.layout.layers)
            sizes = self.layout.sizes | ({TENSOR: 1} if rows else {})
            whole = sum(whole_bytes(leaf, sizes) for leaf in stack)
            layer = whole // self.model.layered.depth
            held = held._replace(gathers_head=True, layer=layer, over_rows=rows)
        return self.runner.held(traced, held)

    def report(self, batch: Any) -> dict[str, Any]:
        """Sections of a report by name."""

        def trace() -> TracedLayer:
            return trace_layer(self.model.layered, self.plan, self.mesh, batch)

        return self.runner.report(trace)

    @property
    def may_deadlock(self) -> bool:
        """Whether compiled programs have to pass `check_compiled` before they run."""
        return self.runner.may_deadlock

    def check_compiled(self, collectives: list[Collective]) -> None:
        """Raises MeshparError if the compiled step must not run."""
        self.runner.check_compiled(collectives)
