"""The pipeline executor: runs any schedule as one SPMD program inside shard_map.

All stages walk through the ticks of a schedule in lock step (`tick`). Ticks with the
same operations become one `lax.scan` without conditionals (`phases`): idle stages
compute on stale buffers and mask the result.

Schedules that split off weight gradients (zero-bubble) let stages run different
operations in one tick. There each operation stands under a conditional of its stage, in
which no collective may be (`PipelineRunner.check_compiled`). Layouts that need some run
these schedules in lock step as well (`schedules.in_lock_step`).

Source: Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., PipeDream,
  arXiv:1806.03377 and arXiv:2104.04473. Several operations in one tick: ours.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.layouts.axes import PIPE
from meshpar.lowering.totals import Totals
from meshpar.pipeline.buffers import (
    ACTIVATIONS,
    put_slot,
    send_to_stage,
    where_tree,
    zeros_like,
)
from meshpar.pipeline.phases import TickLoop, TickOperations
from meshpar.pipeline.stage import PipelineStage
from meshpar.pipeline.tick import (
    Carry,
    Edges,
    Row,
    Sums,
    Tick,
    first_row,
    stage_input,
)
from meshpar.schedules.ticks import ARRIVALS, Columns, Phase


@dataclasses.dataclass(frozen=True)
class Executor:
    """Runs the ticks of one schedule.

    Attributes:
      loop: the schedule's ticks, by phases.
      evaluation: the ticks of which the forward passes evaluate.
      num_stages: P.
      wraps: whether the last stage sends to the first one (several chunks in rounds).
      vary: marks an array as differing over the manual axes.
      shares_vocabulary: whether all stages run embedding and head together, each on its
        slice of the vocabulary.
    """

    loop: TickLoop
    evaluation: TickLoop
    num_stages: int
    wraps: bool
    vary: Callable[[Array], Array]
    shares_vocabulary: bool = False

    def _send(self, x: Any, step: int, what: str) -> Any:
        return send_to_stage(x, step, self.num_stages, what, self.wraps)

    def _zeros(self, like: Any, *lead: int) -> Any:
        return zeros_like(like, self.vary, *lead)

    def rows(self, loop: TickLoop) -> Row:
        """This stage's columns of the tables, and its edges, [ticks] each."""
        stage = lax.axis_index(PIPE)

        def column(x: Any) -> Array:
            x = lax.dynamic_index_in_dim(jnp.asarray(x), stage, 1, keepdims=False)
            return self.vary(x)

        columns = jax.tree.map(column, loop.tables.columns)
        return Row(columns, self._edges(loop, columns))

    def _edges(self, loop: TickLoop, columns: Columns) -> Edges:
        """Microbatches of embedding and head, [ticks] each.

        With vocab=pipe all stages work on the microbatch of the first or last stage.
        """
        if not self.shares_vocabulary:
            forward, backward = columns.f_microbatch, columns.b_microbatch
            return Edges(forward, forward, backward)
        table = loop.tables.columns
        pairs = (
            (table.f_microbatch, table.first),
            (table.f_microbatch, table.last),
            (table.b_microbatch, table.b_first),
        )
        return Edges(
            *(jnp.asarray((microbatch * on).max(axis=1)) for microbatch, on in pairs)
        )

    def empty_totals(self, stage: PipelineStage, row: Row) -> Totals:
        """The totals of a stage before its first microbatch.

        Args:
          stage: its operations.
          row: of a tick; only shapes matter.
        """
        on, microbatch = row.columns.last > 0, row.edges.head

        def totals() -> Totals:
            return stage.head_totals(microbatch, stage.embed(microbatch), on)

        return jax.tree.map(self.vary, jax.eval_shape(totals).empty())

    def train(self, stage: PipelineStage, stack: Params, shared: Params) -> Sums:
        """Runs all ticks of a training step; call inside shard_map.

        Args:
          stage: this stage's operations.
          stack: zeros, to which the gradients of its layers are added.
          shared: zeros, to which the gradients of embedding and head are added.

        Returns:
          Totals and gradients, summed over the microbatches.
        """
        rows = self.rows(self.loop)
        carry = self._first_carry(stage, first_row(rows), stack, shared)
        for phase in self.loop.phases:
            ticks = slice(phase.start, phase.stop)
            phase_rows = jax.tree.map(lambda x, ticks=ticks: x[ticks], rows)
            used = TickOperations(*map(jnp.asarray, self.loop.used_operations(phase)))
            tick = functools.partial(self._tick, stage, phase)
            each = phase_rows, used
            if phase.stop - phase.start == 1 and self.loop.tables.num_states:
                # Where W is split off, compilers for TPUs run parts of a loop of one
                # round twice. Elsewhere they do not, and a loop takes less memory.
                carry, _ = tick(carry, jax.tree.map(lambda x: x[0], each))
            else:
                carry, _ = lax.scan(tick, carry, each)
        return carry.sums

    def _first_carry(
        self, stage: PipelineStage, row: Row, stack: Params, shared: Params
    ) -> Carry:
        """Empty buffers, and the sums to start from."""
        tables = self.loop.tables
        chunk, microbatch = row.columns.f_chunk, row.columns.f_microbatch

        def forward() -> tuple[Any, Any]:
            x = stage.embed(microbatch)
            return x, stage.saved(chunk, microbatch, x)

        x, saved = jax.eval_shape(forward)
        states = None
        if tables.num_states:
            states = jax.eval_shape(
                lambda: stage.state(
                    chunk, microbatch, self._zeros(saved), self._zeros(x)
                )
            )
            states = self._zeros(states, tables.num_states + 1)
        return Carry(
            self._zeros(x, tables.num_inputs + 1),
            self._zeros(saved, tables.num_saved + 1),
            self._zeros(x, tables.num_gradients + 1),
            self._zeros(x),
            states,
            Sums(self.empty_totals(stage, row), stack, shared),
        )

    def _tick(
        self,
        stage: PipelineStage,
        phase: Phase,
        carry: Carry,
        xs: tuple[Row, TickOperations],
    ) -> tuple[Carry, None]:
        """One iteration of a phase's scan."""
        row, used = xs
        tick = Tick(
            stage=stage,
            row=row,
            operations=self.loop.operations(phase, row.columns, used),
            embeds=self.loop.embeds(phase),
            activation_steps=self.loop.activation_steps(phase),
            gradient_steps=self.loop.gradient_steps(phase),
            send=self._send,
            shares_vocabulary=self.shares_vocabulary,
        )
        return tick.run(carry), None

    def evaluate(self, stage: PipelineStage) -> Totals:
        """Runs the forward passes alone; totals, summed on the last stage."""
        loop = self.evaluation
        rows = self.rows(loop)
        first = first_row(rows)
        empty = self.empty_totals(stage, first)
        x = jax.eval_shape(lambda: stage.embed(first.columns.f_microbatch))
        stop = loop.num_forward_ticks
        steps = loop.activation_steps(loop.phases[0]._replace(start=0, stop=stop))
        rows = jax.tree.map(lambda x: x[:stop], rows)

        def tick(carry: tuple[Any, Totals], row: Row) -> tuple[Any, None]:
            (inputs, totals), columns = carry, row.columns
            x = stage_input(stage, row, inputs)
            y = stage.run(columns.f_chunk, columns.f_microbatch, x)
            on = columns.last > 0
            new = totals.added(stage.head_totals(row.edges.head, y, on))
            for step in steps:
                arrived = self._send(y, step, ACTIVATIONS)
                inputs = put_slot(inputs, getattr(columns, ARRIVALS[step]), arrived)
            return (inputs, where_tree(on, new, totals)), None

        inputs = self._zeros(x, loop.tables.num_inputs + 1)
        return lax.scan(tick, (inputs, empty), rows)[0][1]
