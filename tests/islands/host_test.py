"""A host replaces islands that die, and gives up where none can start."""

import pytest

from meshpar import MeshparError
from meshpar.islands.host import Host, Stopped, WorkerDied


class Dying(Host):
    """An island whose process dies at its first starts, and then trains."""

    def __init__(self, deaths, workers=1, own_data=False):
        super().__init__(workers, own_data)
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

    center = spans = snapshot = reader = None


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


class Owners(Dying):
    """Islands that note the batches they train on; island 0 loses its second one."""

    def __init__(self, workers, own_data):
        super().__init__(0, workers, own_data)
        self.trained = [[] for _ in range(workers)]
        self.lost = False

    def prepare(self, index):
        pass

    def train(self, index, batch):
        if batch == (0, 1) and not self.lost:
            self.lost = True
            raise WorkerDied
        self.trained[index].append(batch)
        return super().train(index, 1.0) | {"loss": 1.0}


def trained(own_data):
    host = Owners(2, own_data)
    host.join(0)
    for step in range(4):  # Island 1 is not there yet.
        if step == 2:
            host.join(1)
        host.step([(0, step), (1, step)])
    host.drain()
    host.close()
    return host.trained


def test_an_island_that_owns_data_trains_on_its_own_parts_alone():
    own, others = trained(own_data=True)
    assert own == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert others == [(1, 2), (1, 3)]


def test_without_owners_an_island_takes_every_part():
    assert (1, 0) in trained(own_data=False)[0]


def test_the_parts_of_an_island_that_leaves_are_not_waited_for():
    host = Owners(2, own_data=True)
    host.join(0)
    host._stopped[1] = False  # It is there, and does nothing.
    host.step([(0, 0), (1, 0)])
    host._stopped[1] = True
    host._run(1)
    host.drain()
    host.close()
    assert host.trained == [[(0, 0)], []]
