"""Pipeline schedules: GPipe, 1F1B, interleaved 1F1B, ZB-H1, PipeDream and custom ones.

Each is a function that returns a `Schedule` (`meshpar/schedules/table.py`).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from meshpar.errors import LayoutError, nearest, shown
from meshpar.schedules.check import problems
from meshpar.schedules.table import Op, Schedule

Maker = Callable[[int, int, int], Schedule]
"""(num_stages, num_microbatches, num_chunks) -> Schedule."""


MAX_PASSES = 2**16
"""Most forward passes of a schedule, which is a table with a row for each of them."""


def register(name: str) -> Callable[[Maker], Maker]:
    """Registers a custom schedule, so that a layout can ask for `schedule=NAME`.

        @schedules.register("custom")
        def custom(num_stages, num_microbatches, num_chunks):
            sizes = num_stages, num_microbatches, num_chunks
            return schedules.Schedule("custom", *sizes, forward={...}, backward={...})

    Args:
      name: letters, digits, "_", "-" and "."; a custom name may be registered again.

    Returns:
      A decorator for a function (num_stages, num_microbatches, num_chunks) -> Schedule.

    Raises:
      LayoutError: the name is one of meshpar's own, or cannot stand in a layout.
    """
    if name in PUBLISHED or name == "auto":
        raise LayoutError(f"schedule={name} is one of meshpar's: use another name")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise LayoutError(
            f"schedule={name!r}: use a name of letters, digits, '_', '-' and '.' only"
        )

    def add(maker: Maker) -> Maker:
        SCHEDULES[name] = maker
        return maker

    return add


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Makes a registered schedule and checks it.

    Args:
      name: a key of `SCHEDULES`.
      num_stages: P, the size of the pipe axis.
      num_microbatches: M.
      num_chunks: V, chunks of layers per stage (virtual stages).

    Raises:
      LayoutError: an unknown name, sizes that the schedule does not support, or a table
        that cannot run, with its problems.
    """
    if name not in SCHEDULES:
        known = nearest(shown(name), ["auto", *SCHEDULES])
        raise LayoutError(f"schedule={shown(name)!r} ({known})")
    passes = num_stages * num_microbatches * num_chunks
    if passes > MAX_PASSES:
        raise LayoutError(
            f"pipe={num_stages}, microbatches={num_microbatches}, virtual_stages="
            f"{num_chunks} are {passes:,} forward passes of a chunk per step; use "
            f"sizes whose product is at most {MAX_PASSES:,}"
        )
    schedule = SCHEDULES[name](num_stages, num_microbatches, num_chunks)
    sizes = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    if sizes != (num_stages, num_microbatches, num_chunks):
        raise LayoutError(
            f"schedule={name} returned a table for (stages, microbatches, chunks) = "
            f"{sizes}, not {(num_stages, num_microbatches, num_chunks)}"
        )
    if lines := problems(schedule):
        more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
        text = "\n  ".join([*lines[:10], *more])
        raise LayoutError(f"schedule={name} cannot run:\n  {text}")
    return schedule


def _check_one_chunk(name: str, num_chunks: int) -> None:
    if num_chunks != 1:
        raise LayoutError(
            f"schedule={name} has one chunk of layers per stage, not virtual_stages="
            f"{num_chunks}; use schedule=interleaved, or leave virtual_stages out"
        )


def _fused(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, start: int
) -> Schedule:
    """Runs microbatches in rounds of num_stages, chunk by chunk; B mirrors F.

    The first B runs in tick `start`.
    """
    size = num_stages * num_chunks
    if num_chunks > 1 and num_microbatches % num_stages:
        raise LayoutError(
            f"schedule={name}: microbatches={num_microbatches} is not a multiple of "
            f"pipe={num_stages}; use a multiple of {num_stages}, or schedule=1f1b"
        )
    forward, backward = {}, {}
    for m in range(num_microbatches):
        turn, offset = divmod(m, num_stages) if num_chunks > 1 else (0, m)
        for v in range(num_chunks):
            for p in range(num_stages):
                begin = turn * size + offset
                op, back = Op(m, v, p), num_chunks - 1 - v
                forward[op] = begin + v * num_stages + p
                backward[op] = start + begin + back * num_stages + num_stages - 1 - p
    return Schedule(name, num_stages, num_microbatches, num_chunks, forward, backward)


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """GPipe: all forward passes, then all backward passes.

    Bubble (P-1)/(M+P-1). A stage holds M stage inputs.

    Source: Huang et al., GPipe, arXiv:1811.06965, section 2.3.
    """
    _check_one_chunk("gpipe", num_chunks)
    forwards = num_microbatches + num_stages - 1
    return _fused("gpipe", num_stages, num_microbatches, 1, forwards)


def one_f_one_b(
    num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """1F1B with a flush: B of a microbatch starts as soon as its F passes are done.

    Bubble (P-1)/(M+P-1). A stage holds at most 2P-1 stage inputs for any M; P would do
    if F and B did not share ticks.

    Source: Narayanan et al., PipeDream, arXiv:1806.03377, section 3.2 (1F1B);
      Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503 (the flush).
    """
    _check_one_chunk("1f1b", num_chunks)
    return _fused("1f1b", num_stages, num_microbatches, 1, num_stages - 1)


def pipedream(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """PipeDream: the ticks of 1F1B, with an update of the weights after every B.

    Bubble 2(P-1)/(M+2(P-1)), because every tick runs F, B and an update.
    `meshpar/pipeline/pipedream.py` explains the staleness.

    Source: Narayanan et al., PipeDream, arXiv:1806.03377, section 3.2.
    """
    _check_one_chunk("pipedream", num_chunks)
    fused = _fused("pipedream", num_stages, num_microbatches, 1, num_stages - 1)
    return dataclasses.replace(fused, asynchronous=True)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B: several chunks of layers per stage, for a smaller bubble.

    Bubble (P-1)/(V*M+P-1). V is at least 2 and M a multiple of P.

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
    """ZB-H1 (zero bubble): 1F1B whose weight gradients (W) fill the idle ticks.

    Bubble (P-1)/(3M+P-1) for M >= 2P, if F, B and W take equally long. A stage holds as
    many stage inputs as with 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3.1.
    """
    _check_one_chunk("zb_h1", num_chunks)
    fused = _fused("zb_h1", num_stages, num_microbatches, 1, num_stages - 1)
    stages = range(num_stages)
    busy = [[0] * fused.num_ticks for _ in stages]
    backward: list[dict[int, Op]] = [{} for _ in stages]
    for kind, op, tick in fused.placed():
        busy[op.stage][tick] += 1
        if kind == "B":
            backward[op.stage][tick] = op
    # Number of operations that a tick has room for: those of its busiest stage.
    room = [max(counts) for counts in zip(*busy, strict=True)]
    steady = [t for t in range(fused.num_ticks) if min(b[t] for b in busy) == 2]
    order = list(stages)
    while True:
        filled: dict[int, dict[Op, int]] = {}
        for stage in order:
            filled[stage] = _fill_with_weights(backward[stage], busy[stage], room)
            if len(filled[stage]) < len(backward[stage]):
                break
        else:
            weight = {op: t for stage in stages for op, t in filled[stage].items()}
            return dataclasses.replace(fused, weight=weight)
        # The stage that lacks room is likely to lack it again.
        order.remove(stage)
        order.insert(0, stage)
        # Widen the latest tick in which every stage runs F and B, else add a tick.
        if steady:
            room[steady.pop()] += 1
        else:
            room.append(1)


def _fill_with_weights(
    backward: Mapping[int, Op], busy: Sequence[int], room: Sequence[int]
) -> dict[Op, int]:
    """Ticks for the W of one stage: the first after its B that has room.

    Args:
      backward: {tick: B} of the stage.
      busy: number of operations that the stage runs in each tick.
      room: number of operations that each tick has room for; at least as long.
    """
    weight: dict[Op, int] = {}
    waiting: list[Op] = []
    for tick, most in enumerate(room):
        if op := backward.get(tick):
            waiting.append(op)
        used = busy[tick] if tick < len(busy) else 0
        if waiting and used < most:
            weight[waiting.pop(0)] = tick
    return weight


PUBLISHED: Mapping[str, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "pipedream": pipedream,
}
"""Schedules from papers; their bubbles have closed forms."""

SCHEDULES: dict[str, Maker] = dict(PUBLISHED)
"""Schedules that a layout can ask for by `schedule=NAME`; `register` adds to them."""


def formula(schedule: Schedule) -> tuple[float, str] | None:
    """The bubble in closed form: (value, text such as "(P-1)/(M+P-1)").

    None for custom schedules. The formula of ZB-H1 holds for M >= 2P.
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
