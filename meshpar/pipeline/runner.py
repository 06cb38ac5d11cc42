"""The pipeline runner: layers split over stages, run tick by tick inside shard_map.

The stack of layers is split over `pipe`. Embedding and head run on the first and the
last stage, or on all stages, each with a slice of the vocabulary. Layers, gathers and
reductions are those of other programs; the executor runs them as scheduled.

    zero=1, 2   weights gathered once per step, gradients reduced once per step
    zero=3      weights gathered and gradients reduced in every tick that uses them
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.contracts.collective import Collective
from meshpar.errors import MeshparError
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.terms import WEIGHTS, LayerPass
from meshpar.layouts.axes import PIPE
from meshpar.layouts.layout import Layout
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held
from meshpar.lowering.runner import Runner
from meshpar.lowering.totals import Totals
from meshpar.models.layer_stack import Key
from meshpar.pipeline import stage_memory
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.phases import TickLoop
from meshpar.pipeline.pipe_sharding import check_context, check_parameters, checked_loss
from meshpar.pipeline.report import PipelineReport, pipeline_report
from meshpar.pipeline.spec import PipelineSpec
from meshpar.pipeline.stage import PipelineStage


class StageWeights(NamedTuple):
    """The weights of one stage on one device.

    Attributes:
      shared: whole weights of embedding and head, or this stage's slice of them.
      stack: leaves of its layers.
      constants: entries of both that are not trained.
    """

    shared: Params
    stack: Params
    constants: Params


@dataclasses.dataclass(frozen=True)
class PipelineRunner(Runner):
    """Runs the stages of a pipeline.

    Attributes:
      spec: schedule and partition.

    Raises:
      LayoutError: `pipe` splits parameters in a way that a pipeline cannot run.
    """

    stage_axes: ClassVar[tuple[str, ...]] = (PIPE,)

    spec: PipelineSpec

    def __post_init__(self):
        check_parameters(self.frame.layered, self.frame.plan)

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.frame.layout

    @property
    def saves_residuals(self) -> bool:
        """Whether stages keep their layers' residuals, and not their inputs alone."""
        return self.layout.saves_residuals and not self.spec.schedule.asynchronous

    @functools.cached_property
    def loop(self) -> TickLoop:
        """The schedule's ticks, by phases."""
        uniform = self.layout.tick_loop == "uniform"
        return TickLoop(self.spec.tables, uniform)

    @functools.cached_property
    def executor(self) -> Executor:
        """Runs the ticks."""
        return Executor(
            loop=self.loop,
            evaluation=TickLoop(self.spec.evaluation_tables),
            num_stages=self.spec.schedule.num_stages,
            wraps=self.spec.schedule.num_chunks > 1 and not self.spec.schedule.folded,
            vary=self.frame.vary,
            shares_vocabulary=self.layout.splits_vocabulary,
        )

    @functools.cached_property
    def layer_passes(self) -> list[LayerPass]:
        """Every pass over one stage's layers in one step.

        A pass runs in every tick in which some stage needs it. With tick_loop=uniform
        every tick counts, as a compiled program does not say how often it takes a
        conditional.
        """
        rows = self.spec.partition.rows
        counts = map(self.loop.count_ticks, ("forward", "backward", "weight"))
        forward, backward, weight = counts
        recompute = [LayerPass("forward again", backward, rows)]
        split = LayerPass(WEIGHTS, weight, rows)
        return [
            LayerPass("forward", forward, rows),
            *([] if self.saves_residuals else recompute),
            LayerPass("backward", backward, rows),
            *([split] if weight else []),
        ]

    def lasting_runs(self, run: LayerPass) -> float:
        """Runs of a pass that take as long as its ticks.

        Stages that run different operations in a tick wait for the bubble alone.
        """
        if not self.loop.divergent:
            return run.runs
        schedule = self.spec.schedule
        busy = schedule.num_microbatches * schedule.num_chunks
        return busy / (1 - self.spec.bubble)

    @property
    def sums_dtype(self) -> Any:
        """Float32, as gradients are summed over the ticks."""
        return jnp.float32

    def sums(self, params: Params, batch: Any, key: Array) -> tuple[Totals, Params]:
        """Totals and gradients summed over this shard's samples, inside shard_map."""
        with self.frame.scope():
            weights = self.weights(params)
            stage = self.stage(*weights, batch, key)
            zeros = (
                {
                    path: self.frame.vary(jnp.zeros(x.shape, jnp.float32))
                    for path, x in tree.items()
                }
                for tree in (weights.stack, weights.shared)
            )
            sums = self.executor.train(stage, *zeros)
        return sums.totals, {**sums.shared, **sums.stack}

    @property
    def evaluates(self) -> bool:
        """True: no device holds the whole model, so stages evaluate it together."""
        return True

    def evaluate(self, params: Params, batch: Any) -> Totals:
        """Totals of the whole batch in evaluation mode, inside shard_map."""
        with self.frame.scope():
            stage = self.stage(*self.weights(params), batch, None)
            return self.frame.over_devices(self.executor.evaluate(stage))

    def weights(self, params: Params) -> StageWeights:
        """The weights of this device's stage, from its shards of all parameters."""
        split = self.frame.layered.split
        (shared, stack), (shared_constants, stack_constants) = map(
            split, self.zero.leaves(params)
        )
        whole = self.frame.cast(self.zero.gathered_shared(shared | shared_constants))
        return StageWeights(
            {path: whole[path] for path in shared},
            stack,
            {path: whole[path] for path in shared_constants} | stack_constants,
        )

    def stage(
        self,
        shared: Params,
        stack: Params,
        constants: Params,
        batch: Any,
        key: Key,
    ) -> PipelineStage:
        """This device's stage.

        Args:
          shared: as in `StageWeights`.
          stack: as in `StageWeights`.
          constants: as in `StageWeights`.
          batch: this device's part of the batch.
          key: random key; None evaluates.
        """
        partition, layout = self.spec.partition, self.layout
        layered, head_loss = self.frame.layered, self.frame.layered.head_loss
        if layout.splits_vocabulary:
            check_context(layered, self.frame.plan, {**shared, **constants}, batch)
            head_loss = functools.partial(checked_loss, self.frame.plan, head_loss)
        numbers = jnp.asarray(partition.order).reshape(partition.num_stages, -1)
        return PipelineStage(
            layered=layered,
            shared=shared,
            stack=stack,
            constants=constants,
            batches=split_microbatches(batch, layout.microbatches),
            key=key,
            numbers=self.frame.vary(numbers[lax.axis_index(PIPE)]),
            num_chunks=partition.num_chunks,
            layers=self._layers,
            head_loss=head_loss,
            totals=self.frame.totals,
            vary=self.frame.vary,
            after=self.zero.after,
            saves_residuals=self.saves_residuals,
            in_place=self.loop.in_place,
            shares_vocabulary=layout.splits_vocabulary,
        )

    def _layers(self, key: Key, context: Any) -> LayerScan:
        layers = self.zero.layers(key, context, self.layout.remat)
        order = self.spec.partition.order
        return dataclasses.replace(layers, padded=bool((order < 0).any()))

    def held(self, traced: TracedLayer, held: Held) -> Held:
        """Bytes on one device held through the whole step."""
        # A stage's weights were divided by the depth of the whole stack.
        layer = held.layer * self.layout.pipe
        saved, rows = self.saved_bytes(traced), self.spec.partition.rows
        if not self.saves_residuals:
            buffers = stage_memory.backward_buffers(self.frame, self.zero, self.loop)
            saved += buffers * rows * traced.saved
        return self._held._replace(activations=saved, layer=layer)

    @functools.cached_property
    def _held(self) -> Held:
        """Bytes held in all steps, but for activations and a gathered layer."""
        return stage_memory.held(self.frame, self.zero, self.loop)

    @property
    def copied_experts(self) -> int:
        """Bytes of a layer's experts, which ticks copy for kernels."""
        return self.frame.expert_bytes

    def saved_bytes(self, traced: TracedLayer, extra: int = 0) -> int:
        """Bytes on one device saved between forward and backward passes.

        Args:
          traced: sizes of one layer.
          extra: bytes saved beside each stage input.
        """
        rows, tables = self.spec.partition.rows, self.loop.tables
        per_slot = rows * traced.saved if self.saves_residuals else traced.x
        return stage_memory.buffer_bytes(tables, traced, rows, per_slot + extra)

    def report(self, trace: Callable[[], TracedLayer]) -> dict[str, PipelineReport]:
        """The schedule, and the bytes that stages save."""
        saved = self.saved_bytes(trace())
        return {"pipeline": pipeline_report(self.spec, self.loop, saved)}

    @property
    def may_deadlock(self) -> bool:
        """Whether each stage takes conditionals of its own."""
        return self.loop.divergent

    def check_compiled(self, collectives: list[Collective]) -> None:
        """Refuses collectives under conditionals that differ between stages.

        Raises:
          MeshparError: there is one; some stages would wait in it forever.
        """
        if not self.may_deadlock:
            return
        places = {f"{c.kind} at {c.source}" for c in collectives if c.conditional}
        if places:
            raise MeshparError(
                f"schedule={self.spec.schedule.name}: the compiler put collectives "
                "under conditionals that only some stages take "
                f"({', '.join(sorted(places))}), which deadlocks; use "
                "tick_loop=uniform, with which all stages run together, or "
                "schedule=1f1b"
            )
