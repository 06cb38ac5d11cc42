"""Hostile messages, with and without the token: the run waits on and starts right."""

import contextlib
import socket
import threading
import time

import pytest
from support.hostile_messages import HELLO, bodies, unsigned

from meshpar.multihost import MissingError, ProcessInfo, admission
from meshpar.multihost import token as tokens
from meshpar.multihost.admission import Admission
from meshpar.multihost.door import Door
from meshpar.multihost.messages import Hello, Place
from meshpar.multihost.rendezvous import all_arrived

TOKEN = b"0123456789abcdef0123456789abcdef"
ANOTHER = b"f" * 32
BODIES, UNSIGNED = list(bodies()), list(unsigned())


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(tokens.TOKEN, TOKEN.decode())


class Server:
    """The connections to process 0 of three, in a thread of their own."""

    def __init__(self, newest_counts=False):
        server = socket.create_server(("localhost", 0))
        self.port = server.getsockname()[1]
        self.process = ProcessInfo(f"localhost:{self.port}", 3, 0)
        self.admitted = Admission(self.process, TOKEN, [server], newest_counts)
        self.door = Door(self.admitted, [0], [3])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.door.close()

    def connect(self):
        """A connection, and the challenge that it is given."""
        connection = socket.create_connection(("localhost", self.port), timeout=10)
        word, challenge = connection.makefile("rb").readline().decode().split()
        assert word == admission.GREETING
        return connection, challenge

    def is_refused(self, line):
        """Whether a line, from a challenge, is answered by the end of the connection.

        The end of what was sent is no end of the connection: it stays open.
        """
        connection, challenge = self.connect()
        with connection:
            sent = line(challenge)
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent if sent.endswith(b"\n") else sent + b"\n")
                return connection.recv(1000) == b""
        return True

    def comes_in(self, rank):
        """A connection of a process of the run."""
        connection, challenge = self.connect()
        hello = Hello(rank, 3, "own")
        connection.sendall(tokens.seal(TOKEN, challenge, hello))
        return connection

    def has(self, ranks):
        end = time.monotonic() + 10
        while {*self.admitted.alive} != ranks and time.monotonic() < end:
            time.sleep(0.01)
        return {*self.admitted.alive} == ranks


def signed(token, body):
    return lambda challenge: tokens._proof(token, challenge, body) + b" " + body + b"\n"


def test_there_are_many_messages_and_the_one_they_vary_is_taken():
    assert len({*BODIES}) > 120 and len({*UNSIGNED}) > 120
    assert Hello.of(HELLO) == Hello(1, 3, "own")


@pytest.mark.parametrize("newest_counts", [False, True])
def test_who_has_the_token_and_sends_no_message_is_refused(newest_counts):
    with Server(newest_counts) as server:
        for body in BODIES:
            assert server.is_refused(signed(TOKEN, body)), body
        assert not server.admitted.alive and not server.admitted.problem
        assert server.door._thread.is_alive()
        with server.comes_in(1), server.comes_in(2):
            assert server.has({1, 2})


def test_strangers_are_refused_whatever_they_send():
    whole = Hello(**HELLO)
    with Server() as server:
        for sent in UNSIGNED:
            assert server.is_refused(lambda _, sent=sent: sent), sent[:200]
        for body in BODIES:
            assert server.is_refused(signed(ANOTHER, body)), body
        assert server.is_refused(lambda given: tokens.seal(ANOTHER, given, whole))
        assert server.is_refused(lambda given: tokens.seal(TOKEN, "another", whole))
        twice = lambda given: tokens.seal(TOKEN, given, whole) * 2  # noqa: E731
        assert server.is_refused(twice)
        assert not server.admitted.alive and not server.admitted.problem
        with server.comes_in(1), server.comes_in(2):
            assert server.has({1, 2})


def test_a_run_starts_right_while_strangers_knock():
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    over, places = threading.Event(), {}

    def knock(lines):
        while not over.is_set():
            for line in lines:
                with contextlib.suppress(OSError), socket.socket() as connection:
                    connection.settimeout(1)
                    connection.connect(("localhost", port))
                    connection.recv(100)
                    connection.sendall(line)
                    connection.recv(100)

    def start(rank):
        with all_arrived(ProcessInfo(f"localhost:{port}", 3, rank), 30) as arrival:
            places[rank] = arrival.process

    knocking = [threading.Thread(target=knock, args=[UNSIGNED[i::4]]) for i in range(4)]
    starting = [threading.Thread(target=start, args=[rank]) for rank in (0, 1, 2)]
    for thread in (*knocking, *starting[:2]):
        thread.start()
    time.sleep(1)
    starting[2].start()
    for thread in starting:
        thread.join(40)
    over.set()
    for thread in knocking:
        thread.join(40)
    assert {rank: place.process_id for rank, place in places.items()} == {
        0: 0,
        1: 1,
        2: 2,
    }


def test_answers_of_another_form_are_no_answers_and_the_true_one_counts():
    """A process waits on, and takes the place that it is given in the end."""
    lines = [signed(TOKEN, body) for body in BODIES[:: len(BODIES) // 8]]
    place = Place("localhost:1", 2, 1)
    lines.append(lambda challenge: tokens.seal(TOKEN, challenge, place))
    found = []

    def answer(server):
        for line in lines:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"meshpar 00\n")
                proof, _, body = connection.makefile("rb").readline().partition(b" ")
                hello = Hello.of(tokens.unseal(TOKEN, "00", proof + b" " + body))
                connection.sendall(line(hello.challenge))

    def connect(port):
        with all_arrived(ProcessInfo(f"localhost:{port}", 2, 1), 30) as arrival:
            found.append(arrival.process)

    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        threads = [
            threading.Thread(target=answer, args=[server]),
            threading.Thread(target=connect, args=[port]),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    assert found == [ProcessInfo(*place.content.values())]


def test_bytes_connections_time_and_names_are_limited(monkeypatch):
    monkeypatch.setattr(admission, "PROOF_S", 0.5)
    monkeypatch.setattr(admission, "MAX_STRANGERS", 5)
    monkeypatch.setattr(admission, "MAX_HOSTS", 1)
    with Server() as server, contextlib.ExitStack() as stack:
        silent = []
        for _ in range(20):
            silent.append(stack.enter_context(server.connect()[0]))
        assert len(server.admitted._strangers) <= 5
        for connection in silent:
            assert connection.recv(100) == b""  # Also the slow ones, after a while.
        server.admitted.refused = {"10.0.0.1": 1}
        for _ in range(3):
            assert server.is_refused(lambda _: b"no message\n")
        assert server.admitted.refused == {"10.0.0.1": 1, admission.OTHERS: 3}


def test_a_process_that_comes_again_and_again_holds_one_connection():
    """Its machine is cut off and comes back, or it expects another number."""
    with Server(newest_counts=True) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.comes_in(1))
        for _ in range(20):
            connection, challenge = server.connect()
            stack.enter_context(connection)
            connection.sendall(tokens.seal(TOKEN, challenge, Hello(2, 7, "own")))
        assert server.has({1})
        time.sleep(0.5)
        assert len(server.admitted._let_in) <= 2
        assert server.door._thread.is_alive()


def test_a_place_that_was_taken_over_may_be_lost_at_the_same_moment():
    with Server() as server:
        with server.comes_in(1):
            assert server.has({1})
            visitor = server.admitted.alive[1]
            server.admitted._leave(visitor)
            server.admitted._leave(visitor)  # The end of the connection, seen later.
            assert not server.admitted.alive


def test_a_list_of_many_missing_processes_reaches_all_that_came():
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    errors = []

    def start(rank):
        try:
            with all_arrived(ProcessInfo(f"localhost:{port}", 4000, rank), 2):
                pass
        except MissingError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=start, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    assert all("process(es) [2, 3, 4," in error for error in errors), errors
