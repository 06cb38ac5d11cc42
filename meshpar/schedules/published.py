"""Pipeline schedules: GPipe, 1F1B, interleaved 1F1B, ZB-H1, PipeDream, and one's own.

Each is a function that fills in a `Schedule` (`meshpar.schedule_table`).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from meshpar.errors import LayoutError, nearest
from meshpar.schedules.table import Op, Schedule

__all__ = [
    "PUBLISHED",
    "SCHEDULES",
    "Op",
    "Schedule",
    "formula",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "pipedream",
    "register",
    "zb_h1",
]

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


def make_schedule(
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
