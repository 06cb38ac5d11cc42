"""A pipeline schedule as a table: the operation of every stage in every tick.

F(m, v) is the forward pass of microbatch m through chunk v of a stage's layers, and B
its backward pass. W is the gradient of the weights, where a schedule splits it off B. A
tick has one slot for each of F, B and W, and all stages walk through the ticks in lock
step. F and B of *different* microbatches may share a tick, which gives the textbook
bubble in one SPMD program.

Chunk v (a virtual stage) of stage p is virtual stage v * num_stages + p of the model;
folded schedules turn every other round of chunks around. Pure Python: no jax.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Op(NamedTuple):
    """One operation: a microbatch through one chunk of one stage."""

    microbatch: int
    chunk: int
    stage: int


def place(virtual_stage: int, num_stages: int, folded: bool) -> tuple[int, int]:
    """(chunk, stage) of a virtual stage.

    Args:
      virtual_stage: its number in the order of the model.
      num_stages: P.
      folded: whether chunks of odd numbers go from the last stage back to the first.
    """
    chunk, stage = divmod(virtual_stage, num_stages)
    return chunk, num_stages - 1 - stage if folded and chunk % 2 else stage


Ticks = Mapping[Op, int]
"""The tick in which each operation runs."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the tick of every operation of one training step.

    Attributes:
      name: as in `schedule=NAME` of a layout.
      num_stages: P, the size of the mesh axis `pipe`.
      num_microbatches: M.
      num_chunks: V, chunks of layers per stage (virtual stages).
      forward: tick of every F.
      backward: tick of every B.
      weight: tick of every W; empty if B computes the weights' gradient as well.
      asynchronous: whether stages update their weights after every B (PipeDream); all
        slots then run in every tick.
      folded: whether chunks of odd numbers go from the last stage back to the first
        one, so that chunks 0 and 1 make a V.
      in_lock_step: whether every stage runs all slots that any stage uses in a tick,
        masked, W too. Otherwise stages that split W off run their own operations alone.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    forward: Ticks
    backward: Ticks
    weight: Ticks = dataclasses.field(default_factory=dict)
    asynchronous: bool = False
    folded: bool = False
    in_lock_step: bool = False

    @property
    def diverges(self) -> bool:
        """Whether stages run different slots in one tick."""
        return bool(self.weight) and not self.in_lock_step

    @functools.cached_property
    def num_ticks(self) -> int:
        """Ticks of one training step."""
        return 1 + max(tick for _, _, tick in self.placed())

    def ops(self) -> Iterator[Op]:
        """Every operation of F, in order; B runs the same ones."""
        for microbatch in range(self.num_microbatches):
            for chunk in range(self.num_chunks):
                for stage in range(self.num_stages):
                    yield Op(microbatch, chunk, stage)

    def placed(self) -> Iterator[tuple[str, Op, int]]:
        """Generates (kind, operation, tick) of all operations; kinds are F, B and W."""
        for kind, ticks in (("F", self.forward), ("B", self.backward)):
            yield from ((kind, op, tick) for op, tick in ticks.items())
        yield from (("W", op, tick) for op, tick in self.weight.items())

    def op(self, microbatch: int, virtual_stage: int) -> Op:
        """The operation of a microbatch on a virtual stage."""
        return Op(microbatch, *place(virtual_stage, self.num_stages, self.folded))

    def _beside(self, op: Op, step: int) -> Op | None:
        """The operation on the virtual stage `step` after this one, if there is one."""
        other = self._virtual[op.chunk, op.stage] + step
        if not 0 <= other < len(self._places):
            return None
        return Op(op.microbatch, *self._places[other])

    @functools.cached_property
    def _places(self) -> list[tuple[int, int]]:
        """(chunk, stage) of each virtual stage."""
        virtual = range(self.num_chunks * self.num_stages)
        return [place(stage, self.num_stages, self.folded) for stage in virtual]

    @functools.cached_property
    def _virtual(self) -> dict[tuple[int, int], int]:
        """{(chunk, stage): virtual stage}."""
        return {place: virtual for virtual, place in enumerate(self._places)}

    def before(self, op: Op) -> Op | None:
        """The operation whose output this F reads; None if it is the embedding."""
        return self._beside(op, -1)

    def after(self, op: Op) -> Op | None:
        """The operation that reads the output of this F; None if it is the head."""
        return self._beside(op, 1)

    def in_flight(self) -> list[int]:
        """Most stage inputs that each stage holds at once, from F to B inclusive."""
        most = [0] * self.num_stages
        for stage in range(self.num_stages):
            ops = [op for op in self.forward if op.stage == stage]
            for tick in range(self.num_ticks):
                held = sum(self.forward[op] <= tick <= self.backward[op] for op in ops)
                most[stage] = max(most[stage], held)
        return most

    def time(self, f: float = 1.0, b: float = 2.0, w: float = 0.0) -> float:
        """Duration of a step in lock step: every tick waits for its slowest stage.

        All stages run the same slots of a tick, masked where they have no work; a stage
        that diverges runs its own operations alone. If asynchronous, every slot runs in
        every tick.

        Args:
          f: time of one F through a whole stage (all its chunks), in any unit.
          b: time of one B through a whole stage.
          w: time of one W through a whole stage.

        Returns:
          The duration, in the unit of the arguments.
        """
        unit = {"F": f / self.num_chunks, "B": b / self.num_chunks}
        if self.asynchronous:
            return self.num_ticks * sum(unit.values())
        unit["W"] = w / self.num_chunks
        if not self.diverges:
            kinds = {"F": self.forward, "B": self.backward, "W": self.weight}
            return sum(unit[kind] * len({*at.values()}) for kind, at in kinds.items())
        at: dict[int, dict[int, float]] = {}
        for kind, op, tick in self.placed():
            stages = at.setdefault(tick, {})
            stages[op.stage] = stages.get(op.stage, 0.0) + unit[kind]
        return sum(max(stages.values()) for stages in at.values())

    def bubble(self) -> float:
        """Share of the step in which a stage waits, between 0 and 1.

        B takes twice as long as F; where W is split off, F, B and W take equally long.
        """
        times = (1.0, 1.0, 1.0) if self.weight else (1.0, 2.0, 0.0)
        return 1 - self.num_microbatches * sum(times) / self.time(*times)

    def __str__(self) -> str:
        """The schedule as text: one row per stage, one column per tick.

        "F3 B1" runs F of microbatch 3 and B of microbatch 1; a letter names the chunk.
        """
        cells: dict[tuple[int, int], list[str]] = {}
        for kind, op, tick in self.placed():
            chunk = chr(ord("a") + op.chunk) if self.num_chunks > 1 else ""
            cell = cells.setdefault((op.stage, tick), [])
            cell.append(f"{kind}{op.microbatch}{chunk}")
        texts = {at: " ".join(cell) for at, cell in cells.items()}
        width = max(map(len, texts.values()))
        rows = []
        for stage in range(self.num_stages):
            row = (
                texts.get((stage, t), "").ljust(width) for t in range(self.num_ticks)
            )
            rows.append(f"{stage:2} |" + "|".join(row) + "|")
        return "\n".join(rows)
