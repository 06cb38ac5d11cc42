"""One asynchronous training step: the ticks of PipeDream, inside shard_map.

Each tick runs one forward pass with the weights as they are now, one backward pass with
the weights that its minibatch met going forward, and one update.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey, tree_map_with_path

from meshpar.arrays import Array, Params
from meshpar.collectives.varying import vary
from meshpar.lowering.frame import WEIGHT, Frame
from meshpar.lowering.state import Metrics
from meshpar.pipeline.buffers import (
    AXIS,
    put_slot,
    send_to_stage,
    take_slot,
    where_tree,
    zeros_like,
)
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.runner import PipelineRunner
from meshpar.schedules.ticks import Columns


class _Updates(NamedTuple):
    """Whether a stage updates its weights in a tick, and after which minibatch."""

    on: Array
    microbatch: Array


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
    squares: Array


@dataclasses.dataclass(frozen=True)
class AsynchronousStep:
    """The ticks of one training step.

    Attributes:
      pipeline: the stages.
      executor: its ticks, each with all slots.
      optimizer: updates the weights of a stage.
      owners: {path: the stage that trains it} of tensors outside the stack.
    """

    pipeline: PipelineRunner
    executor: Executor
    optimizer: optax.GradientTransformation
    owners: dict[str, int]

    @property
    def frame(self) -> Frame:
        """The shard_map program around the ticks."""
        return self.pipeline.frame

    def run(
        self, params: Params, optimizer_state: Any, key: Array, batch: Any
    ) -> tuple[Params, Any, Metrics]:
        """Runs all ticks: (weights, optimizer state, means of metrics)."""
        frame, tables = self.frame, self.pipeline.tables
        key, columns = frame.shard_key(key), self.executor.stage_columns()
        number = lax.axis_index(AXIS)
        # Weights differ over pipe alone: so must the flags of their updates.
        updates = _Updates(
            *(
                jnp.asarray(column)[:, number]
                for column in (tables.columns.b_on, tables.columns.b_microbatch)
            )
        )
        own = functools.partial(jax.tree.map, self._of_stage)
        with frame.scope():
            m = columns.f_microbatch[0]
            stage = self.pipeline.stage(*self._used(params), batch, key)
            x = jax.eval_shape(lambda: stage.embed(m))
            kept = x, jax.eval_shape(lambda: self._used(params))
            carry = _Carry(
                own(params),
                own(optimizer_state),
                zeros_like(x, self.frame.vary, tables.num_inputs + 1),
                zeros_like(kept, self.frame.vary, tables.num_saved + 1),
                zeros_like(x, self.frame.vary, tables.num_gradients + 1),
                zeros_like(x, self.frame.vary),
                self.executor.no_metrics(stage, m),
                self._of_stage(jnp.zeros(frame.layout.microbatches)),
            )

            def tick(
                carry: _Carry, row: tuple[Columns, _Updates]
            ) -> tuple[_Carry, None]:
                return self._tick(batch, key, carry, *row), None

            carry = lax.scan(tick, carry, (columns, updates))[0]
        means = frame.means(carry.metrics)
        means.pop(WEIGHT)
        norms = jnp.sqrt(lax.psum(carry.squares, AXIS))
        params, optimizer_state = (
            self._collected(tree) for tree in (carry.params, carry.optimizer_state)
        )
        return params, optimizer_state, means | {"grad_norm": jnp.mean(norms)}

    def _of_stage(self, x: Array) -> Array:
        """Marks an array as differing over pipe."""
        replicas = set(self.frame.all_manual_axes) - set(self.frame.manual_axes)
        return vary(x, (*replicas, AXIS))

    def _used(self, params: Params) -> tuple[Params, Params]:
        """Weights as a minibatch meets them: embedding and head, and the layers."""
        used = jax.tree.map(self.frame.vary, self.frame.cast(params))
        return self.frame.layered.split(used)

    def _tick(
        self,
        batch: Any,
        key: Array,
        carry: _Carry,
        row: Columns,
        updates: _Updates,
    ) -> _Carry:
        num, batch_axes = self.frame.layout.pipe, self.frame.batch_axes
        gradients = put_slot(
            carry.gradients, row.gradient_arrived, send_to_stage(carry.dx, -1, num)
        )
        used = self._used(carry.params)
        now = self.pipeline.stage(*used, batch, key)
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
        if batch_axes:
            total = lax.psum(total, batch_axes)
        total = jnp.where(total == 0, 1.0, total)  # Then all gradients are 0, too.
        dy, of_head = jax.tree.map(lambda g: (g / total).astype(g.dtype), (dy, of_head))
        gradients = put_slot(gradients, row.head_gradient, dy)

        x, (shared, stack) = take_slot(saved, row.b_saved)
        then = self.pipeline.stage(shared, stack, batch, key)
        dy = take_slot(gradients, row.b_gradient)
        zeros = zeros_like(stack, self.frame.vary, dtype=jnp.float32)
        back = row.b_microbatch
        dx, of_stack = then.backward(row.b_chunk, back, x, dy, zeros, row.b_on > 0)
        of_embed = then.embed_backward(back, dx, row.b_first > 0)
        shared = {
            path: jnp.where(last, of_head[path], 0.0).astype(jnp.float32)
            + jnp.where(row.b_first > 0, g, 0.0).astype(jnp.float32)
            for path, g in of_embed.items()
        }
        gradient = {**shared, **of_stack}
        if batch_axes:
            gradient = lax.psum(gradient, batch_axes)
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

    def _collected(self, tree: Any) -> Any:
        """Tensors outside the stack from their owners to all stages."""
        stage, owners = lax.axis_index(AXIS), self.owners
        stack = self.frame.layered.split(self.frame.plan.parameters)[1]

        def leaf(keys: Any, x: Array) -> Array:
            paths = [key.key for key in keys if isinstance(key, DictKey)]
            if any(path in stack for path in paths):
                return x
            owner = next((owners[path] for path in paths if path in owners), 0)
            return lax.psum(jnp.where(stage == owner, x, jnp.zeros_like(x)), AXIS)

        return tree_map_with_path(leaf, tree)
