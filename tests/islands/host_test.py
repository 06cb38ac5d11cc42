"""A host replaces islands that die, and gives up where none can start."""

import pytest

from meshpar import MeshparError
from meshpar.islands.host import Host, Stopped, WorkerDied


class Dying(Host):
    """An island whose process dies at its first starts, and then trains."""

    def __init__(self, deaths):
        super().__init__(1)
        self.deaths, self.starts = deaths, 0

    def connect(self, index):
        self.starts += 1
        if self.starts <= self.deaths:
            raise WorkerDied

    def prepare(self, index):
        with self.changed:
            self.changed.wait_for(lambda: self._batches or self.is_stopped(index))
        if self.is_stopped(index):
            raise Stopped

    def train(self, index, batch):
        times = dict(wait_seconds=0.0, compute_seconds=1.0)
        return {"loss": batch, "age": 0, "clock": 1, **times}

    def disconnect(self, index):
        pass

    center = spans = snapshot = None


def test_an_island_that_dies_while_it_starts_is_replaced():
    host = Dying(deaths=4)
    host.join(0)
    assert host.step([2.0])["loss"] == 2.0
    host.close()
    assert host.starts == 5


def test_an_island_that_can_never_start_is_an_error():
    host = Dying(deaths=100)
    host.join(0)
    with pytest.raises(MeshparError, match="island 0 died 5 times before it could"):
        host.step([2.0])


class Waiting(Dying):
    """An island that waits for others before its first batch."""

    may_go, went = False, False

    def prepare(self, index):
        if not self.went:
            with self.changed:
                self.wait_until(index, lambda: self.may_go)
            self.went = True


def test_an_island_whose_wait_has_just_ended_is_drained_as_well():
    """Otherwise equal runs would leave checkpoints that differ."""
    host = Waiting(deaths=0)
    host.join(0)
    host.drain()
    assert not host.went
    with host.changed:  # The island has no chance to look before `drain` does.
        host.may_go = True
        host.changed.notify_all()
        host.drain()
        assert host.went
    host.close()
