"""The fastest workers and batch by the closed form are those of trying all."""

import dataclasses

import pytest

from experiments.gallery import time_to_accuracy as figure
from meshpar.errors import MeshparError
from meshpar.methods import time_to_accuracy as law

PASSES = {8: 1.5, 32: 1.6, 128: 4.75}


def test_the_fastest_is_that_of_trying_all(monkeypatch):
    monkeypatch.setattr(figure, "_MOST", 24)
    by_hand = figure.tried(figure.CLUSTER, PASSES, 24)
    (batch, workers), least = min(by_hand.items(), key=lambda item: item[1])
    found = law.fastest(figure.CLUSTER, PASSES, figure.passes.ROWS, 24)
    assert found[:2] == (batch, workers) and found.seconds == pytest.approx(least)


def test_one_worker_is_best_where_messages_cost_more_than_rows():
    slow = dataclasses.replace(figure.CLUSTER, bandwidth=1.0)
    assert slow.best_workers(32) == 1
    free = dataclasses.replace(figure.CLUSTER, latency=0.0)
    assert free.best_workers(32) == 32
    assert law.fastest(slow, PASSES, 1024, 64).workers == 1


@pytest.mark.parametrize(
    "workers, batch, message",
    [
        (4, 16, "batch=16: passes are known of 8, 32, 128"),
        (9, 8, "workers=9 for 8 rows: use 1 to 8"),
        (0, 8, "workers=0 for 8 rows: use 1 to 8"),
    ],
)
def test_what_is_not_known_is_refused(workers, batch, message):
    with pytest.raises(MeshparError, match=message):
        law.seconds(figure.CLUSTER, PASSES, 1024, workers, batch)
