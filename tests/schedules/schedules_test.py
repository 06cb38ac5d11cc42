"""Pipeline schedules as tables: closed forms, and the problems a checker finds."""

import dataclasses
import itertools

import pytest

from meshpar import schedules
from meshpar.errors import LayoutError
from meshpar.schedules.table import Op

SIZES = list(itertools.product((2, 3, 4, 8), (1, 2, 4, 8, 24)))


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_bubbles_and_stage_inputs_in_flight_are_those_of_the_papers(
    stages, microbatches
):
    p, m = stages, microbatches
    gpipe = schedules.make_schedule("gpipe", p, m)
    assert gpipe.bubble() == pytest.approx((p - 1) / (m + p - 1))
    assert gpipe.in_flight() == [m] * p
    flushed = schedules.make_schedule("1f1b", p, m)
    assert flushed.bubble() == pytest.approx((p - 1) / (m + p - 1))
    assert flushed.num_ticks == m + 2 * (p - 1)
    in_flight = [min(m, 2 * (p - stage) - 1) for stage in range(p)]
    assert flushed.in_flight() == in_flight and max(in_flight) <= 2 * p - 1
    split = schedules.make_schedule("zb_h1", p, m)
    if m >= 2 * p:
        assert split.bubble() == pytest.approx((p - 1) / (3 * m + p - 1))
    assert split.in_flight() == in_flight
    stale = schedules.make_schedule("pipedream", p, m)
    assert stale.bubble() == pytest.approx(2 * (p - 1) / (m + 2 * (p - 1)))
    assert schedules.formula(stale)[0] == pytest.approx(stale.bubble())
    for chunks in (2, 3):
        if m % p == 0:
            interleaved = schedules.make_schedule("interleaved", p, m, chunks)
            bubble = (p - 1) / (chunks * m + p - 1)
            assert interleaved.bubble() == pytest.approx(bubble)
            most = (chunks + 1) * p - 1 + (chunks - 1) * p
            assert max(interleaved.in_flight()) <= most


@pytest.mark.parametrize("name, chunks", [("zb_h2", 1), ("zb_v", 2), ("dualpipe_v", 2)])
@pytest.mark.parametrize("stages, microbatches", [(2, 4), (3, 7), (4, 8), (6, 24)])
def test_zero_bubbles_wait_for_the_first_pass_to_arrive_and_no_longer(
    name, chunks, stages, microbatches
):
    p, m = stages, microbatches
    schedule = schedules.make_schedule(name, p, m, chunks)
    passes = 3 * chunks * m
    assert schedule.num_ticks == passes + p - 1
    assert schedule.bubble() == pytest.approx((p - 1) / (passes + p - 1))
    assert schedules.formula(schedule)[0] == pytest.approx(schedule.bubble())
    ran = [(stage, tick) for _, (_, _, stage), tick in schedule.placed()]
    assert len(ran) == len({*ran})  # One operation per stage and tick.
    most = {"zb_h2": 2 * p - 1, "zb_v": 3 * p, "dualpipe_v": 2 * p + 1}[name]
    assert held_from_f_to_w(schedule) <= most
    locked = schedules.in_lock_step(schedule)
    assert locked.bubble() == pytest.approx(2 * (p - 1) / (3 * m + 2 * (p - 1)))
    assert schedules.formula(locked)[0] == pytest.approx(locked.bubble())


def held_from_f_to_w(schedule):
    """Most passes of a chunk that any stage holds from F to W."""
    most = 0
    for stage, tick in itertools.product(
        range(schedule.num_stages), range(schedule.num_ticks)
    ):
        held = sum(
            op.stage == stage and schedule.forward[op] <= tick <= schedule.weight[op]
            for op in schedule.forward
        )
        most = max(most, held)
    return most


def test_a_v_gives_the_first_stage_the_first_and_the_last_layers():
    schedule = schedules.make_schedule("zb_v", 3, 6, 2)
    way = [Op(0, 0, 0)]
    while (after := schedule.after(way[-1])) is not None:
        way.append(after)
        assert schedule.before(after) == way[-2]
    assert [(op.chunk, op.stage) for op in way] == [
        *((0, stage) for stage in (0, 1, 2)),
        *((1, stage) for stage in (2, 1, 0)),
    ]


def edited(op: Op, kind: str, tick: int | None):
    """1F1B with one operation moved, or removed if its tick is None."""
    schedule = schedules.make_schedule("1f1b", 3, 4)
    ticks = dict(getattr(schedule, kind))
    if tick is None:
        del ticks[op]
    else:
        ticks[op] = tick
    return dataclasses.replace(schedule, **{kind: ticks})


@pytest.mark.parametrize(
    "op, kind, tick, words",
    [
        (
            Op(1, 0, 2),
            "forward",
            None,
            ["F(microbatch 1, chunk 0, stage 2) is missing"],
        ),
        (Op(1, 0, 2), "forward", 2, ["tick 2 of stage 2 has F", "one F per tick"]),
        (Op(3, 0, 1), "forward", 3, ["F(microbatch 3", "arrives after tick 3"]),
        (Op(0, 0, 0), "backward", 3, ["B(microbatch 0", "arrives after tick 3"]),
        (Op(2, 0, 2), "backward", 1, ["runs at tick 4"]),
        (Op(9, 0, 0), "forward", 1, ["does not exist: stages=3, microbatches=4"]),
        (Op(0, 0, 0), "forward", -1, ["tick -1"]),
    ],
)
def test_the_checker_names_every_problem(op, kind, tick, words):
    text = "\n".join(schedules.problems(edited(op, kind, tick)))
    for word in words:
        assert word in text


def test_the_checker_counts_stage_inputs_in_flight():
    schedule = schedules.make_schedule("gpipe", 2, 5)
    assert schedules.problems(schedule, most_in_flight=5) == []
    first, second = schedules.problems(schedule, most_in_flight=4)
    assert "stage 0 holds 5 stage inputs at once" in first and "room for 4" in first
    assert "stage 1" in second


def test_a_weight_gradient_follows_its_backward_pass():
    schedule = schedules.make_schedule("zb_h1", 2, 4)
    op = Op(3, 0, 0)
    early = dataclasses.replace(schedule, weight={**schedule.weight, op: 0})
    assert any("W(microbatch 3" in line for line in schedules.problems(early))
    without = {other: tick for other, tick in schedule.weight.items() if other != op}
    missing = dataclasses.replace(schedule, weight=without)
    (line,) = schedules.problems(missing)
    assert line == "W(microbatch 3, chunk 0, stage 0) is missing"


@pytest.mark.parametrize(
    "name, sizes, words",
    [
        ("1f1d", (2, 4, 1), "did you mean '1f1b'"),
        ("1f1b", (2, 4, 2), "virtual_stages=2; use schedule=interleaved"),
        ("interleaved", (4, 6, 2), "multiple of 4"),
        ("interleaved", (4, 8, 1), "at least 2"),
        ("zb_v", (4, 8, 3), "two chunks of layers per stage, not virtual_stages=3"),
        ("dualpipe_v", (4, 7, 2), r"microbatches=7 are fewer than 2\*pipe=8"),
    ],
)
def test_unknown_names_and_unsupported_sizes_are_errors(name, sizes, words):
    with pytest.raises(LayoutError, match=words):
        schedules.make_schedule(name, *sizes)


def test_a_custom_schedule(monkeypatch):
    for name in ("one_at_a_time", "broken", "stale", "resized"):
        monkeypatch.setitem(schedules.SCHEDULES, name, None)

    @schedules.register("one_at_a_time")
    def one_at_a_time(num_stages, num_microbatches, num_chunks):
        """No overlap: a microbatch passes back before the next one starts."""
        forward, backward = {}, {}
        for m, p in itertools.product(range(num_microbatches), range(num_stages)):
            start = 2 * num_stages * m
            forward[Op(m, 0, p)] = start + p
            backward[Op(m, 0, p)] = start + 2 * num_stages - 1 - p
        sizes = num_stages, num_microbatches, num_chunks
        return schedules.Schedule("one_at_a_time", *sizes, forward, backward)

    schedule = schedules.make_schedule("one_at_a_time", 2, 3)
    assert schedule.in_flight() == [1, 1] and schedule.num_ticks == 12
    assert schedules.formula(schedule) is None

    @schedules.register("broken")
    def broken(num_stages, num_microbatches, num_chunks):
        return dataclasses.replace(schedule, name="broken", backward=schedule.forward)

    with pytest.raises(LayoutError, match="cannot run:\n.*arrives after tick"):
        schedules.make_schedule("broken", 2, 3)

    @schedules.register("stale")
    def stale(num_stages, num_microbatches, num_chunks):
        return dataclasses.replace(schedule, name="stale", asynchronous=True)

    with pytest.raises(LayoutError, match="has to share tick 1 with its F"):
        schedules.make_schedule("stale", 2, 3)

    @schedules.register("resized")
    def resized(num_stages, num_microbatches, num_chunks):
        return schedule

    with pytest.raises(LayoutError, match=r"\(2, 3, 1\), not \(4, 3, 1\)"):
        schedules.make_schedule("resized", 4, 3)


@pytest.mark.parametrize("name", ["1f1b", "auto", "a,b", "with space", ""])
def test_names_that_cannot_be_registered(name):
    with pytest.raises(LayoutError, match="use another name|use a name of letters"):
        schedules.register(name)


def test_a_schedule_as_text():
    text = str(schedules.make_schedule("1f1b", 2, 2))
    assert text.splitlines() == [
        " 0 |F0   |F1   |B0   |B1   |",
        " 1 |     |F0 B0|F1 B1|     |",
    ]
