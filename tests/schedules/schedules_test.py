"""Pipeline schedules as tables: closed forms, and what the checker finds."""

import dataclasses
import itertools
from unittest import mock

import pytest

from meshpar import schedules
from meshpar.errors import LayoutError
from meshpar.schedules.table import Op

SIZES = list(itertools.product((2, 3, 4, 8), (1, 2, 4, 8, 24)))


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_bubble_and_in_flight_are_the_papers(stages, microbatches):
    """In ticks, exactly; all stages walk in lock step."""
    p, m = stages, microbatches
    gpipe = schedules.make_schedule("gpipe", p, m)
    assert gpipe.bubble() == pytest.approx((p - 1) / (m + p - 1))
    assert gpipe.in_flight() == [m] * p
    flushed = schedules.make_schedule("1f1b", p, m)
    assert flushed.bubble() == pytest.approx((p - 1) / (m + p - 1))
    assert flushed.num_ticks == m + 2 * (p - 1)
    kept = [min(m, 2 * (p - stage) - 1) for stage in range(p)]
    assert flushed.in_flight() == kept and max(kept) <= 2 * p - 1
    split = schedules.make_schedule("zb_h1", p, m)
    if m >= 2 * p:
        assert split.bubble() == pytest.approx((p - 1) / (3 * m + p - 1))
    assert split.in_flight() == kept
    stale = schedules.make_schedule("pipedream", p, m)
    assert stale.bubble() == pytest.approx(2 * (p - 1) / (m + 2 * (p - 1)))
    assert schedules.formula(stale)[0] == pytest.approx(stale.bubble())
    for chunks in (2, 3):
        if m % p == 0:
            made = schedules.make_schedule("interleaved", p, m, chunks)
            want = (p - 1) / (chunks * m + p - 1)
            assert made.bubble() == pytest.approx(want)
            assert max(made.in_flight()) <= (chunks + 1) * p - 1 + (chunks - 1) * p


def edited(op: Op, kind: str, tick: int | None):
    """1F1B with one operation moved, or left out."""
    made = schedules.make_schedule("1f1b", 3, 4)
    ticks = dict(getattr(made, kind))
    if tick is None:
        del ticks[op]
    else:
        ticks[op] = tick
    return dataclasses.replace(made, **{kind: ticks})


@pytest.mark.parametrize(
    "op, kind, tick, words",
    [
        (
            Op(1, 0, 2),
            "forward",
            None,
            ["F(microbatch 1, chunk 0, stage 2) is missing"],
        ),
        (Op(1, 0, 2), "forward", 2, ["tick 2 of stage 2 has F", "one F a tick"]),
        (Op(3, 0, 1), "forward", 3, ["F(microbatch 3", "arrives after tick 3"]),
        (Op(0, 0, 0), "backward", 3, ["B(microbatch 0", "arrives after tick 3"]),
        (Op(2, 0, 2), "backward", 1, ["runs at tick 4"]),
        (Op(9, 0, 0), "forward", 1, ["does not exist: stages=3, microbatches=4"]),
        (Op(0, 0, 0), "forward", -1, ["tick -1"]),
    ],
)
def test_the_checker_says_what_is_wrong(op, kind, tick, words):
    problems = "\n".join(edited(op, kind, tick).problems())
    for word in words:
        assert word in problems


def test_the_checker_counts_what_is_kept():
    made = schedules.make_schedule("gpipe", 2, 5)
    assert made.problems(most_in_flight=5) == []
    (first, second) = made.problems(most_in_flight=4)
    assert "stage 0 keeps 5 stage inputs at once, and its buffer holds 4" in first


def test_a_weight_gradient_follows_its_backward_pass():
    made = schedules.make_schedule("zb_h1", 2, 4)
    op = Op(3, 0, 0)
    early = dataclasses.replace(made, weight={**made.weight, op: 0})
    assert any("W(microbatch 3" in line for line in early.problems())


@pytest.mark.parametrize(
    "name, sizes, words",
    [
        ("1f1d", (2, 4, 1), "did you mean '1f1b'"),
        ("1f1b", (2, 4, 2), "virtual_stages=2; use schedule=interleaved"),
        ("interleaved", (4, 6, 2), "multiple of 4"),
        ("interleaved", (4, 8, 1), "at least 2"),
    ],
)
def test_sizes_that_a_schedule_cannot_have(name, sizes, words):
    with pytest.raises(LayoutError, match=words):
        schedules.make_schedule(name, *sizes)


@mock.patch.dict(schedules.SCHEDULES)
def test_a_schedule_of_ones_own():
    @schedules.register("one_at_a_time")
    def one_at_a_time(num_stages, num_microbatches, num_chunks):
        """No overlap at all: a microbatch goes back before the next one starts."""
        forward, backward = {}, {}
        for m, p in itertools.product(range(num_microbatches), range(num_stages)):
            start = 2 * num_stages * m
            forward[Op(m, 0, p)] = start + p
            backward[Op(m, 0, p)] = start + 2 * num_stages - 1 - p
        sizes = num_stages, num_microbatches, num_chunks
        return schedules.Schedule("one_at_a_time", *sizes, forward, backward)

    made = schedules.make_schedule("one_at_a_time", 2, 3)
    assert made.in_flight() == [1, 1] and made.num_ticks == 12

    @schedules.register("broken")
    def broken(num_stages, num_microbatches, num_chunks):
        return dataclasses.replace(made, name="broken", backward=made.forward)

    with pytest.raises(LayoutError, match="cannot run:\n.*arrives after tick"):
        schedules.make_schedule("broken", 2, 3)

    @schedules.register("stale")
    def stale(num_stages, num_microbatches, num_chunks):
        return dataclasses.replace(made, name="stale", asynchronous=True)

    with pytest.raises(LayoutError, match="has to share tick 1 with its F"):
        schedules.make_schedule("stale", 2, 3)
    for name in ("1f1b", "auto", "a,b", "with space", ""):
        with pytest.raises(LayoutError, match="another name|a name has letters"):
            schedules.register(name)


def test_the_picture_in_text():
    text = str(schedules.make_schedule("1f1b", 2, 2))
    assert text.splitlines() == [
        " 0 |F0   |F1   |B0   |B1   |",
        " 1 |     |F0 B0|F1 B1|     |",
    ]
