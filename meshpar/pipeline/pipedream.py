"""PipeDream: asynchronous 1F1B with weight stashing, a staleness mode of pipelines.

Every microbatch is a minibatch of its own. A stage updates its weights after each
backward pass and does not wait for the others, so what a minibatch meets on the way
are weights of different ages. Forward and backward pass of one minibatch use the same
weights on each stage (weight stashing); different stages may use different ones (no
vertical sync). On stage p of P the weights lag 2(P-1-p) updates behind: two operations
share a tick; with one at a time it would be P-1-p. A training step runs M minibatches
and then drains.

Source: Narayanan et al., PipeDream, arXiv:1806.03377, sections 3.2 and 3.3.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, tree_map_with_path

from meshpar.arrays import Params
from meshpar.collectives.varying import vary
from meshpar.errors import LayoutError
from meshpar.fsdp.split_backward import used_inputs
from meshpar.lowering.base import model_scope
from meshpar.lowering.shard_map import WEIGHT
from meshpar.lowering.state import Metrics, TrainState
from meshpar.pipeline.buffers import (
    AXIS,
    put_slot,
    send_to_stage,
    take_slot,
    where_tree,
    zeros_like,
)
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.lowering import PipelineLowering
from meshpar.schedules.ticks import Columns, Phase


class _Updates(NamedTuple):
    """Whether a stage updates its weights in a tick, and after which minibatch."""

    on: jax.Array
    microbatch: jax.Array


class _Carry(NamedTuple):
    """What goes from tick to tick on one stage.

    Attributes:
      params: its weights as they are now; embedding and head as its own copies.
      optimizer_state: likewise.
      inputs: activations that have arrived.
      saved: stage inputs, each with all weights that they met.
      gradients: gradients that have arrived.
      dx: gradient that this stage sends next.
      metrics: sums over minibatches.
      squares: [M] squared norm of this stage's gradients of every minibatch.
    """

    params: Params
    optimizer_state: Any
    inputs: Any
    saved: Any
    gradients: Any
    dx: Any
    metrics: Metrics
    squares: jax.Array


@dataclasses.dataclass(frozen=True)
class PipeDreamLowering(PipelineLowering):
    """`Lowering` of asynchronous pipelines; `gradients` are those of one moment."""

    def __post_init__(self):
        super().__post_init__()
        layout, name = self.plan.layout, self.arrangement.schedule.name
        for setting, bad in (
            (f"fsdp={layout.fsdp}", layout.fsdp > 1),
            (f"vocab={layout.vocab}", layout.vocab != "edge"),
            (f"save={layout.save}", layout.save != "inputs"),
            (f"tick_loop={layout.tick_loop}", layout.tick_loop != "phases"),
            (f"clip_norm={self.clip_norm}", self.clip_norm is not None),
        ):
            if bad:
                raise LayoutError(
                    f"schedule={name} updates every stage by itself, with all weights "
                    f"at hand: leave out {setting}"
                )
        if split := [path for path, p in self.shardings.items() if p.splits]:
            raise LayoutError(
                f"schedule={name} updates every stage by itself, with all weights at "
                f"hand, but a rule splits {split[0]} over data: leave that out"
            )
        for leaf in self.plan.optimizer:
            ours = any(f"['{path}']" in leaf.path for path in self._stack_paths)
            if ours and leaf.spec[:1] != ((AXIS,),):
                raise LayoutError(
                    f"schedule={name}: the optimizer keeps {leaf.path} {leaf.shape}, "
                    "which no stage has alone; use one that works elementwise"
                )

    @property
    def executor(self) -> Executor:
        """Of the same ticks, each of which has all slots."""
        executor = super().executor
        ticks = self.arrangement.schedule.num_ticks
        every = Phase(0, ticks, True, True, False, True)
        tables = dataclasses.replace(executor.tables, phases=(every,))
        return dataclasses.replace(executor, tables=tables)

    def _owners(self, batch: Any) -> dict[str, int]:
        """{path: stage} of tensors outside the stack: where their gradient comes from.

        Raises:
          LayoutError: both edges use one (tied embeddings), with weights of two ages.
        """
        layered, last = self.model.layered, self.plan.layout.pipe - 1
        leaves = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in self.plan.weights.items()
        }
        shared = layered.split(leaves)[0]
        key = jax.random.key(0)  # In training mode: evaluation may use fewer.
        x = jax.eval_shape(lambda p, b: layered.embed(p, b, key), shared, batch)
        by_embed = used_inputs(lambda p, b: layered.embed(p, b, key), shared, batch)
        by_head = used_inputs(
            lambda p, x, b: layered.head_loss(p, x, b, key)[0], shared, x, batch
        )
        if both := sorted(by_embed & by_head):
            raise LayoutError(
                f"schedule={self.arrangement.schedule.name}: the first and the last "
                f"stage both train {both[0]}, each at its own time; use an untied "
                "head, or schedule=1f1b"
            )
        return {path: last if path in by_head else 0 for path in shared}

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """M updates of every stage; adds grad_norm, the mean over the minibatches."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        manual = set(self.manual_axes)

        def over_manual(spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*(axis if axis in manual else None for axis in spec))

        specs = self._specs
        optimizer_specs = jax.tree.map(
            over_manual,
            self.plan.optimizer_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        run = jax.shard_map(
            functools.partial(self._run, owners=self._owners(shapes)),
            in_specs=(specs, optimizer_specs, PartitionSpec(), self._rows),
            out_specs=(specs, optimizer_specs, PartitionSpec()),
            axis_names=manual,
        )
        params, optimizer_state, metrics = run(
            state.params, state.optimizer_state, state.key(), batch
        )
        new = TrainState(state.step + 1, state.seed, params, optimizer_state)
        return new, metrics

    def _run(
        self,
        params: Params,
        optimizer_state: Any,
        key: jax.Array,
        batch: Any,
        owners: dict[str, int],
    ) -> tuple[Params, Any, Metrics]:
        """All ticks on one device."""
        key, columns = self._shard_key(key), self.executor.stage_columns()
        number, tables = lax.axis_index(AXIS), self.tables
        # What is trained differs over pipe alone: so must what says when.
        updates = _Updates(
            *(
                jnp.asarray(column)[:, number]
                for column in (tables.columns.b_on, tables.columns.b_microbatch)
            )
        )
        own = functools.partial(jax.tree.map, self._of_stage)
        with model_scope(self.plan.layout, self.mesh, self.all_manual_axes):
            m = columns.f_microbatch[0]
            stage = self._stage(*self._used(params), batch, key)
            x = jax.eval_shape(lambda: stage.embed(m))
            kept = x, jax.eval_shape(lambda: self._used(params))
            carry = _Carry(
                own(params),
                own(optimizer_state),
                zeros_like(x, self._vary, tables.num_inputs + 1),
                zeros_like(kept, self._vary, tables.num_saved + 1),
                zeros_like(x, self._vary, tables.num_gradients + 1),
                zeros_like(x, self._vary),
                self.executor.no_metrics(stage, m),
                self._of_stage(jnp.zeros(self.plan.layout.microbatches)),
            )

            def tick(
                carry: _Carry, row: tuple[Columns, _Updates]
            ) -> tuple[_Carry, None]:
                return self._tick(batch, key, carry, *row), None

            carry = lax.scan(tick, carry, (columns, updates))[0]
        means = self._means(carry.metrics)
        means.pop(WEIGHT)
        norms = jnp.sqrt(lax.psum(carry.squares, AXIS))
        params, optimizer_state = (
            self._collected(tree, owners)
            for tree in (carry.params, carry.optimizer_state)
        )
        return params, optimizer_state, means | {"grad_norm": jnp.mean(norms)}

    def _of_stage(self, x: jax.Array) -> jax.Array:
        """Marks an array as differing over pipe."""
        return vary(x, (*self.replica_axes, AXIS))

    def _used(self, params: Params) -> tuple[Params, Params]:
        """Weights as a minibatch meets them: embedding and head, and the layers."""
        used = jax.tree.map(self._vary, self.cast(params))
        return self.model.layered.split(used)

    def _tick(
        self,
        batch: Any,
        key: jax.Array,
        carry: _Carry,
        row: Columns,
        updates: _Updates,
    ) -> _Carry:
        num = self.plan.layout.pipe
        gradients = put_slot(
            carry.gradients, row.gradient_arrived, send_to_stage(carry.dx, -1, num)
        )
        used = self._used(carry.params)
        now = self._stage(*used, batch, key)
        x = where_tree(
            row.first > 0,
            now.embed(row.f_microbatch),
            take_slot(carry.inputs, row.f_input),
        )
        y = now.run(row.f_chunk, row.f_microbatch, x)
        saved = put_slot(carry.saved, row.f_saved, (x, used))
        inputs = put_slot(carry.inputs, row.arrived, send_to_stage(y, 1, num))
        last = row.last > 0
        metrics, dy, of_head = now.head(row.f_microbatch, y, last)
        total = metrics[WEIGHT]
        if self.batch_axes:
            total = lax.psum(total, self.batch_axes)
        total = jnp.where(total == 0, 1.0, total)  # Then all gradients are 0, too.
        dy, of_head = jax.tree.map(lambda g: (g / total).astype(g.dtype), (dy, of_head))
        gradients = put_slot(gradients, row.head_gradient, dy)

        x, (shared, stack) = take_slot(saved, row.b_saved)
        then = self._stage(shared, stack, batch, key)
        dy = take_slot(gradients, row.b_gradient)
        zeros = zeros_like(stack, self._vary, dtype=jnp.float32)
        back = row.b_microbatch
        dx, of_stack = then.backward(row.b_chunk, back, x, dy, zeros, row.b_on > 0)
        of_embed = then.embed_backward(back, dx, row.b_first > 0)
        shared = {
            path: jnp.where(last, of_head[path], 0.0).astype(jnp.float32)
            + jnp.where(row.b_first > 0, g, 0.0).astype(jnp.float32)
            for path, g in of_embed.items()
        }
        gradient = {**shared, **of_stack}
        if self.batch_axes:
            gradient = lax.psum(gradient, self.batch_axes)
        return self._updated(carry, gradient, updates)._replace(
            inputs=inputs,
            saved=saved,
            gradients=gradients,
            dx=dx,
            metrics={
                name: total + jnp.where(last, metrics[name], 0.0)
                for name, total in carry.metrics.items()
            },
        )

    def _updated(self, carry: _Carry, gradient: Params, updates: _Updates) -> _Carry:
        """One step of the optimizer on this stage, where it is time."""
        gradient = {p: g.astype(carry.params[p].dtype) for p, g in gradient.items()}
        changes, state = self.optimizer.update(
            gradient, carry.optimizer_state, carry.params
        )
        on, new = updates.on > 0, optax.apply_updates(carry.params, changes)
        squares = sum(jnp.sum(jnp.square(g)) for g in gradient.values())
        return carry._replace(
            params=where_tree(on, new, carry.params),
            optimizer_state=where_tree(on, state, carry.optimizer_state),
            squares=carry.squares.at[updates.microbatch].add(
                jnp.where(on, squares, 0.0)
            ),
        )

    def _collected(self, tree: Any, owners: dict[str, int]) -> Any:
        """The same on all stages again, but for their own layers."""
        stage = lax.axis_index(AXIS)

        def one(keys: Any, x: jax.Array) -> jax.Array:
            paths = [key.key for key in keys if isinstance(key, DictKey)]
            if any(path in self._stack_paths for path in paths):
                return x
            owner = next((owners[path] for path in paths if path in owners), 0)
            return lax.psum(jnp.where(stage == owner, x, jnp.zeros_like(x)), AXIS)

        return tree_map_with_path(one, tree)

    @functools.cached_property
    def _stack_paths(self) -> frozenset[str]:
        return frozenset(self.model.layered.split(self.plan.parameters)[1])
