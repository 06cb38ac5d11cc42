"""The pipeline runner: layers split over stages, run tick by tick inside shard_map.

The stack of layers is split over `pipe`; embedding and head run on the stages at its
edges, or split by vocabulary on all of them. The layers, gathers and reductions are
those of a program without a pipeline; the executor runs them as the schedule says.

    zero=1, 2   weights gathered once a step, gradients reduced once a step
    zero=3      weights gathered in every tick that uses them, gradients reduced in it
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import DeclaredCollective
from meshpar.errors import LayoutError, MeshparError
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.terms import LayerPass
from meshpar.layouts.axes import FSDP, PIPE
from meshpar.layouts.layout import Layout
from meshpar.layouts.scope import current_scope
from meshpar.lowering.frame import WEIGHT
from meshpar.lowering.memory import Held, TracedLayer
from meshpar.lowering.runner import Runner
from meshpar.lowering.state import Metrics
from meshpar.models.layer_stack import Key
from meshpar.models.model import Model
from meshpar.pipeline import terms
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.report import PipelineReport, pipeline_report
from meshpar.pipeline.spec import PipelineSpec
from meshpar.pipeline.stage import PipelineStage
from meshpar.schedules.table import Schedule
from meshpar.schedules.ticks import Tables, compile_schedule


def reason_unsupported(model: Model, layout: Layout, schedule: Schedule) -> str:
    """Why a schedule cannot run a model under a layout; "" if it can."""
    if not model.layered.evaluates:
        return (
            f"pipe={layout.pipe} evaluates by the layers of the model, but it has an "
            "evaluation_loss_fn of its own; leave that out"
        )
    if not schedule.weight:
        return ""
    # Collectives under conditionals that differ between stages could deadlock.
    gathers = layout.fsdp > 1 and layout.zero_level == 3
    for setting, is_set in (
        (f"tensor={layout.tensor}", layout.tensor > 1),
        (f"{FSDP}={layout.fsdp},zero=3", gathers),
    ):
        if is_set:
            return _reason_divergent(schedule, setting)
    for setting, default in (("tick_loop", "phases"), ("vocab", "edge")):
        if (value := getattr(layout, setting)) != default:
            return (
                f"schedule={schedule.name} has conditionals of its own, in which "
                f"nothing may be sent over pipe: leave out {setting}={value}"
            )
    return ""


def _reason_divergent(schedule: Schedule, setting: str) -> str:
    return (
        f"schedule={schedule.name} runs F, B and W under conditionals that differ "
        f"between stages, and {setting} needs collectives in them, which can deadlock; "
        "leave it out, or use schedule=1f1b"
    )


@dataclasses.dataclass(frozen=True)
class PipelineRunner(Runner):
    """Runs the stages of a pipeline.

    Attributes:
      spec: schedule and partition.

    Raises:
      LayoutError: parameters that are split over stages in another way than the stack
        of layers, or collectives inside conditionals that differ between stages.
    """

    stage_axes: ClassVar[tuple[str, ...]] = (PIPE,)

    spec: PipelineSpec

    def __post_init__(self):
        shared, stack = self.frame.layered.split(self.frame.plan.parameters)
        for path, leaf in stack.items():
            if leaf.spec[0] != (PIPE,) or PIPE in sum(leaf.spec[1:], ()):
                raise LayoutError(
                    f"{path} {leaf.shape}: pipe={self.layout.pipe} splits the "
                    f"first dim of the stack and nothing else, but its dims "
                    f"{leaf.names} split over {leaf.spec}; name the first dim "
                    "'layers', and map no other one to pipe"
                )
        if self.executor.divergent and self.zero.gathers_layers:
            setting = f"fsdp={self.layout.fsdp},zero=3"
            raise LayoutError(_reason_divergent(self.spec.schedule, setting))
        for path, leaf in shared.items():
            split = [
                name
                for name, axes in zip(leaf.names or (), leaf.spec, strict=False)
                if PIPE in axes
            ]
            if split and not (self.layout.splits_vocabulary and split == ["vocab"]):
                raise LayoutError(
                    f"{path} {leaf.shape} splits {split} over {leaf.spec}: outside the "
                    "stack of layers no dim may be mapped to pipe, but by vocab=pipe"
                )

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.frame.layout

    @functools.cached_property
    def tables(self) -> Tables:
        """The compiled schedule."""
        return compile_schedule(self.spec.schedule)

    @functools.cached_property
    def executor(self) -> Executor:
        """Runs the ticks."""
        schedule = self.spec.schedule
        return Executor(
            self.tables,
            schedule.num_stages,
            schedule.num_chunks > 1,
            self.frame.vary,
            self.layout.tick_loop == "uniform",
            self.layout.splits_vocabulary,
        )

    @property
    def layer_passes(self) -> list[LayerPass]:
        """Every pass over one stage's layers in one step.

        A pass runs in every tick in which some stage needs it. Compiled conditionals do
        not tell how often they are taken: with tick_loop=uniform every tick counts.
        """
        rows = self.spec.partition.rows
        forward, backward = map(self.executor.ticks, ("forward", "backward"))
        again = [LayerPass("forward again", backward, rows)]
        return [
            LayerPass("forward", forward, rows),
            *(again if self.layout.save == "inputs" else []),
            LayerPass("backward", backward, rows),
        ]

    @property
    def sums_dtype(self) -> Any:
        """Float32: gradients of all ticks are added up."""
        return jnp.float32

    def sums(self, params: Params, batch: Any, key: Array) -> tuple[Metrics, Params]:
        """Metrics and gradients summed over this shard's samples, inside shard_map."""
        leaves, _ = self.zero.leaves(params)
        with self.frame.scope():
            shared, stack = self.split(leaves)
            stage = self.stage(shared, stack, batch, key)
            zeros = (
                {
                    path: self.frame.vary(jnp.zeros(x.shape, jnp.float32))
                    for path, x in tree.items()
                }
                for tree in (stack, shared)
            )
            sums = self.executor.train(stage, *zeros)
        return sums.metrics, {**sums.shared, **sums.stack}

    @property
    def evaluates(self) -> bool:
        """Stages evaluate too: no device holds the whole model."""
        return True

    def evaluate(self, params: Params, batch: Any) -> Metrics:
        """Loss and aux in evaluation mode, inside shard_map."""
        with self.frame.scope():
            shared, stack = self.split(self.zero.leaves(params)[0])
            stage = self.stage(shared, stack, batch, None)
            means = self.frame.means(self.executor.evaluate(stage))
        return {name: x for name, x in means.items() if name != WEIGHT}

    def split(self, leaves: Params) -> tuple[Params, Params]:
        """Whole weights of embedding and head, and the leaves of the stack."""
        shared, stack = self.frame.layered.split(leaves)
        return self.frame.cast(self.zero.gathered_shared(shared)), stack

    def stage(
        self, shared: Params, stack: Params, batch: Any, key: Key
    ) -> PipelineStage:
        """This device's stage; without a key in evaluation mode."""
        partition, layout = self.spec.partition, self.layout
        numbers = jnp.asarray(partition.order).reshape(partition.num_stages, -1)
        return PipelineStage(
            layered=self.frame.layered,
            shared=shared,
            stack=stack,
            batches=split_microbatches(batch, layout.microbatches),
            key=key,
            numbers=self.frame.vary(numbers[lax.axis_index(PIPE)]),
            num_chunks=partition.num_chunks,
            layers=self._layers,
            weigh=self._weigh,
            vary=self.frame.vary,
            residuals=layout.save == "residuals",
            shares_vocabulary=layout.splits_vocabulary,
        )

    def _layers(self, key: Key) -> LayerScan:
        padded = bool((self.spec.partition.order < 0).any())
        return dataclasses.replace(self.zero.layers(key), padded=padded)

    def _weigh(self, loss: Array, aux: Metrics) -> tuple[Array, Metrics]:
        if self.layout.splits_vocabulary:
            self._check_vocabulary({"loss": loss, **aux})
        return self.frame.weigh(loss, aux)

    def _check_vocabulary(self, values: Metrics) -> None:
        """Refuses a head that sees one slice of the vocabulary as if it were whole."""
        for name, value in values.items():
            if PIPE in jax.typeof(jnp.asarray(value)).manual_axis_type.varying:
                raise LayoutError(
                    f"vocab=pipe: {name} depends on the logits otherwise than through "
                    "vocabulary.token_losses, and a stage has one slice of them; leave "
                    "that out, or use vocab=edge"
                )
        whole = {
            leaf.shape[dim]
            for leaf in self.frame.plan.parameters.values()
            for dim, axes in enumerate(leaf.spec)
            if axes[:1] == (PIPE,) and leaf.names[dim] == "vocab"
        }
        stages = self.layout.pipe
        for name, size in current_scope().vocabulary_used.items():
            if size * stages not in whole:
                raise LayoutError(
                    f"vocab=pipe: vocabulary.{name} saw {size} tokens on every stage, "
                    f"but a slice has {sorted(n // stages for n in whole)}: name the "
                    "vocab dim of embedding and head, and do not allow it to be whole"
                )

    def declared_beside(self, batch: Any) -> Iterator[DeclaredCollective]:
        """Messages between stages, and the vocabulary over all of them."""
        yield from terms.declared_sends(self.frame, self.executor, batch)
        yield from terms.declared_vocabulary(self.frame, self.executor, batch)

    def held(self, traced: TracedLayer, held: Held) -> Held:
        """Bytes held all through a step."""
        weights, gradients = terms.stage_bytes(self.frame, self.zero)
        saved = self.saved_bytes(traced)
        rows = 0 if self.layout.save == "residuals" else self.spec.partition.rows
        return Held(
            weights=weights,
            gradients=gradients,
            activations=saved + rows * traced.saved,
            head_ways=self.layout.pipe if self.layout.splits_vocabulary else 1,
        )

    def saved_bytes(self, traced: TracedLayer, more: int = 0) -> int:
        """Bytes on one device kept between forward and backward passes.

        Args:
          traced: one layer.
          more: bytes kept beside each stage input.
        """
        rows, tables = self.spec.partition.rows, self.tables
        per_slot = rows * traced.saved if self.layout.save == "residuals" else traced.x
        return terms.buffer_bytes(tables, traced, rows, per_slot + more)

    def report(self, trace: Callable[[], TracedLayer]) -> dict[str, PipelineReport]:
        """The schedule, and the bytes that stages keep."""
        saved = self.saved_bytes(trace())
        return {"pipeline": pipeline_report(self.spec, self.executor, saved)}

    @property
    def may_deadlock(self) -> bool:
        """Whether stages take conditionals of their own."""
        return self.executor.divergent

    def check_compiled(self, collectives: list[Collective]) -> None:
        """Refuses collectives under conditionals that differ between stages.

        Raises:
          MeshparError: there are some; a stage would wait for one that never comes.
        """
        if not self.may_deadlock:
            return
        under = [one for one in collectives if one.conditional]
        if under:
            places = ", ".join(sorted({f"{one.kind} at {one.source}" for one in under}))
            raise MeshparError(
                f"schedule={self.spec.schedule.name}: the compiler put "
                f"collectives under conditionals that only some stages take ({places}),"
                " and the others would never come: a deadlock; use schedule=1f1b"
            )
