"""Filters of pushes: the mode's, those that settings name, and filters of a user."""

import dataclasses
import functools
import threading

import numpy as np
import pytest
from support import chosen_pushes
from support.chosen_pushes import SGD, Without, everything, loop, without
from support.island_reference import batch, given

from meshpar.errors import MeshparError
from meshpar.islands import BSP, Islands, PushFilter, Store, push_filters, split
from meshpar.islands.push_filters import FilteredPushes, filter_decoders, parse_filters

DROP = dataclasses.replace(SGD, filters=(Without(),), error_feedback=False)


@functools.cache
def dropping():
    return chosen_pushes.lowered(DROP)


def test_a_filter_that_drops_entries_equals_a_loop_that_drops_them():
    program = chosen_pushes.fresh(dropping())
    chosen_pushes.check(program, loop(4, without(), keeps=False)).close()
    kept, whole = loop(4, without(), keeps=False)[-1], loop(4, everything)[-1]
    assert np.abs(kept - whole).max() > 1e-2


def test_entries_that_wait_are_sent_later_also_after_a_checkpoint():
    filters = Without(every=3), push_filters.Zlib()
    mode = dataclasses.replace(DROP, filters=filters, error_feedback=True)
    program = chosen_pushes.fresh(dropping(), mode)
    program = chosen_pushes.check(program, loop(7, without(3)), resumes_at=4)
    program.close()


class Remembers(PushFilter):
    """Sends differences to the last numbers, which both ends remember."""

    remembers = 1

    def encode(self, data, turn):
        last = turn.memory.get("last", np.zeros_like(data[1]))
        turn.memory["last"] = data[1]
        return turn.worker, data[1] - last

    def decode(self, data, size, memory):
        worker, difference = data
        last = memory.get(worker, np.zeros(size, np.float32))
        memory[worker] = last + difference
        return None, memory[worker]


@pytest.mark.parametrize("keeps", [True, False])
def test_what_both_ends_of_a_filter_remember_is_in_checkpoints(keeps):
    mode = dataclasses.replace(DROP, filters=(Remembers(),), error_feedback=keeps)
    program = chosen_pushes.fresh(dropping(), mode)
    chosen_pushes.check(program, loop(5, everything), resumes_at=3).close()
    assert mode.identity().endswith("'filters': (Remembers({}),)}")


def sent(text, updates, weights=None, keeps=True):
    """The pushes of one worker to a range as the store decodes them, and its filter."""
    filters = parse_filters(text)
    pushes, (decode,) = (
        FilteredPushes(filters, "a", keeps),
        filter_decoders(filters).values(),
    )
    weights = np.ones_like(updates[0]) if weights is None else weights
    found = []
    for clock, update in enumerate(updates):
        payload = pushes.encode("w", update, clock, weights, weight=2.0)
        keys, values = decode(payload.data, len(update), {})
        assert payload.weight == 2.0
        found.append((np.arange(len(update)) if keys is None else keys, values))
    return found, pushes


UPDATES = np.random.default_rng(5).normal(size=(20, 300)).astype(np.float32)


def test_numbers_above_a_threshold_are_sent_once_they_have_added_up():
    waiting = np.zeros(300, np.float32)
    for (keys, values), update in zip(
        sent("significant:1.5+zlib", UPDATES)[0], UPDATES, strict=True
    ):
        waiting = waiting + update
        wanted = np.flatnonzero(abs(waiting) > 1.5)
        assert 0 < len(wanted) < 300
        np.testing.assert_array_equal(keys, wanted)
        np.testing.assert_array_equal(values, waiting[wanted])
        waiting[wanted] = 0


def test_numbers_relative_to_the_weights_that_they_change():
    weights = np.linspace(-3, 3, 300, dtype=np.float32)
    for (keys, values), update in zip(
        sent("relative:0.5", UPDATES, weights, keeps=False)[0], UPDATES, strict=True
    ):
        wanted = np.flatnonzero(abs(update) > 0.5 * abs(weights))
        np.testing.assert_array_equal(keys, wanted)
        np.testing.assert_array_equal(values, update[wanted])


def test_infinite_numbers_are_sent_and_none_of_them_waits():
    found, pushes = sent("significant:3", np.float32([[np.inf, -np.inf, 0, 1]] * 2))
    assert [keys.tolist() for keys, _ in found] == [[0, 1], [0, 1]]
    assert pushes.unsent["w"].tolist() == [0, 0, 0, 2]


def test_random_numbers_are_skipped_and_no_update_is_lost():
    found, pushes = sent("skip:0.3", UPDATES)
    share = np.mean([len(keys) for keys, _ in found]) / 300
    assert abs(share - 0.7) < 0.03
    total = np.zeros(300)
    for keys, values in found:
        total[keys] += values
    left = pushes.unsent["w"]
    np.testing.assert_allclose(total + left, UPDATES.sum(0), rtol=0, atol=1e-5)
    assert {tuple(keys) for keys, _ in found} == {
        tuple(keys) for keys, _ in sent("skip:0.3", UPDATES)[0]
    }


def test_zlib_loses_nothing_and_takes_fewer_bytes():
    zeros = UPDATES * (UPDATES > 1)
    found, _ = sent("zlib", zeros)
    for (_, values), update in zip(found, zeros, strict=True):
        np.testing.assert_array_equal(values, update)
    _, packed = push_filters.Zlib().encode((None, zeros[0]), None)
    assert len(packed) < zeros[0].nbytes / 2


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(filters=Without()), "use a tuple of meshpar.islands.PushFilter"),
        (dict(filters=("zlib",)), "use a tuple of meshpar.islands.PushFilter"),
        (dict(filters=(Without(),), wire="int8"), "wire=int8: .* use one alone"),
        (dict(filters=(Without(),), budget=64), "budget=64 .* use one alone"),
        (dict(filters=(Without(),), algorithm="compensated"), "whole gradients"),
        (dict(filters=parse_filters("zlib") * 2), ""),
        (dict(filters=(push_filters.Zlib(), Without())), "put filters that pack last"),
    ],
)
def test_modes_that_cannot_be(settings, words):
    if words:
        with pytest.raises(MeshparError, match=words):
            Islands(**settings)
    else:
        assert len(Islands(**settings).filters) == 2


@pytest.mark.parametrize("text", ["kkt", "skip:1", "zlib+skip:0.5", "relative", "+"])
def test_texts_that_name_no_filters(text):
    with pytest.raises(MeshparError, match="filters"):
        parse_filters(text)


@pytest.mark.parametrize(
    "make", [lambda: push_filters.Significant(-1), lambda: push_filters.RandomSkip(1)]
)
def test_numbers_of_filters_out_of_range(make):
    with pytest.raises(MeshparError, match="=-?1 of a .*: use a number"):
        make()


@dataclasses.dataclass(frozen=True)
class Sends(PushFilter):
    """Sends the same whatever it gets."""

    data: object

    def encode(self, data, turn):
        return self.data

    def __hash__(self):
        return 0


NO_PAIRS = [None, 3, (np.zeros(2), np.zeros(2)), (None, "text"), (np.arange(3), 1.0)]


@pytest.mark.parametrize("data", NO_PAIRS, ids=repr)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_filter_that_gives_no_pair_is_refused_by_worker_or_store(data, keeps):
    filters = (Sends(data),)
    pushes = FilteredPushes(filters, "a", keeps)
    parts = [part.range for part in split("w", 2, 1)]
    store = Store(parts, BSP(), lambda *_: None, decoders=filter_decoders(filters))
    store.join("a")
    zeros = np.zeros(2, np.float32)
    with pytest.raises(MeshparError, match="pair|shape|whole numbers"):
        store.push("w/0", "a", 0, pushes.encode("w/0", zeros, 0, zeros))


@dataclasses.dataclass(frozen=True)
class Locked(Without):
    """Cannot be pickled."""

    lock: object = dataclasses.field(default_factory=threading.Lock)


def test_a_filter_that_cannot_be_pickled_is_refused_before_ray_starts():
    ray = pytest.importorskip("ray", reason='needs pip install -e ".[islands]"')
    mode = dataclasses.replace(DROP, host="ray", filters=(Without(), Locked()))
    program = dataclasses.replace(
        chosen_pushes.fresh(dropping(), mode), build=lambda: None
    )
    with pytest.raises(MeshparError, match="sends filter Locked.* '_thread.lock'"):
        program.step(program.init(0, given()), batch(0))
    assert not ray.is_initialized()
