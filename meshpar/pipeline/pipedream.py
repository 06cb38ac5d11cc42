"""PipeDream: asynchronous 1F1B with weight stashing, a staleness mode of pipelines.

Every microbatch is a minibatch of its own. A stage updates its weights after each
backward pass and does not wait for the others, so a minibatch passes through weights of
different ages. Forward and backward pass of a minibatch use the same weights on each
stage (weight stashing), but weights of different ages on different stages (no vertical
sync). On stage p of P the weights lag 2(P-1-p) updates behind, because F and B share a
tick; with one operation per tick they would lag P-1-p. A training step runs M
minibatches and then drains.

Source: Narayanan et al., PipeDream, arXiv:1806.03377, sections 3.2 and 3.3.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params, abstract, num_bytes
from meshpar.contracts.declared import DeclaredCollective
from meshpar.errors import LayoutError
from meshpar.fsdp.terms import LayerPass, local_shape
from meshpar.jaxprs.reach import Reach
from meshpar.jaxprs.straight_line import used_inputs
from meshpar.layouts.axes import PIPE, TENSOR
from meshpar.layouts.plan import LeafPlan
from meshpar.lowering.batches import batch_specs
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.layer_update import MODEL
from meshpar.lowering.memory import Held
from meshpar.lowering.optimizer import Optimizer
from meshpar.lowering.runner import Runner
from meshpar.lowering.state import TrainState
from meshpar.lowering.totals import Totals
from meshpar.pipeline.asynchronous import AsynchronousStep
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.report import pipeline_report
from meshpar.pipeline.runner import PipelineRunner
from meshpar.schedules.ticks import Phase


def _reason_beyond_stage(reach: Reach, stack: Collection[str]) -> str:
    """Why an optimizer needs more than one stage has; "" if it does not."""
    if reach.crossed:
        return f"its update of {min(reach.crossed)} depends on other tensors"
    if mixed := reach.mixed.intersection(stack):
        return f"its update of {min(mixed)} depends on all layers of the stack"
    if reach.positional:
        return "it draws random numbers, which would be the same on all stages"
    if reach.uses_loss:
        return "it uses the loss, which only the last stage knows"
    return ""


@dataclasses.dataclass(frozen=True)
class PipeDreamRunner(Runner):
    """Trains the stages of an asynchronous pipeline.

    Attributes:
      pipeline: the stages and their executor.
      optimizer: updates the weights of each stage after each backward pass.

    Raises:
      LayoutError: a rule splits weights over data, or the optimizer looks beyond one
        stage.
    """

    pipeline: PipelineRunner
    optimizer: Optimizer

    def __post_init__(self):
        name, plan = self.pipeline.spec.schedule.name, self.frame.plan
        if split := [path for path, s in self.zero.shardings.items() if s.splits]:
            raise LayoutError(
                f"schedule={name} updates every stage by itself, with whole weights, "
                f"but a rule splits {split[0]} over data: remove that rule"
            )
        for leaf in plan.optimizer:
            if self._is_stacked(leaf) and leaf.spec[:1] != ((PIPE,),):
                raise LayoutError(
                    f"schedule={name}: the optimizer keeps {leaf.path} {leaf.shape}, "
                    "which belongs to several stages; use an elementwise optimizer"
                )
        if self.optimizer.layers == MODEL:
            raise LayoutError(
                f"schedule={name} runs the optimizer on each stage by itself, and it "
                "treats layers differently (labels, masks or rates by layer); use "
                "schedule=1f1b"
            )
        stack = self.frame.layered.split(plan.parameters)[1]
        if reason := _reason_beyond_stage(self.optimizer.reach, stack):
            raise LayoutError(
                f"schedule={name} runs the optimizer on each stage by itself, and "
                f"{reason}; use an elementwise optimizer, or schedule=1f1b"
            )

    @classmethod
    def of(cls, pipeline: PipelineRunner, optimizer: Optimizer) -> "PipeDreamRunner":
        """The runner that trains the stages of a pipeline."""
        return cls(pipeline.frame, pipeline.zero, pipeline, optimizer)

    def _is_stacked(self, leaf: LeafPlan) -> bool:
        """Whether a leaf of the optimizer state belongs to the stack of layers."""
        stack = self.frame.layered.split(self.frame.plan.parameters)[1]
        return any(f"['{path}']" in leaf.path for path in stack)

    @functools.cached_property
    def executor(self) -> Executor:
        """Runs the ticks of the schedule, each with all operations."""
        executor, ticks = self.pipeline.executor, self.pipeline.spec.schedule.num_ticks
        phase = Phase(0, ticks, True, True, False, True)
        tables = dataclasses.replace(executor.loop.tables, phases=(phase,))
        loop = dataclasses.replace(executor.loop, tables=tables)
        return dataclasses.replace(executor, loop=loop)

    @property
    def layer_passes(self) -> list[LayerPass]:
        """Every pass over one stage's layers in one step; each runs in all ticks."""
        spec = self.pipeline.spec
        ticks, rows = spec.schedule.num_ticks, spec.partition.rows
        names = "forward", "forward again", "backward"
        return [LayerPass(name, ticks, rows) for name in names]

    @property
    def sums_dtype(self) -> Any:
        """Float32, as in a synchronous pipeline."""
        return self.pipeline.sums_dtype

    def sums(self, params: Params, batch: Any, key: Array) -> tuple[Totals, Params]:
        """Totals and gradients at the given weights, without updates."""
        return self.pipeline.sums(params, batch, key)

    @property
    def evaluates(self) -> bool:
        """True: no device holds the whole model, so stages evaluate it together."""
        return True

    def evaluate(self, params: Params, batch: Any) -> Totals:
        """Totals of the whole batch in evaluation mode, inside shard_map."""
        return self.pipeline.evaluate(params, batch)

    @property
    def trains(self) -> bool:
        """True: weights change within a step."""
        return True

    @property
    def reason_not_equal(self) -> str:
        """The reason: weights are stale on purpose."""
        return (
            f"schedule={self.pipeline.spec.schedule.name} trains with stale weights on "
            "purpose, so it does not equal one device: verify schedule=1f1b, which has "
            "the same stages"
        )

    purposes: ClassVar[tuple[str, ...]] = (
        "gradients of every minibatch",
        "embedding and head from the stages that train them",
        "norms of gradients",
    )

    def declared_reductions(self) -> Iterator[DeclaredCollective]:
        """Gradients of each tick; embedding and head once per step."""
        frame, ticks = self.frame, self.pipeline.spec.schedule.num_ticks
        if axes := frame.batch_axes:
            shardings, sizes = self.zero.shardings, frame.mesh.shape
            shapes = [
                local_shape(x, shardings[path], sizes)
                for path, x in frame.plan.trained(
                    frame.stage_weights(jnp.float32)
                ).items()
            ]
            size, ways = ticks * sum(map(num_bytes, shapes)), frame.ways(axes)
            count, why = ticks * len(shapes), "gradients of every minibatch"
            yield DeclaredCollective("all_reduce", axes, ways, count, size, why)
        shared = frame.layered.split(frame.plan.trained(frame.plan.parameters))[0]
        edges = [leaf.bytes_per_device for leaf in shared.values()] + [
            leaf.bytes_per_device
            for leaf in frame.plan.optimizer
            if not self._is_stacked(leaf)
        ]
        size, count = sum(edges) + 4 * frame.layout.microbatches, len(edges) + 1
        why = "embedding and head from the stages that train them, once a step; norms"
        yield DeclaredCollective(
            "all_reduce", (PIPE,), frame.layout.pipe, count, size, why
        )

    def bounds(self, batch: Any) -> Iterator[DeclaredCollective]:
        """Norms and the optimizer's reductions, over weights that `tensor` splits."""
        del batch
        if (ways := self.frame.layout.tensor) > 1:
            reduced = self.optimizer.reach.reduced_bytes
            numbers = 4 * len(self.frame.plan.gradients) + 2 * reduced
            size = self.pipeline.spec.schedule.num_ticks * numbers
            why = "norms, and the optimizer's reductions, of every minibatch"
            yield DeclaredCollective(
                "all_reduce", (TENSOR,), ways, 0, size, why, bound=True
            )

    def held(self, traced: TracedLayer, held: Held) -> Held:
        """Bytes on one device held through the whole step, with the stashed weights."""
        held = self.pipeline.held(traced, held)
        stashed = self._saved_bytes(traced) - self.pipeline.saved_bytes(traced)
        return held._replace(activations=held.activations + stashed)

    def _saved_bytes(self, traced: TracedLayer) -> int:
        """Bytes of stage inputs, each with the weights that its minibatch used."""
        leaves = self.frame.plan.weights.values()
        weights = sum(leaf.bytes_per_device for leaf in leaves)
        return self.pipeline.saved_bytes(traced, weights)

    def report(self, trace: Callable[[], TracedLayer]) -> dict[str, Any]:
        """The schedule, and the bytes that stages save."""
        saved, spec = self._saved_bytes(trace()), self.pipeline.spec
        return {"pipeline": pipeline_report(spec, self.executor.loop, saved)}

    def _owners(self, batch: Any) -> dict[str, int]:
        """{path: the stage that trains it} of tensors outside the stack.

        Raises:
          LayoutError: embedding and head share a tensor (tied embeddings), which two
            stages would update at different times.
        """
        layered, last = self.frame.layered, self.frame.layout.pipe - 1
        shared = layered.split(abstract(self.frame.plan.weights))[0]
        key = jax.random.key(0)  # Training mode, as evaluation may use fewer weights.
        x = jax.eval_shape(lambda p, b: layered.embed(p, b, key), shared, batch)
        by_embed = used_inputs(lambda p, b: layered.embed(p, b, key), shared, batch)
        by_head = used_inputs(
            lambda p, x, b: layered.head_loss(p, x, b, key)[0], shared, x, batch
        )
        if both := sorted(by_embed & by_head):
            raise LayoutError(
                f"schedule={self.pipeline.spec.schedule.name}: the first and the last "
                f"stage both train {both[0]}, each at its own time; use an untied "
                "head, or schedule=1f1b"
            )
        return {path: last if path in by_head else 0 for path in shared}

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Totals]:
        """M updates of every stage; adds grad_norm, the mean over the minibatches."""
        frame, manual = self.frame, set(self.frame.manual_axes)

        def over_manual(spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*(axis if axis in manual else None for axis in spec))

        optimizer_specs = jax.tree.map(
            over_manual,
            frame.plan.optimizer_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        step = AsynchronousStep(
            self.pipeline, self.executor, self.optimizer, self._owners(shapes)
        )
        rows = batch_specs(frame.layout, batch, frame.batch_axes)
        whole = PartitionSpec()
        run = jax.shard_map(
            step.run,
            in_specs=(frame.specs, optimizer_specs, whole, rows),
            out_specs=(frame.specs, optimizer_specs, whole),
            axis_names=manual,
        )
        params, optimizer_state, totals = run(
            state.params, state.optimizer_state, state.key(), batch
        )
        new = state.after_step(params, optimizer_state)
        return new, totals
