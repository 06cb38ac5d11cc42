"""A pipeline schedule as data: in which tick every stage runs which operation.

An operation is F(m, v), the forward pass of microbatch m through chunk v of a stage's
layers, B, the backward pass, or, where a schedule splits it, W, the gradient of the
weights. A tick has one slot for each of the three, and all stages walk through the
ticks in lock step: F and B of *different* microbatches share a tick, which gives the
textbook bubble in one SPMD program.

Chunk v of stage p holds the layers of position v * num_stages + p. Pure Python: no jax.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Op(NamedTuple):
    """One operation: a microbatch through one chunk of one stage."""

    microbatch: int
    chunk: int
    stage: int


Ticks = Mapping[Op, int]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When every operation of one training step runs.

    Attributes:
      name: what it is called.
      num_stages: P, the size of the mesh axis `pipe`.
      num_microbatches: M.
      num_chunks: V, chunks of layers per stage (virtual stages).
      forward: tick of every F.
      backward: tick of every B; computes the weights' gradient too if `weight` is
        empty.
      weight: tick of every W, or empty.
      asynchronous: whether stages update their weights after every B (PipeDream); then
        all slots run in every tick.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    forward: Ticks
    backward: Ticks
    weight: Ticks = dataclasses.field(default_factory=dict)
    asynchronous: bool = False

    @property
    def num_ticks(self) -> int:
        """Ticks of one training step."""
        return 1 + max(tick for _, _, tick in self.placed())

    def ops(self) -> Iterator[Op]:
        """All operations that each of F and B has to run."""
        for microbatch in range(self.num_microbatches):
            for chunk in range(self.num_chunks):
                for stage in range(self.num_stages):
                    yield Op(microbatch, chunk, stage)

    def placed(self) -> Iterator[tuple[str, Op, int]]:
        """(kind, operation, tick) of everything that runs, kind F, B or W."""
        for kind, ticks in (("F", self.forward), ("B", self.backward)):
            yield from ((kind, op, tick) for op, tick in ticks.items())
        yield from (("W", op, tick) for op, tick in self.weight.items())

    def before(self, op: Op) -> Op | None:
        """Whose output F of this operation reads; None reads the embedding."""
        if op.stage:
            return op._replace(stage=op.stage - 1)
        if op.chunk:
            return Op(op.microbatch, op.chunk - 1, self.num_stages - 1)
        return None

    def after(self, op: Op) -> Op | None:
        """Who reads the output of F; None is the head."""
        if op.stage < self.num_stages - 1:
            return op._replace(stage=op.stage + 1)
        if op.chunk < self.num_chunks - 1:
            return Op(op.microbatch, op.chunk + 1, 0)
        return None

    def problems(self, most_in_flight: int | None = None) -> list[str]:
        """What is wrong with the schedule, one line each; empty if nothing is.

        Args:
          most_in_flight: stage inputs that a stage may keep, if that is limited.
        """
        wanted, found = set(self.ops()), []
        for kind, ticks in (("F", self.forward), ("B", self.backward)):
            found += [f"{kind}{_at(op)} is missing" for op in sorted(wanted - {*ticks})]
        if self.weight:
            missing = sorted(wanted - {*self.weight})
            found += [f"W{_at(op)} is missing" for op in missing]
        for kind, op, tick in self.placed():
            if op not in wanted:
                found.append(
                    f"{kind}{_at(op)} does not exist: stages={self.num_stages}, "
                    f"microbatches={self.num_microbatches}, chunks={self.num_chunks}"
                )
            elif not isinstance(tick, int) or tick < 0:
                found.append(f"{kind}{_at(op)} at tick {tick!r}: use 0 or more")
        if found:
            return found
        found = [*self._crowded(), *self._broken()]
        if self.asynchronous:
            found += self._late()
        if most_in_flight is not None and not found:
            for stage, kept in enumerate(self.in_flight()):
                if kept > most_in_flight:
                    found.append(
                        f"stage {stage} keeps {kept} stage inputs at once, and its "
                        f"buffer holds {most_in_flight}: run B earlier, or F later"
                    )
        return found

    def _crowded(self) -> Iterator[str]:
        """Slots with two operations."""
        taken: dict[tuple[str, int, int], Op] = {}
        for kind, op, tick in self.placed():
            other = taken.setdefault((kind, op.stage, tick), op)
            if other != op:
                yield (
                    f"tick {tick} of stage {op.stage} has {kind}{_at(other)} and "
                    f"{kind}{_at(op)}: one {kind} a tick"
                )

    def _broken(self) -> Iterator[str]:
        """Operations that run before what they read exists."""
        for op in self.ops():
            f, b = self.forward[op], self.backward[op]
            if (before := self.before(op)) and f <= self.forward[before]:
                yield (
                    f"F{_at(op)} at tick {f} reads F{_at(before)}, which arrives after "
                    f"tick {self.forward[before]}"
                )
            if (after := self.after(op)) and b <= self.backward[after]:
                yield (
                    f"B{_at(op)} at tick {b} reads B{_at(after)}, which arrives after "
                    f"tick {self.backward[after]}"
                )
            if b < f:
                yield f"B{_at(op)} at tick {b} reads its F, which runs at tick {f}"
            if self.weight and self.weight[op] < b:
                yield (
                    f"W{_at(op)} at tick {self.weight[op]} reads its B, which runs at "
                    f"tick {b}"
                )

    def _late(self) -> Iterator[str]:
        """What keeps stages from updating their weights after every B."""
        if self.weight:
            yield "weights change after every B, so W cannot be split off it"
        if self.num_chunks > 1:
            yield f"asynchronous stages have one chunk, not {self.num_chunks}"
        for op in self.ops():
            f, b = self.forward[op], self.backward[op]
            if self.after(op) is None and b != f:
                yield f"B{_at(op)} at tick {b} has to share tick {f} with its F"

    def in_flight(self) -> list[int]:
        """Most stage inputs that each stage keeps at once, from F to B inclusive."""
        most = [0] * self.num_stages
        for stage in range(self.num_stages):
            ops = [op for op in self.forward if op.stage == stage]
            for tick in range(self.num_ticks):
                kept = sum(self.forward[op] <= tick <= self.backward[op] for op in ops)
                most[stage] = max(most[stage], kept)
        return most

    def time(self, f: float = 1.0, b: float = 2.0, w: float = 0.0) -> float:
        """Duration in lock step: every tick waits for its slowest stage.

        Without W all stages run the same slots of a tick, masked where they have no
        work; with W a stage runs only its own. If asynchronous, every slot runs in
        every tick.

        Args:
          f: time of one F of a whole stage (all its chunks).
          b: of one B, likewise.
          w: of one W, likewise.
        """
        unit = {"F": f / self.num_chunks, "B": b / self.num_chunks}
        if self.asynchronous:
            return self.num_ticks * sum(unit.values())
        unit["W"] = w / self.num_chunks
        at: dict[int, dict[int, float]] = {}
        slots: dict[int, set[str]] = {}
        for kind, op, tick in self.placed():
            stages = at.setdefault(tick, {})
            stages[op.stage] = stages.get(op.stage, 0.0) + unit[kind]
            slots.setdefault(tick, set()).add(kind)
        if self.weight:
            return sum(max(stages.values()) for stages in at.values())
        return sum(unit[kind] for kinds in slots.values() for kind in kinds)

    def bubble(self) -> float:
        """Share of the time in which a stage waits, if B takes twice as long as F.

        Where W is split off, F, B and W take equally long.
        """
        times = (1.0, 1.0, 1.0) if self.weight else (1.0, 2.0, 0.0)
        return 1 - self.num_microbatches * sum(times) / self.time(*times)

    def __str__(self) -> str:
        """The schedule as text: stages down, ticks across, `F3 B1` by microbatch."""
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


def _at(op: Op) -> str:
    return f"(microbatch {op.microbatch}, chunk {op.chunk}, stage {op.stage})"
