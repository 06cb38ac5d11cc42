"""Checker of pipeline schedules: missing operations, shared slots, late inputs."""

from collections.abc import Iterator

from meshpar.schedules.table import Op, Schedule


def problems(schedule: Schedule, most_in_flight: int | None = None) -> list[str]:
    """Lists everything that keeps a schedule from running.

    Args:
      schedule: the schedule to check.
      most_in_flight: number of stage inputs that a stage can hold, if it is limited.

    Returns:
      One line per problem; empty if the schedule can run.
    """
    if lines := [*_missing(schedule), *_misplaced(schedule)]:
        return lines
    lines = [*_collisions(schedule), *_too_early(schedule)]
    if schedule.asynchronous:
        lines += _not_asynchronous(schedule)
    if most_in_flight is not None and not lines:
        lines += _overfull(schedule, most_in_flight)
    return lines


def _missing(schedule: Schedule) -> Iterator[str]:
    """Operations without a tick."""
    wanted = set(schedule.ops())
    kinds = {"F": schedule.forward, "B": schedule.backward, "W": schedule.weight}
    if not schedule.weight:
        del kinds["W"]
    for kind, ticks in kinds.items():
        for op in sorted(wanted - {*ticks}):
            yield f"{_label(kind, op)} is missing"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Operations that do not exist, and ticks that are no whole numbers from 0."""
    wanted = set(schedule.ops())
    for kind, op, tick in schedule.placed():
        if op not in wanted:
            yield (
                f"{_label(kind, op)} does not exist: stages={schedule.num_stages}, "
                f"microbatches={schedule.num_microbatches}, "
                f"chunks={schedule.num_chunks}"
            )
        elif not isinstance(tick, int) or tick < 0:
            yield f"{_label(kind, op)} at tick {tick!r}: use an integer of 0 or more"


def _collisions(schedule: Schedule) -> Iterator[str]:
    """Slots with two operations."""
    taken: dict[tuple[str, int, int], Op] = {}
    for kind, op, tick in schedule.placed():
        other = taken.setdefault((kind, op.stage, tick), op)
        if other != op:
            yield (
                f"tick {tick} of stage {op.stage} has {_label(kind, other)} and "
                f"{_label(kind, op)}: use one {kind} per tick"
            )


def _too_early(schedule: Schedule) -> Iterator[str]:
    """Operations that run before their input exists."""
    for op in schedule.ops():
        f, b = schedule.forward[op], schedule.backward[op]
        if (before := schedule.before(op)) and f <= schedule.forward[before]:
            yield (
                f"{_label('F', op)} at tick {f} reads {_label('F', before)}, which "
                f"arrives after tick {schedule.forward[before]}"
            )
        if (after := schedule.after(op)) and b <= schedule.backward[after]:
            yield (
                f"{_label('B', op)} at tick {b} reads {_label('B', after)}, which "
                f"arrives after tick {schedule.backward[after]}"
            )
        if b < f:
            yield f"{_label('B', op)} at tick {b} reads its F, which runs at tick {f}"
        if schedule.weight and (w := schedule.weight[op]) < b:
            yield f"{_label('W', op)} at tick {w} reads its B, which runs at tick {b}"


def _not_asynchronous(schedule: Schedule) -> Iterator[str]:
    """Reasons why stages cannot update their weights after every B."""
    if schedule.weight:
        yield "weights change after every B, so W cannot be split off B"
    if schedule.num_chunks > 1:
        yield f"asynchronous stages have one chunk, not {schedule.num_chunks}"
    for op in schedule.ops():
        f, b = schedule.forward[op], schedule.backward[op]
        if schedule.after(op) is None and b != f:
            yield f"{_label('B', op)} at tick {b} has to share tick {f} with its F"


def _overfull(schedule: Schedule, most_in_flight: int) -> Iterator[str]:
    """Stages that hold more stage inputs than their buffer."""
    for stage, held in enumerate(schedule.in_flight()):
        if held > most_in_flight:
            yield (
                f"stage {stage} holds {held} stage inputs at once, and its buffer has "
                f"room for {most_in_flight}: run B earlier, or F later"
            )


def _label(kind: str, op: Op) -> str:
    return f"{kind}(microbatch {op.microbatch}, chunk {op.chunk}, stage {op.stage})"
