"""Phases of a pipeline's ticks: which operations a scan holds, and what stages send.

A phase is a run of consecutive ticks that one `lax.scan` executes. Everything here
follows from the tables of the schedule alone; no array is computed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshpar.schedules.ticks import (
    ARRIVALS,
    GRADIENT_ARRIVALS,
    Columns,
    Phase,
    Tables,
)

_OPERATION_COLUMNS = "f_on", "last", "b_on", "b_first", "w_on"
"""Columns that say whether a stage runs each of `TickOperations`, in their order."""


class TickOperations(NamedTuple):
    """Whether each operation of a tick runs: True, False or a flag for a conditional.

    Attributes:
      forward: F.
      head: head and loss after F.
      backward: B.
      embed_backward: the embedding's gradient after B.
      weight: W.
    """

    forward: Any
    head: Any
    backward: Any
    embed_backward: Any
    weight: Any


@dataclasses.dataclass(frozen=True)
class TickLoop:
    """The scans that execute the ticks of one schedule.

    Attributes:
      tables: the compiled schedule.
      uniform: one scan for all ticks, with conditionals around the operations that no
        stage runs in a tick; it compiles faster than one scan per phase.
    """

    tables: Tables
    uniform: bool = False

    @property
    def divergent(self) -> bool:
        """Whether each stage takes conditionals of its own.

        Such schedules fill the bubble with operations that other stages do not run in
        the same tick.
        """
        return self.tables.diverges

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, one per scan; a single one where conditionals select."""
        if not (self.divergent or self.uniform):
            return self.tables.phases
        stop = self.tables.phases[-1].stop
        return (Phase(0, stop, True, True, bool(self.tables.num_states), None),)

    @property
    def in_place(self) -> bool:
        """Whether layers write what they save into its buffer, and read it there.

        Not where stages in lock step split off W. Their ticks may stand outside of
        loops, where compilers copy the whole buffer from tick to tick.
        """
        return self.divergent or not self.tables.num_states

    @property
    def num_forward_ticks(self) -> int:
        """Ticks up to the last F, which evaluation runs."""
        return max(phase.stop for phase in self.tables.phases if phase.forward)

    def used_operations(self, phase: Phase) -> TickOperations:
        """Bools [ticks of the phase]: whether any stage runs an operation."""
        columns = (getattr(self.tables.columns, name) for name in _OPERATION_COLUMNS)
        return TickOperations(
            *(c[phase.start : phase.stop].any(axis=1) for c in columns)
        )

    def operations(
        self, phase: Phase, columns: Columns, used: TickOperations
    ) -> TickOperations:
        """Operations of one tick.

        Args:
          phase: the phase of the tick.
          columns: flags and numbers of one stage in the tick, traced.
          used: one row of `used_operations`, traced.
        """
        if self.divergent:
            return TickOperations(
                *(getattr(columns, name) > 0 for name in _OPERATION_COLUMNS)
            )
        if self.uniform:
            return used if self.tables.num_states else used._replace(weight=False)
        head = used.head if phase.head is None else phase.head
        backward = phase.backward
        return TickOperations(phase.forward, head, backward, backward, phase.weight)

    def embeds(self, phase: Phase) -> bool:
        """Whether some stage reads the embedding in a phase."""
        first = self.tables.columns.first[phase.start : phase.stop]
        return bool(first.any())

    def activation_steps(self, phase: Phase) -> tuple[int, ...]:
        """Steps from stages to those that receive their activations in a phase."""
        return self._steps(phase, ARRIVALS, self.tables.num_inputs)

    def gradient_steps(self, phase: Phase) -> tuple[int, ...]:
        """Steps from stages to those that receive their gradients in a phase."""
        return self._steps(phase, GRADIENT_ARRIVALS, self.tables.num_gradients)

    def _steps(
        self, phase: Phase, arrivals: Mapping[int, str], nowhere: int
    ) -> tuple[int, ...]:
        ticks, columns = slice(phase.start, phase.stop), self.tables.columns
        at = {step: getattr(columns, name)[ticks] for step, name in arrivals.items()}
        return tuple(step for step, slots in at.items() if (slots < nowhere).any())

    @property
    def num_activation_sends(self) -> int:
        """Activations that one stage sends per training step, masked ones included."""
        return self._count_sends(self.activation_steps)

    @property
    def num_gradient_sends(self) -> int:
        """Gradients that one stage sends per training step, masked ones included."""
        return self._count_sends(self.gradient_steps)

    def _count_sends(self, steps: Callable[[Phase], tuple[int, ...]]) -> int:
        """Sends to other stages; a step of 0 keeps a value."""
        return sum(
            (phase.stop - phase.start) * sum(map(bool, steps(phase)))
            for phase in self.phases
        )

    def count_ticks(self, slot: str) -> int:
        """Ticks whose program holds "forward", "backward" or "head".

        Ticks that skip the operation under a conditional count, too.
        """
        return self._count_ticks(lambda phase: getattr(phase, slot) is not False)

    @property
    def num_backward_buffers(self) -> int:
        """Backward passes whose recomputed residuals have memory at the same time.

        A compiler unrolls a phase of one tick. It may give memory to its residuals
        before the loop of an earlier phase begins (`stage_memory.backward_buffers`).
        """
        ticks = [phase.stop - phase.start for phase in self.phases if phase.backward]
        return ticks.count(1) + any(count > 1 for count in ticks)

    @property
    def runs_head_beside_layers(self) -> bool:
        """Whether all stages run the head, and layers backward, in one tick."""
        return any(
            phase.head is True and phase.backward is True for phase in self.phases
        )

    @property
    def runs_both_ways(self) -> bool:
        """Whether some ticks run layers forward and backward."""
        return any(phase.forward and phase.backward for phase in self.phases)

    def _count_ticks(self, condition: Callable[[Phase], bool]) -> int:
        phases = (phase for phase in self.phases if condition(phase))
        return sum(phase.stop - phase.start for phase in phases)
