"""Pipelines inside the explicit lowering: stages, ZeRO beside them, what is refused.

The stack of layers is split over `pipe`; embedding and head run on the stages at its
edges, or split by vocabulary on all of them. The same layers, gathers and reductions as
without a pipeline are given to the executor (`pipeline`), which runs them as the
schedule says.

    zero=1, 2   weights gathered once a step, gradients reduced once a step
    zero=3      weights gathered in every tick that uses them, gradients reduced in it
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.contracts.collective import Collective
from meshpar.errors import LayoutError, MeshparError
from meshpar.fsdp.gather import gather_shards
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.sharding import ManualSharding
from meshpar.layouts.plan import Spec
from meshpar.layouts.scope import current_scope
from meshpar.lowering.base import model_scope
from meshpar.lowering.shard_map import WEIGHT, ShardMapLowering
from meshpar.lowering.state import Metrics, TrainState
from meshpar.models.layer_stack import Key
from meshpar.pipeline.buffers import AXIS
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.spec import PipelineSpec, make_spec
from meshpar.pipeline.stage import PipelineStage
from meshpar.schedules.ticks import Tables, compile_schedule

_PIPE = AXIS


@dataclasses.dataclass(frozen=True)
class PipelineLowering(ShardMapLowering):
    """`Lowering` by shard_map with the layers split over `pipe`."""

    def __post_init__(self):
        super().__post_init__()
        shared, stack = self.model.layered.split(self.plan.parameters)
        for path, leaf in stack.items():
            if leaf.spec[0] != (_PIPE,) or _PIPE in sum(leaf.spec[1:], ()):
                raise LayoutError(
                    f"{path} {leaf.shape}: pipe={self.plan.layout.pipe} splits the "
                    f"first dim of the stack and nothing else, but its dims "
                    f"{leaf.names} split over {leaf.spec}; name the first dim "
                    "'layers', and map no other one to pipe"
                )
        self._check_divergence()
        for path, leaf in shared.items():
            split = [
                name
                for name, axes in zip(leaf.names or (), leaf.spec, strict=False)
                if _PIPE in axes
            ]
            if split and not (self._splits_vocabulary and split == ["vocab"]):
                raise LayoutError(
                    f"{path} {leaf.shape} splits {split} over {leaf.spec}: outside the "
                    "stack of layers no dim may be mapped to pipe, but by vocab=pipe"
                )

    @property
    def _splits_vocabulary(self) -> bool:
        return self.plan.layout.splits_vocabulary

    def _check_vocabulary(self, values: Metrics) -> None:
        """Refuses a head that sees one slice of the vocabulary as if it were whole."""
        for name, value in values.items():
            if _PIPE in jax.typeof(jnp.asarray(value)).manual_axis_type.varying:
                raise LayoutError(
                    f"vocab=pipe: {name} depends on the logits otherwise than through "
                    "vocabulary.token_losses, and a stage has one slice of them; leave "
                    "that out, or use vocab=edge"
                )
        whole = {
            leaf.shape[dim]
            for leaf in self.plan.parameters.values()
            for dim, axes in enumerate(leaf.spec)
            if axes[:1] == (_PIPE,) and leaf.names[dim] == "vocab"
        }
        stages = self.plan.layout.pipe
        for name, size in current_scope().vocabulary_used.items():
            if size * stages not in whole:
                raise LayoutError(
                    f"vocab=pipe: vocabulary.{name} saw {size} tokens on every stage, "
                    f"but a slice has {sorted(n // stages for n in whole)}: name the "
                    "vocab dim of embedding and head, and do not allow it to be whole"
                )

    def _check_divergence(self) -> None:
        """Refuses layouts that would put collectives under diverging conditionals."""
        layout, name = self.plan.layout, self.arrangement.schedule.name
        if not self.arrangement.schedule.weight:
            return
        for setting, bad in (
            (f"tensor={layout.tensor}", layout.tensor > 1),
            (f"fsdp={layout.fsdp},zero=3", self.gathers_layers),
        ):
            if bad:
                raise LayoutError(
                    f"schedule={name} runs F, B and W under conditionals that differ "
                    f"between stages, and {setting} needs collectives in them, which "
                    "can deadlock; leave it out, or use schedule=1f1b"
                )
        for setting, default in (("tick_loop", "phases"), ("vocab", "edge")):
            if (value := getattr(layout, setting)) != default:
                raise LayoutError(
                    f"schedule={name} has conditionals of its own, in which nothing "
                    f"may be sent over pipe: leave out {setting}={value}"
                )

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
        found = [one for one in collectives if one.conditional]
        if found:
            places = ", ".join(sorted({f"{one.kind} at {one.source}" for one in found}))
            raise MeshparError(
                f"schedule={self.arrangement.schedule.name}: the compiler put "
                f"collectives under conditionals that only some stages take ({places}),"
                " and the others would never come: a deadlock; use schedule=1f1b"
            )

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The axes of the shard_map; all others stay automatic."""
        return (_PIPE, *self.batch_axes)

    @functools.cached_property
    def arrangement(self) -> PipelineSpec:
        """Schedule and partition."""
        return make_spec(self.plan.layout, self.model.layered.depth)

    @functools.cached_property
    def tables(self) -> Tables:
        """The compiled schedule."""
        return compile_schedule(self.arrangement.schedule)

    @property
    def reduces_early(self) -> bool:
        """Whether gradients of the layers are reduced inside the backward pass."""
        return self.gathers_layers

    @property
    def reduces_shared_early(self) -> bool:
        """The same of embedding and head: no, once a step."""
        return False

    def _manual_sharding(self, path: str, spec: Spec) -> ManualSharding:
        """Over `pipe` a layer stays where it is: nothing gathers it there."""
        held = _PIPE in sum(spec, ())
        rest = tuple(tuple(axis for axis in axes if axis != _PIPE) for axes in spec)
        return ManualSharding.of(
            path, rest, self.batch_axes if held else self.manual_axes
        )

    def _layers(self, key: Key) -> LayerScan:
        layers = super()._layers(key)
        padded = bool((self.arrangement.partition.order < 0).any())
        return dataclasses.replace(layers, padded=padded)

    @property
    def layer_passes(self) -> list[tuple[str, int, int]]:
        """(name, times, layers) of every pass over one stage's layers in one step.

        A pass runs in every tick in which some stage needs it. Compiled conditionals do
        not tell how often they are taken: with tick_loop=uniform every tick counts.
        """
        rows = self.arrangement.partition.rows
        forward, backward = map(self.executor.ticks, ("forward", "backward"))
        again = [("forward again", backward, rows)]
        return [
            ("forward", forward, rows),
            *(again if self.plan.layout.save == "inputs" else []),
            ("backward", backward, rows),
        ]

    @property
    def executor(self) -> Executor:
        """What runs the ticks."""
        schedule = self.arrangement.schedule
        wraps = schedule.num_chunks > 1
        uniform = self.plan.layout.tick_loop == "uniform"
        return Executor(
            self.tables,
            schedule.num_stages,
            wraps,
            self._vary,
            uniform,
            self._splits_vocabulary,
        )

    def _sums(
        self, leaves: Params, whole: Params, batch: Any, key: jax.Array
    ) -> tuple[Metrics, Params]:
        shared, stack = self._split(leaves)
        stage = self._stage(shared, stack, batch, key)
        zeros = (
            {p: self._vary(jnp.zeros(x.shape, jnp.float32)) for p, x in tree.items()}
            for tree in (stack, shared)
        )
        sums = self.executor.train(stage, *zeros)
        return sums.metrics, {**sums.shared, **sums.stack}

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Loss and aux of the model in evaluation mode."""

        def forward(params: Params, _: jax.Array, batch: Any) -> Metrics:
            with model_scope(self.plan.layout, self.mesh, self.all_manual_axes):
                shared, stack = self._split(self._leaves(params)[0])
                stage = self._stage(shared, stack, batch, None)
                means = self._means(self.executor.evaluate(stage))
            return {name: x for name, x in means.items() if name != WEIGHT}

        run = self._mapped(forward, PartitionSpec())
        return run(state.params, state.key(), batch)

    def _split(self, leaves: Params) -> tuple[Params, Params]:
        """Whole weights of embedding and head, and the leaves of the stack."""
        shared, stack = self.model.layered.split(leaves)
        if self.gathers_layers:
            shared = gather_shards(shared, self.shardings)
        return self.cast(shared), stack

    def _stage(
        self, shared: Params, stack: Params, batch: Any, key: Key
    ) -> PipelineStage:
        """What this device does; without a key in evaluation mode."""
        parts, layout = self.arrangement.partition, self.plan.layout
        numbers = jnp.asarray(parts.order).reshape(parts.num_stages, -1)
        return PipelineStage(
            layered=self.model.layered,
            shared=shared,
            stack=stack,
            batches=split_microbatches(batch, layout.microbatches),
            key=key,
            numbers=self._vary(numbers[lax.axis_index(_PIPE)]),
            num_chunks=parts.num_chunks,
            layers=self._layers,
            weigh=self._weighted,
            vary=self._vary,
            residuals=layout.save == "residuals",
            shares_vocabulary=self._splits_vocabulary,
        )

    def _weighted(self, loss: jax.Array, aux: Metrics) -> tuple[jax.Array, Metrics]:
        if self._splits_vocabulary:
            self._check_vocabulary({"loss": loss, **aux})
        return super()._weighted(loss, aux)
