"""One asynchronous training step: the ticks of PipeDream, inside shard_map.

Each tick runs one forward pass with the current weights, one backward pass with the
weights that its minibatch used going forward, and one update.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import tree_map_with_path

from meshpar.arrays import Array, Params, parameter_path, vary
from meshpar.contracts.purposes import purpose
from meshpar.layouts.axes import PIPE
from meshpar.lowering.frame import Frame
from meshpar.lowering.optimizer import Optimizer
from meshpar.lowering.totals import Totals
from meshpar.mesh.order import in_turn
from meshpar.metrics import nonzero
from meshpar.pipeline.buffers import (
    ACTIVATIONS,
    GRADIENTS,
    put_slot,
    send_to_stage,
    take_slot,
    where_tree,
    zeros_like,
)
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.runner import PipelineRunner
from meshpar.pipeline.stage import PipelineStage
from meshpar.pipeline.tick import first_row
from meshpar.schedules.ticks import Columns


class _Updates(NamedTuple):
    """Whether a stage updates its weights in a tick, and after which minibatch."""

    on: Array
    microbatch: Array


class _Carry(NamedTuple):
    """State of one stage between ticks; every buffer is [slots + 1, ...].

    Attributes:
      params: the current trained weights of the stage, with a copy of embedding and
        head.
      optimizer_state: the optimizer state of `params`.
      inputs: buffer of activations that have arrived.
      saved: buffer of stage inputs, each with all weights that F used.
      gradients: buffer of gradients that have arrived.
      dx: gradient that this stage sends next.
      totals: loss and metrics of all minibatches.
      squares: [M] squared norm of this stage's gradients of every minibatch.
    """

    params: Params
    optimizer_state: Any
    inputs: Any
    saved: Any
    gradients: Any
    dx: Any
    totals: Totals
    squares: Array


class _HeadResult(NamedTuple):
    """Totals and gradients of the head, valid where `on` (the last stage)."""

    on: Array
    totals: Totals
    gradient: Params
    dy: Any


_StageWith = Callable[[tuple[Params, Params]], PipelineStage]
"""(weights of embedding and head, of the layers) -> the stage that runs with them."""


@dataclasses.dataclass(frozen=True)
class AsynchronousStep:
    """The ticks of one training step.

    Attributes:
      pipeline: the stages.
      executor: runs the ticks, each with all operations.
      optimizer: updates the weights of a stage.
      owners: {path: the stage that trains it} of tensors outside the stack.
    """

    pipeline: PipelineRunner
    executor: Executor
    optimizer: Optimizer
    owners: dict[str, int]

    @property
    def frame(self) -> Frame:
        """The shard_map program around the ticks."""
        return self.pipeline.frame

    def run(
        self, params: Params, optimizer_state: Any, key: Array, batch: Any
    ) -> tuple[Params, Any, Totals]:
        """Runs all ticks of a training step; call inside shard_map.

        Args:
          params: {path: this device's shard} of the master weights.
          optimizer_state: the optimizer state of `params`, as shards.
          key: the random key of the step.
          batch: this device's part of the batch.

        Returns:
          (weights, optimizer state, totals of the whole batch with "grad_norm").
        """
        frame, tables = self.frame, self.pipeline.loop.tables
        key, rows = frame.shard_key(key, batch), self.executor.rows(self.executor.loop)
        stage_index = lax.axis_index(PIPE)
        # Weights differ over pipe alone, so the flags of their updates must, too.
        updates = _Updates(
            *(
                jnp.asarray(column)[:, stage_index]
                for column in (tables.columns.b_on, tables.columns.b_microbatch)
            )
        )
        vary_over_stages = functools.partial(jax.tree.map, self._vary_over_stages)
        trained = frame.plan.trained(params)
        others = {path: x for path, x in params.items() if path not in trained}
        with frame.scope():
            first = first_row(rows)
            constants = jax.tree.map(frame.vary, frame.cast(others))

            def stage_with(weights: tuple[Params, Params]) -> PipelineStage:
                return self.pipeline.stage(*weights, constants, batch, key)

            stage = stage_with(self._compute_weights(trained))
            x = jax.eval_shape(lambda: stage.embed(first.columns.f_microbatch))
            saved = x, jax.eval_shape(lambda: self._compute_weights(trained))
            carry = _Carry(
                vary_over_stages(trained),
                vary_over_stages(optimizer_state),
                zeros_like(x, frame.vary, tables.num_inputs + 1),
                zeros_like(saved, frame.vary, tables.num_saved + 1),
                zeros_like(x, frame.vary, tables.num_gradients + 1),
                zeros_like(x, frame.vary),
                self.executor.empty_totals(stage, first),
                self._vary_over_stages(jnp.zeros(frame.layout.microbatches)),
            )

            def tick(
                carry: _Carry, row: tuple[Columns, _Updates]
            ) -> tuple[_Carry, None]:
                return self._tick(stage_with, carry, *row), None

            carry = lax.scan(tick, carry, (rows.columns, updates))[0]
        totals = frame.over_devices(carry.totals)
        with purpose("norms of gradients"):
            norms = jnp.sqrt(lax.psum(carry.squares, PIPE))
        trained, optimizer_state = (
            self._broadcast_shared(tree)
            for tree in (carry.params, carry.optimizer_state)
        )
        totals = totals.with_mean("grad_norm", jnp.mean(norms))
        return params | trained, optimizer_state, totals

    def _vary_over_stages(self, x: Array) -> Array:
        """Marks an array as differing over pipe, and over replicas."""
        return vary(x, self._stage_axes)

    @property
    def _stage_axes(self) -> tuple[str, ...]:
        """Axes along which weights differ."""
        return (*self.frame.replica_axes, PIPE)

    def _compute_weights(self, params: Params) -> tuple[Params, Params]:
        """Weights in the compute dtype: embedding and head, and the layers."""
        weights = jax.tree.map(self.frame.vary, self.frame.cast(params))
        return self.frame.layered.split(weights)

    def _tick(
        self, stage_with: _StageWith, carry: _Carry, row: Columns, updates: _Updates
    ) -> _Carry:
        """One tick: a gradient arrives, F with head and loss, B, update."""
        dy = send_to_stage(carry.dx, -1, self.frame.layout.pipe, GRADIENTS)
        gradients = put_slot(carry.gradients, row.gradient_arrived, dy)
        carry = carry._replace(gradients=gradients)
        carry, head = self._forward(stage_with, carry, row, dy)
        carry, gradient = self._backward(stage_with, carry, row, head)
        carry = self._update(carry, gradient, updates)
        totals = carry.totals.added(head.totals)
        return carry._replace(totals=where_tree(head.on, totals, carry.totals))

    def _forward(
        self, stage_with: _StageWith, carry: _Carry, row: Columns, last: Any
    ) -> tuple[_Carry, _HeadResult]:
        """F with head and loss, in turn after what arrived last."""
        weights = self._compute_weights(carry.params)
        stage = stage_with(weights)
        x = where_tree(
            row.first > 0,
            stage.embed(row.f_microbatch),
            take_slot(carry.inputs, row.f_input),
        )
        y = stage.run(row.f_chunk, row.f_microbatch, in_turn(last, x))
        saved = put_slot(carry.saved, row.f_saved, (x, weights))
        arrived = send_to_stage(y, 1, self.frame.layout.pipe, ACTIVATIONS)
        inputs = put_slot(carry.inputs, row.arrived, arrived)
        on, y = row.last > 0, in_turn(arrived, y)
        totals, dy, gradient = stage.head(row.f_microbatch, y, on)
        weight = totals.divisor
        if self.frame.batch_axes:
            with purpose("weight of every minibatch"):
                weight = lax.psum(weight, self.frame.batch_axes)
        weight = nonzero(weight)
        dy, gradient = jax.tree.map(
            lambda g: (g / weight).astype(g.dtype), (dy, gradient)
        )
        carry = carry._replace(
            inputs=inputs,
            saved=saved,
            gradients=put_slot(carry.gradients, row.head_gradient, dy),
        )
        return carry, _HeadResult(on, totals, gradient, dy)

    def _backward(
        self, stage_with: _StageWith, carry: _Carry, row: Columns, head: _HeadResult
    ) -> tuple[_Carry, Params]:
        """B with the saved weights; also returns the gradient of all weights."""
        x, (shared, stack) = take_slot(carry.saved, row.b_saved)
        stage, x = stage_with((shared, stack)), in_turn(head.dy, x)
        dy = take_slot(carry.gradients, row.b_gradient)
        zeros = zeros_like(stack, self.frame.vary, dtype=jnp.float32)
        on, microbatch = row.b_on > 0, row.b_microbatch
        dx, stack_gradient = stage.backward(row.b_chunk, microbatch, x, dy, zeros, on)
        embed_gradient = stage.embed_backward(microbatch, dx, row.b_first > 0)
        shared_gradient = {
            path: jnp.where(head.on, head.gradient[path], 0.0).astype(jnp.float32)
            + jnp.where(row.b_first > 0, g, 0.0).astype(jnp.float32)
            for path, g in embed_gradient.items()
        }
        gradient = {**shared_gradient, **stack_gradient}
        if self.frame.batch_axes:
            with purpose("gradients of every minibatch"):
                gradient = lax.psum(gradient, self.frame.batch_axes)
        return carry._replace(dx=dx), gradient

    def _update(self, carry: _Carry, gradient: Params, updates: _Updates) -> _Carry:
        """One optimizer step on this stage, in ticks with B."""
        gradient = {p: g.astype(carry.params[p].dtype) for p, g in gradient.items()}
        no_loss = jnp.full((), jnp.nan)  # No optimizer that uses it is run here.
        changes, state = self.optimizer.update(
            gradient, carry.optimizer_state, carry.params, no_loss, self._stage_axes
        )
        on, params = updates.on > 0, optax.apply_updates(carry.params, changes)
        squares = sum(jnp.sum(jnp.square(g)) for g in gradient.values())
        return carry._replace(
            params=where_tree(on, params, carry.params),
            optimizer_state=where_tree(on, state, carry.optimizer_state),
            squares=carry.squares.at[updates.microbatch].add(
                jnp.where(on, squares, 0.0)
            ),
        )

    def _broadcast_shared(self, tree: Any) -> Any:
        """Sends tensors outside the stack from their owners to all stages."""
        stage, owners = lax.axis_index(PIPE), self.owners
        stack = self.frame.layered.split(self.frame.plan.parameters)[1]

        def broadcast(keys: Any, x: Array) -> Array:
            if parameter_path(keys, stack) is not None:
                return x
            owner = owners.get(parameter_path(keys, owners), 0)
            x = jnp.where(stage == owner, x, jnp.zeros_like(x))
            with purpose("embedding and head from the stages that train them"):
                return lax.psum(x, PIPE)

        return tree_map_with_path(broadcast, tree)
