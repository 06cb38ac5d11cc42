"""Runs that go on in fewer processes, and the door at which the others wait."""

import contextlib
import socket
import threading
import time

import pytest

from meshpar.multihost import MissingError, ProcessInfo
from meshpar.multihost import token as tokens
from meshpar.multihost.door import largest_number
from meshpar.multihost.rendezvous import all_arrived


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(tokens.TOKEN, "0123456789abcdef0123456789abcdef")


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


class Started:
    """A process of four in a thread; the run may go on in two of them."""

    def __init__(self, address, rank, timeout_s=1.0):
        self.process = ProcessInfo(address, 4, rank)
        self.arrival, self.error = None, None
        self.thread = threading.Thread(target=self.start, args=[timeout_s])
        self.thread.daemon = True
        self.thread.start()

    def start(self, timeout_s):
        try:
            with all_arrived(self.process, timeout_s, fewer=(2,)) as self.arrival:
                pass
        except MissingError as error:
            self.error = error

    def place(self):
        self.thread.join(20)
        assert self.arrival, self.error
        return self.arrival.process


def comes_true(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_the_lowest_ranks_go_on_and_the_others_wait_at_the_door(address, capsys):
    zero, spare, two = (Started(address, rank, 1.5) for rank in (0, 3, 2))
    places = zero.place(), two.place()
    assert [place.process_id for place in places] == [0, 1]
    assert {place.num_processes for place in places} == {2}
    assert places[0].coordinator == places[1].coordinator != address
    assert "process(es) [1] of 4 did not arrive" in capsys.readouterr().out
    door = zero.arrival.door
    assert spare.thread.is_alive() and not door.can_grow()
    missing = Started(address, 1)
    assert comes_true(door.can_grow)
    time.sleep(2)  # Longer than the time-out: a process that waits has no limit.
    assert spare.thread.is_alive() and missing.thread.is_alive()

    door.close()
    again = [Started(address, 0, 20), Started(address, 2, 20)]
    places = [started.place() for started in (again[0], missing, again[1], spare)]
    assert [place.process_id for place in places] == [0, 1, 2, 3]
    assert {place.num_processes for place in places} == {4}
    assert not again[0].arrival.door.can_grow()
    again[0].arrival.door.close()


def test_a_process_that_leaves_the_door_does_not_count(address):
    zero, one = Started(address, 0), Started(address, 1)
    one.place()
    zero.place()
    door = zero.arrival.door
    first, second = Started(address, 2), Started(address, 3)
    assert comes_true(door.can_grow)
    third = Started(address, 3)  # Its machine was cut off and has come back.
    time.sleep(0.5)
    assert door.can_grow()
    door.close()
    assert not (first.arrival or second.arrival or third.arrival)


def test_too_few_processes_are_an_error_that_names_the_missing(address):
    zero = Started(address, 0)
    zero.thread.join(20)
    assert "process(es) [1, 2, 3] of 4 did not arrive" in str(zero.error)


def test_a_stranger_at_the_door_is_not_counted(address):
    zero, one = Started(address, 0), Started(address, 1)
    one.place()
    zero.place()
    door = zero.arrival.door
    host, port = address.split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(b'{"process": 2, "num": 4}\n')
        time.sleep(0.5)
        assert not door.can_grow()
        waiting = [Started(address, 2), Started(address, 3)]
        assert comes_true(door.can_grow)
        assert all(process.thread.is_alive() for process in waiting)
    door.close()


@pytest.mark.parametrize("present, number", [(1, 0), (2, 2), (5, 2), (6, 6), (8, 8)])
def test_a_run_goes_on_in_as_many_processes_as_it_may(present, number):
    assert largest_number((8, 6, 2), present) == number
