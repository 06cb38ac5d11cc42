"""Zero-bubble schedules: W, the gradients of the weights, is split off B.

ZB-H1 runs W in idle ticks of 1F1B. ZB-H2, ZB-V and DualPipeV run one operation per tick
on every stage, each stage its own; ZB-V and DualPipeV fold the model into a V, so that
the first stage also has the last layers. Stages that run different operations in a tick
may not take part in one collective. `in_lock_step` gives the form for such programs.

In one step that all stages begin and end together, no schedule waits less than P-1
passes of a chunk: until then the last stage has nothing to do.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from meshpar.errors import LayoutError
from meshpar.schedules.fused import check_one_chunk, fused, one_f_one_b
from meshpar.schedules.table import Op, Schedule


def zb_h1(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """ZB-H1 (zero bubble): 1F1B whose weight gradients (W) fill the idle ticks.

    Bubble (P-1)/(3M+P-1) for M >= 2P, if F, B and W take equally long. A stage holds as
    many stage inputs as with 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3.1.
    """
    check_one_chunk("zb_h1", num_chunks)
    ticks = fused("zb_h1", num_stages, num_microbatches, 1, num_stages - 1)
    stages = range(num_stages)
    busy = [[0] * ticks.num_ticks for _ in stages]
    backward: list[dict[int, Op]] = [{} for _ in stages]
    for kind, op, tick in ticks.placed():
        busy[op.stage][tick] += 1
        if kind == "B":
            backward[op.stage][tick] = op
    # Number of operations that a tick has room for: those of its busiest stage.
    room = [max(counts) for counts in zip(*busy, strict=True)]
    steady = [t for t in range(ticks.num_ticks) if min(b[t] for b in busy) == 2]
    order = list(stages)
    while True:
        filled: dict[int, dict[Op, int]] = {}
        for stage in order:
            filled[stage] = _fill_with_weights(backward[stage], busy[stage], room)
            if len(filled[stage]) < len(backward[stage]):
                break
        else:
            weight = {op: t for stage in stages for op, t in filled[stage].items()}
            return dataclasses.replace(ticks, weight=weight)
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


def zb_h2(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """ZB-H2: one operation per tick, with more forward passes before the first B.

    Bubble (P-1)/(3M+P-1) for M >= 2P-1. A stage holds what 2P-1 microbatches need, from
    F to W.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3.2.
    """
    check_one_chunk("zb_h2", num_chunks)
    shape = Schedule("zb_h2", num_stages, num_microbatches, 1, {}, {})
    return _listed(shape, 2 * num_stages - 1)


def zb_v(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """ZB-V: two chunks per stage in a V, one operation per tick.

    Bubble (P-1)/(6M+P-1) for M >= 2P. A stage holds what 2P passes of a chunk need, as
    much as with 1F1B, or up to P more where the bubble would be larger.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362,
      section 3; Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 6.
    """
    shape = _folded("zb_v", num_stages, num_microbatches, num_chunks)
    least = 6 * num_microbatches + num_stages - 1
    best = _listed(shape, 2 * num_stages)
    for most in range(2 * num_stages + 1, 3 * num_stages + 1):
        if best.num_ticks == least:
            break
        best = min(best, _listed(shape, most), key=lambda s: s.num_ticks)
    return best


def dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """DualPipeV: two chunks per stage in a V, in the order of DualPipe's halves.

    Bubble (P-1)/(6M+P-1), as W is split off every B. M is at least 2P. A stage holds
    what 2P+1 passes of a chunk need.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.2.1
      (DualPipe); Qi et al., DualPipe could be better without the dual, 2025 (the V).
    """
    shape = _folded("dualpipe_v", num_stages, num_microbatches, num_chunks)
    if num_microbatches < 2 * num_stages:
        raise LayoutError(
            f"schedule=dualpipe_v: microbatches={num_microbatches} are fewer than "
            f"2*pipe={2 * num_stages}; use more, or schedule=zb_v"
        )
    orders = [_dualpipe_order(shape, stage) for stage in range(num_stages)]
    return _in_order(shape, orders)


def _folded(name: str, num_stages: int, num: int, num_chunks: int) -> Schedule:
    """An empty schedule of two chunks per stage in a V."""
    if num_chunks != 2:
        raise LayoutError(
            f"schedule={name} has two chunks of layers per stage, not virtual_stages="
            f"{num_chunks}; leave virtual_stages out"
        )
    return Schedule(name, num_stages, num, 2, {}, {}, folded=True)


Pass = tuple[str, Op]
"""(F, B or W, its operation)."""


class _Clock:
    """Places operations tick by tick, at most one per stage and tick.

    Attributes:
      shape: the sizes of the schedule.
      done: {kind: {operation: its tick}}.
      tick: the present one.
    """

    def __init__(self, shape: Schedule):
        self.shape = shape
        self.done: dict[str, dict[Op, int]] = {"F": {}, "B": {}, "W": {}}
        self.tick = 0

    def is_ready(self, kind: str, op: Op) -> bool:
        """Whether all that an operation reads was there before this tick."""
        needed = [("F", op)] if kind == "B" else [("B", op)] if kind == "W" else []
        if kind == "F" and (before := self.shape.before(op)):
            needed.append(("F", before))
        if kind == "B" and (after := self.shape.after(op)):
            needed.append(("B", after))
        ticks = (self.done[other].get(x, self.tick) for other, x in needed)
        return all(tick < self.tick for tick in ticks)

    def place(self, chosen: Sequence[Pass]) -> None:
        """Runs these operations in this tick, and goes on to the next one."""
        for kind, op in chosen:
            self.done[kind][op] = self.tick
        self.tick += 1

    def schedule(self) -> Schedule:
        """The schedule that was placed."""
        forward, backward, weight = self.done.values()
        return dataclasses.replace(
            self.shape, forward=forward, backward=backward, weight=weight
        )


class _Stage:
    """Progress of one stage: its counts, and what it may run next.

    Attributes:
      number: of the stage.
      most: passes that it may hold from F to W.
    """

    def __init__(self, shape: Schedule, number: int, most: int):
        self.number, self.most = number, most
        self.counts = {(kind, v): 0 for kind in "FB" for v in range(shape.num_chunks)}
        self.waiting: list[Op] = []  # B has run, and W has not.
        self.held = 0

    def choices(self, shape: Schedule) -> list[Pass]:
        """Operations in the order of their use: B, F of late chunks, F, W."""
        choices = []
        for kind in "BF" if self.held < self.most else "B":
            for chunk in reversed(range(shape.num_chunks)):
                if (m := self.counts[kind, chunk]) < shape.num_microbatches:
                    choices.append((kind, Op(m, chunk, self.number)))
        return choices + [("W", op) for op in self.waiting[:1]]

    def run(self, kind: str, op: Op) -> None:
        """Notes that an operation has run."""
        if kind == "W":
            self.waiting.remove(op)
        else:
            self.counts[kind, op.chunk] += 1
        self.waiting += [op] * (kind == "B")
        self.held += (kind == "F") - (kind == "W")


def _listed(shape: Schedule, most: int) -> Schedule:
    """The schedule in which every stage runs what it can: B before F before W.

    Args:
      shape: sizes of the schedule.
      most: passes of a chunk that a stage holds from F to W.
    """
    clock = _Clock(shape)
    stages = [_Stage(shape, p, most) for p in range(shape.num_stages)]
    passes = 3 * shape.num_microbatches * shape.num_chunks * shape.num_stages
    while passes:
        chosen = []
        for stage in stages:
            ready = (x for x in stage.choices(shape) if clock.is_ready(*x))
            if (choice := next(ready, None)) is not None:
                stage.run(*choice)
                chosen.append(choice)
        clock.place(chosen)
        passes -= len(chosen)
    return clock.schedule()


def _in_order(shape: Schedule, orders: Sequence[Sequence[Pass]]) -> Schedule:
    """The schedule in which every stage keeps an order, and waits where it must."""
    clock, next_ones = _Clock(shape), [0] * len(orders)
    while any(i < len(order) for i, order in zip(next_ones, orders, strict=True)):
        chosen = []
        for stage, order in enumerate(orders):
            i = next_ones[stage]
            if i < len(order) and clock.is_ready(*order[i]):
                chosen.append(order[i])
                next_ones[stage] += 1
        clock.place(chosen)
    return clock.schedule()


def _dualpipe_order(shape: Schedule, stage: int) -> list[Pass]:
    """The operations of one stage in the order of DualPipeV's eight steps."""
    order: list[Pass] = []
    counts = {(kind, chunk): 0 for kind in "FB" for chunk in (0, 1)}
    waiting: list[Op] = []
    later = shape.num_stages - stage - 1

    def run(kind: str, chunk: int, keeps: bool = False) -> None:
        op = Op(counts[kind, chunk], chunk, stage)
        counts[kind, chunk] += 1
        order.append((kind, op))
        if kind == "B" and keeps:
            waiting.append(op)
        elif kind == "B":
            order.append(("W", op))

    for _ in range(2 * later):
        run("F", 0)
    for _ in range(stage + 1):
        run("F", 0)
        run("F", 1)
    for _ in range(later):
        run("B", 1)
        run("F", 1)
    for _ in range(shape.num_microbatches - 2 * shape.num_stages + stage + 1):
        run("F", 0)
        run("B", 1)
        run("F", 1)
        run("B", 0)
    for _ in range(later):
        run("B", 1)
        run("F", 1)
        run("B", 0)
    # From the middle of the last passes on, W waits: the next stage needs B at once.
    for i in range(2 * (stage + 1)):
        run("B", (i + 1) % 2, keeps=i > stage)
    for _ in range(later):
        order.append(("W", waiting.pop(0)))
        run("B", 0, keeps=True)
    order += [("W", op) for op in waiting]
    return order


def in_lock_step(schedule: Schedule) -> Schedule:
    """A schedule with W whose stages run all slots that any stage uses in a tick.

    So collectives may stand in every operation. F and B of different microbatches share
    ticks, those of a V as the two passes of its arms allow, and W runs in the last of
    the ticks that have a B. Bubble 2(P-1)/(3M+2(P-1)), also in a V.

    Args:
      schedule: any with W; its own F and B keep their ticks if it is not published.
    """
    s = schedule
    ticks = s
    if s.name in ZERO_BUBBLE and s.folded:
        ticks = _fused_fold(s)
    elif s.name in ZERO_BUBBLE:
        ticks = one_f_one_b(s.num_stages, s.num_microbatches)
    by_stage: list[list[tuple[int, Op]]] = [[] for _ in range(s.num_stages)]
    for op, tick in ticks.backward.items():
        by_stage[op.stage].append((tick, op))
    used = sorted({*ticks.backward.values()})
    weight = {}
    for passes in map(sorted, by_stage):
        # The i-th B of a stage is never later than the i-th of the last ticks.
        last = used[len(used) - len(passes) :]
        weight |= {op: tick for (_, op), tick in zip(passes, last, strict=True)}
    return dataclasses.replace(
        s,
        forward=ticks.forward,
        backward=ticks.backward,
        weight=weight,
        in_lock_step=True,
    )


def _fused_fold(shape: Schedule) -> Schedule:
    """F and B of a V in fused ticks: every stage has both arms in turn."""
    forward, backward = {}, {}
    last = 2 * shape.num_stages - 1
    for m in range(shape.num_microbatches):
        for virtual in range(last + 1):
            op = shape.op(m, virtual)
            forward[op] = 2 * m + virtual
            backward[op] = 2 * m + 2 * last - virtual
    return dataclasses.replace(shape, forward=forward, backward=backward)


ZERO_BUBBLE = {"zb_h1": zb_h1, "zb_h2": zb_h2, "zb_v": zb_v, "dualpipe_v": dualpipe_v}
"""Published schedules that split W off B."""

FOLDED = {"zb_v": 2, "dualpipe_v": 2}
"""{schedule that is a V: its chunks per stage}."""
