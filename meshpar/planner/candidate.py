"""Predicts memory, traffic and time of a layout, without compiling it."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jax.sharding import Mesh

from meshpar.compose import (
    LoweringArguments,
    combination,
    make_lowering,
    may_split_vocabulary,
)
from meshpar.contracts.declared import DeclaredCollective
from meshpar.errors import LayoutError
from meshpar.layouts.axes import PIPE
from meshpar.layouts.layer_uses import FEATURES, ROWS, splits_rows
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan
from meshpar.layouts.refusals.of_training import OF_TRAINING
from meshpar.layouts.refusals.reasons import first_reason
from meshpar.layouts.resolve import make_plan
from meshpar.lowering.chunked_update import offloaded_plan
from meshpar.lowering.layer_collectives import layers_terms
from meshpar.lowering.layer_trace import largest_weight, logits_ways
from meshpar.lowering.memory import Memory
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.mesh.machine import Machine
from meshpar.mesh.mesh import make_mesh
from meshpar.models.model import Model
from meshpar.models.model_checks import CheckedParts
from meshpar.models.row_dims import row_dims
from meshpar.once import Once
from meshpar.pipeline.layer_order import LayerOrder
from meshpar.pipeline.spec import PipelineSpec, make_spec
from meshpar.planner.facts import Facts
from meshpar.planner.layer_moves import LayerMoves
from meshpar.planner.seconds import Terms, step_seconds
from meshpar.planner.space import beside_layers
from meshpar.planner.transfers import Moved, Traffic, link
from meshpar.planner.uncertainty import Uncertainty, uncertainty_of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with its predicted memory, time and traffic.

    Attributes:
      layout: the layout.
      memory: bytes on one device at the peak of a step, predicted or compiled.
      seconds: time of a step, predicted, by term.
      wire_bytes: bytes that one device sends per step.
      uncertainty: of memory and time; None where nothing was compiled to tell, or the
        step itself was (`compiled`).
    """

    layout: Layout
    memory: Memory
    seconds: Terms
    wire_bytes: float
    uncertainty: Uncertainty | None

    @property
    def most_memory(self) -> float:
        """Bytes that the compiled program may need, as far as is known."""
        known = self.uncertainty
        return self.memory.total * (known.memory.high if known else 1.0)


class _Shared(NamedTuple):
    """Predictions that layouts share if they differ in `remat` alone.

    Attributes:
      lowering: of one of them.
      moved: what its collectives move, but for those inside layers.
      sends: activations and gradients that one stage sends in a step.
      largest: bytes of the largest weight outside the stack, on one device.
    """

    lowering: ShardMapLowering
    moved: Moved
    sends: int
    largest: int


class Candidates:
    """Predicts the layouts of one model on one machine."""

    def __init__(self, facts: Facts, machine: Machine):
        """Makes candidates.

        Args:
          facts: of the model.
          machine: that it trains on.
        """
        self.facts, self.machine = facts, machine
        self._meshes, self._plans, self._row_dims = Once(), Once(), Once()
        self._terms: dict[tuple, tuple[DeclaredCollective, ...]] = {}
        self._moves = LayerMoves(facts)
        self._exchanges: dict[tuple, Moved] = {}
        self._last: tuple[tuple, dict[bool, _Shared]] = (), {}

    def candidate(self, layout: Layout) -> Candidate:
        """Predicts the memory, time and traffic of a layout.

        Raises:
          LayoutError: devices, model or batch cannot honour it.
        """
        facts = self.facts
        if may_split_vocabulary(facts.model, layout) and facts.used.vocabulary:
            with contextlib.suppress(LayoutError):  # As `lower` does.
                return self.candidate(dataclasses.replace(layout, vocab=PIPE))
        layout.check_batch_size(facts.rows)
        shared = self._shared(layout)
        plan = shared.lowering.plan.of_layout(layout)
        # Its runner has the `remat` of another layout, which nothing here reads.
        lowering = dataclasses.replace(shared.lowering, plan=plan)
        rows = facts.rows / layout.num_token_shards / layout.microbatches
        traced = facts.layer(layout, rows, layout.tensor)
        ways = logits_ways(facts.layered, plan)
        logits = traced.logits * layout.tensor // ways
        traced = traced._replace(largest=shared.largest, logits=logits)
        one_way = facts.layer(layout, rows, 1).x
        host = tuple(lowering.host_transfers(None, traced))
        moved = shared.moved.plus(self._exchanged(lowering))
        traffic = Traffic(moved, host, one_way, shared.sends)
        memory = lowering.memory(None, traced=traced)
        seconds = step_seconds(
            lowering, facts, self.machine, rows, traced, traffic, memory
        ).slower(self.machine.slowdown)
        known = uncertainty_of(layout, self.machine)
        return Candidate(layout, memory, seconds, seconds.wire_bytes, known)

    def _shared(self, layout: Layout) -> _Shared:
        """The predictions that this layout shares with others that differ in `remat`.

        Each run of layers with one policy prefetches for itself: layouts that prefetch
        share nothing.
        """
        alone = layout.remat if layout.prefetch else ""
        key = beside_layers(layout), layout.layers, alone
        if key != self._last[0]:  # Layouts come in such an order that one is enough.
            self._last = key, {}
        found, saves = self._last[1], layout.pipe > 1 and layout.saves_residuals
        if saves not in found:
            combined = combination(self.facts.model, layout)
            if reason := first_reason(combined, OF_TRAINING):
                raise LayoutError(reason)
            if splits_rows(layout.layers):
                self._check_rows()
            lowering = self._lowering(layout)
            declared = self._declared(lowering)
            moved = self._moved(lowering, FEATURES, declared)
            runner = lowering.runner
            row_terms = runner.declared_row_moves(runner.row_passes)
            moved = moved.plus(self._moved(lowering, ROWS, row_terms))
            largest = largest_weight(self.facts.layered, lowering.plan)
            found[saves] = _Shared(lowering, moved, self._sends(lowering), largest)
        return found[saves]

    def _moved(
        self, lowering: ShardMapLowering, use: str, terms: Iterable[DeclaredCollective]
    ) -> Moved:
        """Sums over what collectives move."""
        return Moved.of(use, terms, functools.partial(link, lowering, self.machine))

    def _check_rows(self) -> None:
        """Refuses layers that split rows, if activations do not allow it."""
        model, why = self.facts.model, f"layers={ROWS}"
        args = model.layered, model.params, self.facts.batch, why
        self._row_dims.of((), lambda: row_dims(*args))

    def _lowering(self, layout: Layout) -> ShardMapLowering:
        """The lowering of a layout, of which nothing is traced."""
        facts, model = self.facts, self.facts.model
        spec, order = None, None
        if layout.pipe > 1:
            spec = make_spec(layout, facts.layered.depth)
            if spec.partition.moves:
                order = LayerOrder(spec.partition, facts.layered.prefix)
                model = order.stored(model)
        mesh = self._mesh(layout)
        plan = self._plan(layout, model, mesh, spec if order else None)
        optimizer, dtype = facts.optimizer_of(model), facts.compute_dtype
        parts = LoweringArguments(model, optimizer, plan, mesh, None, dtype)
        return make_lowering(ShardMapLowering.name, parts, spec, CheckedParts())

    def _mesh(self, layout: Layout) -> Mesh:
        """The mesh of a layout; layouts of the same sizes share it, or its refusal."""
        key = *layout.sizes.values(), layout.allow
        return self._meshes.of(key, lambda: make_mesh(layout, self.machine.devices))

    def _plan(
        self, layout: Layout, model: Model, mesh: Mesh, spec: PipelineSpec | None
    ) -> Plan:
        """The plan of a layout; layouts that shard alike share it, or its refusal."""
        chunks = spec.partition.sizes if spec else ()
        key = (*layout.sizes.values(), layout.zero_level, layout.vocab, chunks)
        key = *key, layout.params, layout.paths, layout.allow, layout.min_shard_size
        key = *key, layout.offload
        plan = self._plans.of(key, lambda: self._new_plan(layout, model, mesh))
        return plan.of_layout(layout)

    def _new_plan(self, layout: Layout, model: Model, mesh: Mesh) -> Plan:
        facts = self.facts
        optimizer, dtype = facts.optimizer_of(model), facts.compute_dtype
        plan = make_plan(layout, model.params, optimizer.abstract_state, dtype)
        if layout.offloaded:
            plan = offloaded_plan(plan, model, optimizer)
            for leaf in (*plan.parameters.values(), *plan.optimizer):
                leaf.sharding(mesh)  # Refuses devices that name no host memory.
        return plan

    def _declared(self, lowering: ShardMapLowering) -> Iterator[DeclaredCollective]:
        """Collectives of a step by formula, without those of matmuls over `tensor`."""
        layout, passes = lowering.layout, lowering.runner.layer_passes
        if lowering.frame.manual_axes:
            own = lowering.runner.declared_reductions()
            key = id(lowering.plan.weights), *passes, layout.microbatches
            key = *key, layout.prefetch
            if own is None and key not in self._terms:
                self._terms[key] = tuple(lowering.declared_state_moves(passes))
            yield from self._terms[key] if own is None else own
        yield from lowering.owners_terms()

    def _exchanged(self, lowering: ShardMapLowering) -> Moved:
        """Sums over the collectives inside layers, along which tokens are exchanged."""
        layout, passes = lowering.layout, lowering.runner.layer_passes
        if layout.expert == 1 and layout.context == 1:
            return Moved()
        of_policy = functools.partial(self._moves.of, layout)
        key = self._moves.depend_on(layout), tuple(passes), layout.layers, layout.remat
        if self.machine.num_slices > 1:
            key = *key, *layout.sizes.values()  # Links depend on them.
        if key not in self._exchanges:
            terms = layers_terms(layout, passes, of_policy)
            self._exchanges[key] = self._moved(lowering, FEATURES, terms)
        return self._exchanges[key]

    def _sends(self, lowering: ShardMapLowering) -> int:
        """Number of activations and gradients that one stage sends in a step."""
        if lowering.layout.pipe == 1:
            return 0
        loop = lowering.runner.loop
        return loop.num_activation_sends + loop.num_gradient_sends
