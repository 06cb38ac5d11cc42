"""One tick of a pipeline on one stage.

Its operations run in this order:

    gradient arrives | embed | F | send | head and loss | B | W | embedding's gradient

An activation is sent beside head and backward pass, a gradient beside the forward pass
of the next tick, so that sends overlap with compute. Where platforms may mix up their
collectives, each operation waits for the one before (`mesh.order`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.fsdp.memory_order import in_one_order
from meshpar.lowering.totals import Totals
from meshpar.mesh.order import in_turn
from meshpar.pipeline.buffers import (
    ACTIVATIONS,
    GRADIENTS,
    put_slot,
    take_slot,
    where_tree,
)
from meshpar.pipeline.phases import TickOperations
from meshpar.pipeline.stage import PipelineStage
from meshpar.schedules.ticks import ARRIVALS, GRADIENT_ARRIVALS, Columns


class Sums(NamedTuple):
    """Sums over the microbatches of one step, on one stage.

    Attributes:
      totals: loss and metrics.
      stack: gradient of this stage's layers.
      shared: gradient of embedding and head.
    """

    totals: Totals
    stack: Params
    shared: Params


class Carry(NamedTuple):
    """State of one stage between ticks; every buffer is [slots + 1, ...].

    Attributes:
      inputs: buffer of activations that have arrived.
      saved: buffer of the values that F saves for B.
      gradients: buffer of gradients that have arrived.
      dx: gradient that this stage sends next.
      states: buffer of the values that B saves for W; None if B computes the weight
        gradients.
      sums: totals and gradients so far.
    """

    inputs: Any
    saved: Any
    gradients: Any
    dx: Any
    states: Any
    sums: Sums


class Edges(NamedTuple):
    """Microbatches that embedding, head and the embedding's gradient work on."""

    embed: Array
    head: Array
    embed_backward: Array


class Row(NamedTuple):
    """One tick of one stage: a row of the schedule's tables."""

    columns: Columns
    edges: Edges


def first_row(rows: Row) -> Row:
    """The first of rows [ticks]."""
    return jax.tree.map(lambda x: x[0], rows)


def stage_input(stage: PipelineStage, row: Row, inputs: Any) -> Any:
    """The input of F: the embedding on the first stage, or a received activation."""
    columns = row.columns
    embedded = stage.embed(row.edges.embed)
    return where_tree(columns.first > 0, embedded, take_slot(inputs, columns.f_input))


def add_where(on: Array, total: Params, new: Params) -> Params:
    """Adds `new` where `on`; paths that `new` lacks keep their total."""
    return {
        path: x + jnp.where(on, new[path].astype(x.dtype), 0) if path in new else x
        for path, x in total.items()
    }


def _run_if(on: bool | Array, fn: Callable[[Any], Any], operand: Any) -> Any:
    """fn(operand), of the operand's structure, or the operand itself if not `on`."""
    if isinstance(on, bool):
        return fn(operand) if on else operand
    return lax.cond(on, fn, lambda operand: operand, operand)


@dataclasses.dataclass(frozen=True, eq=False)
class Tick:
    """Runs one tick inside shard_map.

    Attributes:
      stage: this stage's operations.
      row: its row of the schedule's tables.
      operations: which of them run.
      embeds: whether any stage reads the embedding.
      activation_steps: steps to the stages that activations go to; 0 keeps them.
      gradient_steps: the same of gradients.
      send: (value, step, why) -> the value of the stage `step` before this one.
      shares_vocabulary: whether all stages run embedding and head together.
    """

    stage: PipelineStage
    row: Row
    operations: TickOperations
    embeds: bool
    activation_steps: tuple[int, ...]
    gradient_steps: tuple[int, ...]
    send: Callable[[Any, int, str], Any]
    shares_vocabulary: bool

    def run(self, carry: Carry) -> Carry:
        """All operations of the tick, in order."""
        last = dx = carry.dx
        for step in self.gradient_steps:
            last = self.send(dx, step, GRADIENTS)
            slot = getattr(self.row.columns, GRADIENT_ARRIVALS[step])
            carry = carry._replace(gradients=put_slot(carry.gradients, slot, last))
            dx = in_turn(last, dx)
        if self.operations.forward is not False:
            carry, last = self._forward(carry, last)
        backward = functools.partial(self._backward, last)
        carry = _run_if(self.operations.backward, backward, carry)
        carry = _run_if(self.operations.weight, self._weights, carry)
        return _run_if(self.operations.embed_backward, self._embed_backward, carry)

    def _forward(self, carry: Carry, last: Any) -> tuple[Carry, Any]:
        """F, its send, and head and loss; also what the last of them computes."""
        columns = self.row.columns
        x = take_slot(carry.inputs, columns.f_input)
        if self.embeds:
            x = stage_input(self.stage, self.row, carry.inputs)
        x = in_turn(last, x)

        def forward(saved_and_x: tuple[Any, Any]) -> tuple[Any, Any]:
            buffer, x = saved_and_x
            at, slot = (columns.f_chunk, columns.f_microbatch), columns.f_saved
            y, buffer = self.stage.forward(*at, x, buffer, slot)
            return buffer, y

        saved, y = _run_if(self.operations.forward, forward, (carry.saved, x))
        carry = carry._replace(saved=saved)
        for step in self.activation_steps:
            arrived = self.send(y, step, ACTIVATIONS)
            inputs = put_slot(carry.inputs, getattr(columns, ARRIVALS[step]), arrived)
            carry, y = carry._replace(inputs=inputs), in_turn(arrived, y)
        return _run_if(self.operations.head, self._head, (carry, y))

    def _head(self, carry_and_y: tuple[Carry, Any]) -> tuple[Carry, Any]:
        carry, y = carry_and_y
        columns = self.row.columns
        on, sums = columns.last > 0, carry.sums
        totals, dy, gradient = self.stage.head(self.row.edges.head, y, on)
        sums = sums._replace(
            totals=where_tree(on, sums.totals.added(totals), sums.totals),
            shared=self._add_shared(on, sums.shared, gradient),
        )
        gradients = put_slot(carry.gradients, columns.head_gradient, dy)
        return carry._replace(gradients=gradients, sums=sums), in_turn(dy, y)

    def _add_shared(self, on: Array, total: Params, gradient: Params) -> Params:
        """Adds a gradient of the shared weights; with vocab=pipe each stage's slice."""
        every_stage = jnp.full_like(on, True)
        return add_where(every_stage if self.shares_vocabulary else on, total, gradient)

    def _backward(self, last: Any, carry: Carry) -> Carry:
        columns = self.row.columns
        chunk, microbatch = columns.b_chunk, columns.b_microbatch
        saved = self.stage.in_slot(carry.saved, columns.b_saved)
        dy = take_slot(carry.gradients, columns.b_gradient)
        if self.stage.saves_residuals:
            dy = in_turn(last, dy)
        else:  # Its layers run forward again.
            saved = in_turn(last, saved)
        if carry.states is not None:
            dx, states = self.stage.backward_input(
                chunk, microbatch, saved, dy, carry.states, columns.b_state
            )
            return carry._replace(dx=dx, states=self._in_order(states))
        dx, stack = self.stage.backward(
            chunk, microbatch, saved, dy, carry.sums.stack, columns.b_on > 0
        )
        return carry._replace(dx=dx, sums=carry.sums._replace(stack=stack))

    def _in_order(self, states: Any) -> Any:
        """Values that B saves for W; conditionals need them in one order in memory."""
        is_conditional = not isinstance(self.operations.weight, bool)
        return in_one_order(states) if is_conditional else states

    def _embed_backward(self, carry: Carry) -> Carry:
        on = self.row.columns.b_first > 0
        microbatch = self.row.edges.embed_backward
        gradient = self.stage.embed_backward(microbatch, carry.dx, on)
        shared = self._add_shared(on, carry.sums.shared, gradient)
        return carry._replace(sums=carry.sums._replace(shared=shared))

    def _weights(self, carry: Carry) -> Carry:
        """W, after B of the same tick, and before all that reads its result."""
        columns = self.row.columns
        state = self.stage.state_in_slot(carry.states, columns.w_state)
        if not self.stage.in_place:  # Out of step no collective runs in B and W.
            state = in_turn(take_slot(carry.states, columns.b_state), state)
        stack = self.stage.backward_weights(
            columns.w_chunk, state, carry.sums.stack, columns.w_on > 0
        )
        carry = carry._replace(sums=carry.sums._replace(stack=stack))
        return carry._replace(dx=self.stage.after(stack, carry.dx))
