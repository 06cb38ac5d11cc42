"""Filters of packets: what arrives, and which bytes are saved."""

import dataclasses

import numpy as np
import pytest

from meshpar.errors import MeshparError
from meshpar.methods.dbpg import filters, kkt
from meshpar.methods.dbpg.packet import Link, Packet


def packet(keys=(1, 4, 7, 9), task=0, columns=2, **changes):
    keys = np.array(keys, np.int32)
    values = np.arange(1, columns * len(keys) + 1, dtype=np.float32) / 3
    values = values.reshape(columns, -1)
    made = Packet("worker 0|3", task, keys, values, columns=columns)
    return dataclasses.replace(made, **changes)


def same(first, second):
    assert np.array_equal(first.keys, second.keys) and first.task == second.task
    np.testing.assert_array_equal(first.values, second.values)


def test_bytes_are_those_of_keys_and_values():
    assert packet().num_bytes == 4 * 4 + 4 * 8
    assert packet(implied=True).num_bytes == 4 * 8


def test_all_filters_together_lose_nothing_and_count_every_byte():
    parts = [
        filters.SignificantlyModified(10),
        filters.KeyCaching(),
        filters.ValueCompression("zlib"),
    ]
    link, memory, raw = Link(parts), {}, 0
    for task in range(5):
        sent = packet(task=task)
        sent.values[0, 1] = task
        raw += sent.num_bytes
        same(link.decode(link.encode(sent), memory), sent)
    assert link.sent + sum(part.saved for part in parts) == raw
    assert parts[0].saved > 0 and parts[1].saved > 0


def test_known_keys_travel_as_a_hash():
    cache = filters.KeyCaching()
    link, memory = Link([cache]), {}
    first, second = link.encode(packet()), link.encode(packet())
    assert first.keys is not None and second.keys is None
    assert second.num_bytes == 4 * 8 + 8 and cache.saved == 4 * 4 - 8
    for sent in (first, second):
        same(link.decode(sent, memory), packet())


def test_a_receiver_remembers_the_last_lists_of_a_channel_only():
    link, memory = Link([filters.KeyCaching()]), {}
    lists = [(1, 2), (1, 3), (1, 4)]
    hashed = []
    for keys in [*lists, lists[0], lists[2], lists[1]]:
        sent = link.encode(packet(keys))
        same(link.decode(sent, memory), packet(keys))
        hashed.append(sent.keys is None)
    assert hashed == [False, False, False, False, True, False]
    assert len(memory) == filters.RECENT_KEY_LISTS == 2


def test_a_receiver_that_forgot_the_keys_is_sent_them():
    link, memory = Link([filters.KeyCaching()]), {}
    link.encode(packet())
    with pytest.raises(filters.UnknownKeysError, match="worker 0.3: unknown list"):
        link.decode(link.encode(packet()), memory)
    assert link.forget("worker 0|3")
    same(link.decode(link.encode(packet()), memory), packet())
    assert not Link([]).forget("worker 0|3")


def test_only_significant_changes_are_sent():
    part = filters.SignificantlyModified(10, threshold=0.5)
    link, memory = Link([part]), {}
    start = packet(columns=1, implied=True)
    start.values[:] += 3
    link.decode(link.encode(start), memory)
    moved = start.values + np.array([[0.4, 0.6, np.nan, -0.6]], np.float32)
    sent = link.encode(dataclasses.replace(start, values=moved))
    assert sent.values.shape == (1, 3) and sent.changed.nbytes == 1
    received = link.decode(sent, memory).values
    np.testing.assert_array_equal(received[0, 1:], moved[0, 1:])
    assert received[0, 0] == start.values[0, 0]
    # NaN equals itself, and another channel has no last values.
    again = link.encode(dataclasses.replace(start, values=moved))
    assert again.values.shape == (1, 0)
    other = dataclasses.replace(start, values=moved, channel="worker 1|3")
    assert link.encode(other).values.shape == (1, 4)


def test_random_skips_are_the_same_for_all_workers_and_others_in_each_task():
    part = filters.RandomSkip(0.3, seed=1)
    link, keys = Link([part]), np.arange(0, 20_000, 2)

    def arrives(keys, task, channel="worker 0|3"):
        sent = link.encode(packet(keys, task, channel=channel))
        return link.decode(sent, {}).keys

    kept = arrives(keys, task=5)
    assert part.saved == 8 * (len(keys) - len(kept))
    assert 0.68 < len(kept) / len(keys) < 0.72
    part_of_them = keys[::3]
    expected = kept[np.isin(kept, part_of_them)]
    assert np.array_equal(arrives(part_of_them, 5, "worker 1|3"), expected)
    both = np.isin(arrives(keys, task=6), kept).mean()
    assert 0.66 < both < 0.74


def test_bf16_halves_the_values():
    link = Link([filters.ValueCompression("bf16")])
    sent = link.encode(packet())
    assert sent.num_bytes == 4 * 4 + 2 * 8
    values = link.decode(sent, {}).values
    np.testing.assert_allclose(values, packet().values, rtol=2**-8)


def test_settings_that_cannot_be():
    for make, words in [
        (lambda: filters.RandomSkip(1.0), "probability=1.0 of a skip: use"),
        (lambda: filters.SignificantlyModified(3, -1), "threshold=-1: use"),
        (lambda: filters.ValueCompression("zlb"), "did you mean 'zlib'"),
    ]:
        with pytest.raises(MeshparError, match=words):
            make()


def test_weights_far_from_the_kkt_bounds_are_left_out_until_a_full_pass():
    weights = np.array([0.0, 0.0, 0.0, 1.0, -1.0])
    gradients = np.array([0.5, 0.95, -1.5, -0.9, 0.0])
    found = kkt.violations(weights, gradients, l1=1.0)
    np.testing.assert_allclose(found, [0, 0, 0.5, 0.1, 1.0])
    far = kkt.is_far(weights, gradients, l1=1.0, threshold=0.1)
    assert far.tolist() == [True, False, False, False, False]
    assert not kkt.is_far(weights, gradients, l1=1.0, threshold=1.0).any()

    part = kkt.KKTFilter(columns=2)
    assert part.select("a", 5, full=False).tolist() == [0, 1, 2, 3, 4]
    part.learn("a", np.array([0, 2]), np.array([np.nan, 3.0]))
    assert part.select("a", 5, full=False).tolist() == [1, 2, 3, 4]
    assert part.saved == 4 + 2 * 4 + 4
    assert part.select("a", 5, full=True).tolist() == [0, 1, 2, 3, 4]
    assert part.select("b", 2, full=False).tolist() == [0, 1]
