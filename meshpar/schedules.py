"""Pipeline schedules as data: GPipe, 1F1B, interleaved 1F1B, zero-bubble ZB-H1.

A schedule says in which tick every stage runs which operation: F(m, v), the forward
pass of microbatch m through its chunk v of layers, B, the backward pass, and where a
schedule splits it, W, the gradient of the weights. A tick has one slot for each of the
three, and all stages walk through the ticks in lock step: F and B of *different*
microbatches share a tick, which gives the textbook bubble in one SPMD program.

Chunk v of stage p holds the layers of position v * num_stages + p. Pure Python: no jax.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from meshpar.errors import LayoutError, nearest


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


Maker = Callable[[int, int, int], Schedule]
"""(num_stages, num_microbatches, num_chunks) -> Schedule."""


def register(name: str) -> Callable[[Maker], Maker]:
    """Makes a schedule of one's own known to layouts as `schedule=NAME`.

    @schedules.register("mine")
    def mine(num_stages, num_microbatches, num_chunks):
        return schedules.Schedule("mine", ..., forward={...}, backward={...})

    Raises:
      LayoutError: a name that is taken, or that a layout cannot say.
    """
    if name in PUBLISHED or name == "auto":
        raise LayoutError(f"schedule={name} is meshpar's own: choose another name")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise LayoutError(
            f"schedule={name!r}: a name has letters, digits, '_', '-' and '.' alone"
        )

    def add(maker: Maker) -> Maker:
        SCHEDULES[name] = maker
        return maker

    return add


def make(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Makes a registered schedule and checks it.

    Raises:
      LayoutError: no such schedule, sizes that it cannot have, or everything that is
        wrong with what its function returned.
    """
    if name not in SCHEDULES:
        raise LayoutError(f"schedule={name!r} ({nearest(name, ['auto', *SCHEDULES])})")
    made = SCHEDULES[name](num_stages, num_microbatches, num_chunks)
    sizes = made.num_stages, made.num_microbatches, made.num_chunks
    if sizes != (num_stages, num_microbatches, num_chunks):
        raise LayoutError(
            f"schedule={name} is for stages, microbatches, chunks = {sizes}, not "
            f"{(num_stages, num_microbatches, num_chunks)}"
        )
    if problems := made.problems():
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        lines = "\n  ".join([*problems[:10], *more])
        raise LayoutError(f"schedule={name} cannot run:\n  {lines}")
    return made


def _one_chunk(name: str, num_chunks: int) -> None:
    if num_chunks != 1:
        raise LayoutError(
            f"schedule={name} has one chunk of layers per stage, not virtual_stages="
            f"{num_chunks}; use schedule=interleaved, or leave virtual_stages out"
        )


def _fused(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, start: int
) -> Schedule:
    """Microbatches in rounds of num_stages, chunk by chunk; B mirrors F at `start`."""
    size = num_stages * num_chunks
    if num_chunks > 1 and num_microbatches % num_stages:
        raise LayoutError(
            f"schedule={name}: microbatches={num_microbatches} do not come in rounds "
            f"of pipe={num_stages}; use a multiple of {num_stages}, or schedule=1f1b"
        )
    forward, backward = {}, {}
    for m in range(num_microbatches):
        turn, place = divmod(m, num_stages) if num_chunks > 1 else (0, m)
        for v in range(num_chunks):
            for p in range(num_stages):
                at = turn * size + place
                op, back = Op(m, v, p), num_chunks - 1 - v
                forward[op] = at + v * num_stages + p
                backward[op] = start + at + back * num_stages + num_stages - 1 - p
    return Schedule(name, num_stages, num_microbatches, num_chunks, forward, backward)


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forward passes, then all backward passes.

    Bubble (P-1)/(M+P-1); M stage inputs in flight.

    Source: Huang et al., GPipe, arXiv:1811.06965, section 2.3.
    """
    _one_chunk("gpipe", num_chunks)
    forwards = num_microbatches + num_stages - 1
    return _fused("gpipe", num_stages, num_microbatches, 1, forwards)


def one_f_one_b(
    num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """1F1B with a flush: a microbatch goes back as soon as it has come through.

    Bubble (P-1)/(M+P-1); at most 2P-1 stage inputs in flight, whatever M is (two
    operations share a tick; one at a time it would be P).

    Source: Narayanan et al., PipeDream, arXiv:1806.03377, section 3.2 (1F1B);
      Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503 (the flush).
    """
    _one_chunk("1f1b", num_chunks)
    return _fused("1f1b", num_stages, num_microbatches, 1, num_stages - 1)


def pipedream(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The ticks of 1F1B for asynchronous training: weights change after every B.

    What this does to training stands in `meshpar.pipedream`. Bubble
    2(P-1)/(M+2(P-1)): an update after every tick leaves no phases without F or B.

    Source: Narayanan et al., PipeDream, arXiv:1806.03377, section 3.2.
    """
    _one_chunk("pipedream", num_chunks)
    fused = _fused("pipedream", num_stages, num_microbatches, 1, num_stages - 1)
    return dataclasses.replace(fused, asynchronous=True)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over several chunks of layers per stage: smaller ticks, smaller bubble.

    Bubble (P-1)/(V*M+P-1). M must be a multiple of P.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU
      Clusters, arXiv:2104.04473, section 2.2.
    """
    if num_chunks < 2:
        raise LayoutError(
            f"schedule=interleaved needs virtual_stages of at least 2, not "
            f"{num_chunks}; or use schedule=1f1b"
        )
    start = num_chunks * num_stages - 1
    return _fused("interleaved", num_stages, num_microbatches, num_chunks, start)


def zb_h1(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B whose weight gradients (W) fill the ticks that would be idle.

    Bubble (P-1)/(3M+P-1) where F, B and W take equally long; as much in flight as 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3.1.
    """
    _one_chunk("zb_h1", num_chunks)
    fused = _fused("zb_h1", num_stages, num_microbatches, 1, num_stages - 1)
    stages = range(num_stages)
    busy = [[0] * fused.num_ticks for _ in stages]
    backward: list[dict[int, Op]] = [{} for _ in stages]
    for kind, op, tick in fused.placed():
        busy[op.stage][tick] += 1
        if kind == "B":
            backward[op.stage][tick] = op
    # Room for operations per tick: as many as its busiest stage has anyway.
    room = [max(ticks) for ticks in zip(*busy, strict=True)]
    steady = [t for t in range(fused.num_ticks) if min(b[t] for b in busy) == 2]
    while True:
        weight, left = {}, 0
        for stage in stages:
            waiting: list[Op] = []
            for tick, most in enumerate(room):
                if op := backward[stage].get(tick):
                    waiting.append(op)
                used = busy[stage][tick] if tick < fused.num_ticks else 0
                if waiting and used < most:
                    weight[waiting.pop(0)] = tick
            left = max(left, len(waiting))
        if not left:
            return dataclasses.replace(fused, weight=weight)
        # Widen a tick in which every stage has F and B anyway, the latest first.
        if steady:
            room[steady.pop()] += 1
        else:
            room.append(1)


PUBLISHED: Mapping[str, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "pipedream": pipedream,
}
"""The schedules of the papers, whose bubbles have closed forms."""

SCHEDULES: dict[str, Maker] = dict(PUBLISHED)
"""What `schedule=NAME` in a layout may say; `register` adds to it."""


def formula(schedule: Schedule) -> tuple[float, str] | None:
    """The bubble in closed form: its value and how it is written.

    None for a schedule of one's own. ZB-H1 needs M >= 2P for its formula.
    """
    if schedule.name not in PUBLISHED:
        return None
    waves = 3 if schedule.weight else schedule.num_chunks
    edge = schedule.num_stages - 1
    waves_text = "M" if waves == 1 else f"{waves}M"
    text = f"(P-1)/({waves_text}+P-1)"
    if schedule.asynchronous:
        edge, text = 2 * edge, "2(P-1)/(M+2(P-1))"
    return edge / (waves * schedule.num_microbatches + edge), text
