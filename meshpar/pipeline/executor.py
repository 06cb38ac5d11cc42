"""The pipeline executor: runs any schedule as one SPMD program inside shard_map.

All stages walk through the ticks of a schedule in lock step. One tick is, in order:

    gradient arrives | embed | F | send | head and loss | B | embedding's gradient | W

Ticks in which the same slots are in use become one straight `lax.scan`: stages that
have no work compute on what lies there and mask the result, so there is no conditional,
and sends overlap with compute: an activation travels beside head and backward pass, a
gradient beside the forward pass of the next tick.

Where a schedule splits off weight gradients (zero-bubble), stages are out of step on
purpose: there each operation stands under a conditional of its own stage, in which no
collective may be (`Pipelined.check_compiled`).

Source: Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., PipeDream,
  arXiv:1806.03377 and arXiv:2104.04473. Several operations in one tick: ours.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.pipeline.buffers import (
    AXIS,
    put_slot,
    send_to_stage,
    take_slot,
    where_tree,
    zeros_like,
)
from meshpar.pipeline.stage import PipelineStage
from meshpar.schedules.ticks import Columns, Phase, Tables


class Sums(NamedTuple):
    """What a step adds up on one stage.

    Attributes:
      metrics: {name: scalar}.
      stack: gradient of this stage's layers.
      shared: gradient of embedding and head.
    """

    metrics: Params
    stack: Params
    shared: Params


class _Carry(NamedTuple):
    """What goes from tick to tick; buffers are [slots + 1, ...], the last for nothing.

    Attributes:
      inputs: activations that have arrived.
      saved: what the backward pass needs.
      gradients: gradients that have arrived.
      dx: gradient that this stage sends next.
      states: what weight gradients need that are split off; None without.
      sums: what is added up.
    """

    inputs: Any
    saved: Any
    gradients: Any
    dx: Any
    states: Any
    sums: Sums


class _Edges(NamedTuple):
    """Microbatches that embedding, head and the embedding's gradient work on."""

    embed: Array
    head: Array
    embed_backward: Array


_Row = tuple[Columns, _Edges]
"""What one stage does in one tick."""


class _Slots(NamedTuple):
    """What runs in a tick: True, False, or a flag for a conditional."""

    forward: bool | Array
    head: bool | Array
    backward: bool | Array
    embed_backward: bool | Array
    weight: bool | Array


_SLOT_COLUMNS = "f_on", "last", "b_on", "b_first", "w_on"
"""What says in the tables whether a slot of `_Slots` is used, in the same order."""


def _when(on: bool | Array, fn: Callable[..., Any], *operands: Any) -> Any:
    """fn(*operands), which has their structure, or they themselves where off."""
    if isinstance(on, bool):
        return fn(*operands) if on else operands
    return lax.cond(on, fn, lambda *operands: operands, *operands)


def _add(total: Params, new: Params, on: Array) -> Params:
    return {
        path: x + jnp.where(on, new[path].astype(x.dtype), 0) if path in new else x
        for path, x in total.items()
    }


@dataclasses.dataclass(frozen=True)
class Executor:
    """Runs the ticks of one schedule.

    Attributes:
      tables: the compiled schedule.
      num_stages: P.
      wraps: whether the last stage sends to the first one (several chunks).
      vary: marks an array as differing over the manual axes.
      uniform: one loop for all ticks, in which conditionals that all stages take
        together skip what none of them needs; less program to compile than phases.
      shares_vocabulary: whether all stages run embedding and head together, each its
        slice of the vocabulary.
    """

    tables: Tables
    num_stages: int
    wraps: bool
    vary: Callable[[Array], Array]
    uniform: bool = False
    shares_vocabulary: bool = False

    @property
    def divergent(self) -> bool:
        """Whether every stage runs its own operations, under conditionals.

        Only where W is split off: it is the stages' being out of step that fills the
        bubble.
        """
        return bool(self.tables.num_states)

    @property
    def _phases(self) -> tuple[Phase, ...]:
        """One for all ticks, where conditionals say what runs."""
        if not (self.divergent or self.uniform):
            return self.tables.phases
        stop = self.tables.phases[-1].stop
        return (Phase(0, stop, True, True, self.divergent, None),)

    def _slots(self, phase: Phase, row: Columns, used: _Slots) -> _Slots:
        """What runs in a tick of a phase; `used` says it of all stages together."""
        if self.divergent:
            return _Slots(*(getattr(row, name) > 0 for name in _SLOT_COLUMNS))
        if self.uniform:
            return used._replace(weight=False)
        head = used.head if phase.head is None else phase.head
        backward = phase.backward
        return _Slots(phase.forward, head, backward, backward, phase.weight)

    @property
    def num_sends(self) -> int:
        """Activations that a stage sends in one training step, masked ones included."""
        phases = (p for p in self._phases if self._sends(p))
        return sum(phase.stop - phase.start for phase in phases)

    @property
    def num_gradient_sends(self) -> int:
        """Gradients that a stage sends, likewise."""
        phases = (p for p in self._phases if self._receives_gradient(p))
        return sum(phase.stop - phase.start for phase in phases)

    def ticks(self, slot: str) -> int:
        """Ticks whose program holds a slot, "forward", "backward" or "head".

        Under a conditional it may be skipped there.
        """
        phases = (p for p in self._phases if getattr(p, slot) is not False)
        return sum(phase.stop - phase.start for phase in phases)

    def _sends(self, phase: Phase) -> bool:
        """Whether an activation arrives somewhere in a phase."""
        arrived = self.tables.columns.arrived[phase.start : phase.stop]
        return bool((arrived < self.tables.num_inputs).any())

    def _receives_gradient(self, phase: Phase) -> bool:
        arrived = self.tables.columns.gradient_arrived[phase.start : phase.stop]
        return bool((arrived < self.tables.num_gradients).any())

    def _send(self, x: Any, step: int) -> Any:
        return send_to_stage(x, step, self.num_stages, self.wraps)

    def _zeros(self, like: Any, *lead: int) -> Any:
        return zeros_like(like, self.vary, *lead)

    def stage_columns(self) -> Columns:
        """This stage's columns, [ticks] each."""
        stage = lax.axis_index(AXIS)

        def column(x: Any) -> Array:
            mine = lax.dynamic_index_in_dim(jnp.asarray(x), stage, 1, keepdims=False)
            return self.vary(mine)

        return jax.tree.map(column, self.tables.columns)

    def _edges(self, columns: Columns) -> _Edges:
        """Microbatches of embedding and head; those of the edges if all take part."""
        if not self.shares_vocabulary:
            forward, backward = columns.f_microbatch, columns.b_microbatch
            return _Edges(forward, forward, backward)
        c = self.tables.columns
        pairs = (
            (c.f_microbatch, c.first),
            (c.f_microbatch, c.last),
            (c.b_microbatch, c.b_first),
        )
        return _Edges(*(jnp.asarray((m * on).max(axis=1)) for m, on in pairs))

    def no_metrics(self, stage: PipelineStage, microbatch: Array) -> Params:
        """{name: 0} for every metric of a stage."""

        def metrics() -> Params:
            x = stage.embed(microbatch)
            return stage.head_metrics(microbatch, x, microbatch == 0)

        return self._zeros(jax.eval_shape(metrics))

    def train(self, stage: PipelineStage, stack: Params, shared: Params) -> Sums:
        """Runs all ticks: forward, backward, and everything added up.

        Args:
          stage: what this stage does; call inside shard_map.
          stack: zeros, to which the gradients of its layers are added.
          shared: likewise of embedding and head.
        """
        tables, columns = self.tables, self.stage_columns()
        chunk, microbatch = columns.f_chunk[0], columns.f_microbatch[0]

        def first_forward() -> tuple[Any, Any]:
            x = stage.embed(microbatch)
            return x, stage.forward(chunk, microbatch, x)[1]

        x, kept = jax.eval_shape(first_forward)
        states = None
        if self.divergent:
            states = jax.eval_shape(
                lambda: stage.backward_input(
                    chunk, microbatch, self._zeros(kept), self._zeros(x)
                )[1]
            )
            states = self._zeros(states, tables.num_states + 1)
        carry = _Carry(
            self._zeros(x, tables.num_inputs + 1),
            self._zeros(kept, tables.num_saved + 1),
            self._zeros(x, tables.num_gradients + 1),
            self._zeros(x),
            states,
            Sums(self.no_metrics(stage, microbatch), stack, shared),
        )
        edges = self._edges(columns)
        for phase in self._phases:
            ticks = slice(phase.start, phase.stop)
            rows = jax.tree.map(lambda x, ticks=ticks: x[ticks], (columns, edges))
            flags = (getattr(tables.columns, name)[ticks] for name in _SLOT_COLUMNS)
            used = _Slots(*(jnp.asarray(flag.any(axis=1)) for flag in flags))

            def tick(
                carry: _Carry, row: tuple[_Row, _Slots], phase: Phase = phase
            ) -> tuple[_Carry, None]:
                (columns, edges), used = row
                slots = self._slots(phase, columns, used)
                return self._tick(stage, phase, slots, carry, (columns, edges)), None

            carry, _ = lax.scan(tick, carry, (rows, used))
        return carry.sums

    def _tick(
        self,
        stage: PipelineStage,
        phase: Phase,
        slots: _Slots,
        carry: _Carry,
        row: _Row,
    ) -> _Carry:
        if self._receives_gradient(phase):
            came = self._send(carry.dx, -1)
            gradients = put_slot(carry.gradients, row[0].gradient_arrived, came)
            carry = carry._replace(gradients=gradients)
        if slots.forward is not False:
            carry = self._forward(stage, phase, slots, carry, row)
        for on, run in (
            (slots.backward, self._backward),
            (slots.embed_backward, self._embed_backward),
            (slots.weight, self._weights),
        ):
            run_carry = functools.partial(run, stage, row)
            (carry,) = _when(on, lambda carry, run=run_carry: (run(carry),), carry)
        return carry

    def _forward(
        self,
        stage: PipelineStage,
        phase: Phase,
        slots: _Slots,
        carry: _Carry,
        row: _Row,
    ) -> _Carry:
        columns = row[0]
        x = self._input(stage, carry.inputs, row)

        def run(saved: Any, x: Any) -> tuple[Any, Any]:
            y, kept = stage.forward(columns.f_chunk, columns.f_microbatch, x)
            return put_slot(saved, columns.f_saved, kept), y

        saved, y = _when(slots.forward, run, carry.saved, x)
        carry = carry._replace(saved=saved)
        if self._sends(phase):
            inputs = put_slot(carry.inputs, columns.arrived, self._send(y, 1))
            carry = carry._replace(inputs=inputs)
        return _when(slots.head, functools.partial(self._head, stage, row), carry, y)[0]

    def _input(self, stage: PipelineStage, inputs: Any, row: _Row) -> Any:
        columns, edges = row
        embedded = stage.embed(edges.embed)
        return where_tree(
            columns.first > 0, embedded, take_slot(inputs, columns.f_input)
        )

    def _head(
        self, stage: PipelineStage, row: _Row, carry: _Carry, y: Any
    ) -> tuple[_Carry, Any]:
        columns, edges = row
        on, sums = columns.last > 0, carry.sums
        metrics, dy, gradient = stage.head(edges.head, y, on)
        sums = sums._replace(
            metrics=_add(sums.metrics, metrics, on),
            shared=self._add_shared(sums.shared, gradient, on),
        )
        gradients = put_slot(carry.gradients, columns.head_gradient, dy)
        return carry._replace(gradients=gradients, sums=sums), y

    def _add_shared(self, total: Params, new: Params, on: Array) -> Params:
        """Adds a gradient on the stage that made it, or everyone's part of it."""
        everyone = jnp.full_like(on, True)
        return _add(total, new, everyone if self.shares_vocabulary else on)

    def _backward(self, stage: PipelineStage, row: _Row, carry: _Carry) -> _Carry:
        row = row[0]
        kept = take_slot(carry.saved, row.b_saved)
        dy = take_slot(carry.gradients, row.b_gradient)
        if carry.states is not None:
            dx, state = stage.backward_input(row.b_chunk, row.b_microbatch, kept, dy)
            return carry._replace(
                dx=dx, states=put_slot(carry.states, row.b_state, state)
            )
        dx, stack = stage.backward(
            row.b_chunk, row.b_microbatch, kept, dy, carry.sums.stack, row.b_on > 0
        )
        return carry._replace(dx=dx, sums=carry.sums._replace(stack=stack))

    def _embed_backward(self, stage: PipelineStage, row: _Row, carry: _Carry) -> _Carry:
        on = row[0].b_first > 0
        gradient = stage.embed_backward(row[1].embed_backward, carry.dx, on)
        shared = self._add_shared(carry.sums.shared, gradient, on)
        return carry._replace(sums=carry.sums._replace(shared=shared))

    def _weights(self, stage: PipelineStage, row: _Row, carry: _Carry) -> _Carry:
        row = row[0]
        state = take_slot(carry.states, row.w_state)
        stack = stage.weights(row.w_chunk, state, carry.sums.stack, row.w_on > 0)
        return carry._replace(sums=carry.sums._replace(stack=stack))

    def evaluate(self, stage: PipelineStage) -> Params:
        """Runs the forward passes alone: {name: metric} added up on the last stage."""
        tables, columns = self.tables, self.stage_columns()
        microbatch = columns.f_microbatch[0]
        zeros = self.no_metrics(stage, microbatch)
        x = jax.eval_shape(lambda: stage.embed(microbatch))
        forward = [phase for phase in tables.phases if phase.forward]
        stop = max(phase.stop for phase in forward)
        rows = jax.tree.map(lambda x: x[:stop], (columns, self._edges(columns)))

        def tick(carry: tuple[Any, Params], row: _Row) -> tuple[Any, None]:
            (inputs, metrics), (columns, edges) = carry, row
            x = self._input(stage, inputs, row)
            y = stage.run(columns.f_chunk, columns.f_microbatch, x)
            on = columns.last > 0
            new = stage.head_metrics(edges.head, y, on)
            inputs = put_slot(inputs, columns.arrived, self._send(y, 1))
            return (inputs, _add(metrics, new, on)), None

        inputs = self._zeros(x, tables.num_inputs + 1)
        return lax.scan(tick, (inputs, zeros), rows)[0][1]
