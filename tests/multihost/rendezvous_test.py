"""The barrier at the start: who may come in, and what strangers cannot do."""

import contextlib
import socket
import threading
import time

import pytest

from meshpar.multihost import HUNG, MissingError, MultihostError, ProcessInfo
from meshpar.multihost import token as tokens
from meshpar.multihost.address import PortTakenError, listen
from meshpar.multihost.messages import Hello
from meshpar.multihost.rendezvous import all_arrived

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(tokens.TOKEN, TOKEN)


def free_port(host="localhost"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def wait_for_all(process, timeout_s):
    with all_arrived(process, timeout_s):
        pass


def outcome(process, timeout_s):
    """The error of a process that waits for the others; None without one."""
    try:
        wait_for_all(process, timeout_s)
    except MultihostError as error:
        return error
    return None


def outcomes(processes, timeout_s):
    """{number: error or None} of several threads that wait for each other."""
    found = {}

    def wait(number, process):
        found[number] = outcome(process, timeout_s)

    threads = [
        threading.Thread(target=wait, args=pair) for pair in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


class Waiting:
    """Process 0 in a thread of its own."""

    def __init__(self, num_processes, timeout_s, host="localhost"):
        self.port = free_port(host)
        self.address = f"[{host}]" if ":" in host else host
        self.process = ProcessInfo(f"{self.address}:{self.port}", num_processes, 0)
        self.host, self.error = host, None
        self.thread = threading.Thread(target=self.wait, args=[timeout_s])
        self.thread.start()

    def wait(self, timeout_s):
        self.error = outcome(self.process, timeout_s)

    def connect(self):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection((self.host, self.port), timeout=10)

    def other(self, rank):
        return self.process._replace(process_id=rank)

    def ended(self):
        self.thread.join(20)
        return not self.thread.is_alive()


def test_all_processes_arrive_before_jax_starts():
    address = f"localhost:{free_port()}"
    processes = [ProcessInfo(address, 4, rank) for rank in (3, 1, 2, 0)]
    assert outcomes(processes, 20) == {0: None, 1: None, 2: None, 3: None}


def test_missing_processes_are_named_in_all_that_arrived():
    address = f"localhost:{free_port()}"
    found = outcomes([ProcessInfo(address, 5, rank) for rank in (0, 2)], 1.5)
    assert MissingError.exit_code == HUNG  # Launchers start the run again.
    for error in found.values():
        assert isinstance(error, MissingError)
        assert "process(es) [1, 3, 4] of 5 did not arrive" in str(error)


def arrive(connection, token, **message):
    """Does what a process does that knows a token; returns its own challenge."""
    word, challenge = connection.recv(100).decode().split()
    assert word == "meshpar"
    hello = Hello(**{"process": 1, "num": 3, "challenge": "own"} | message)
    connection.sendall(tokens.seal(token.encode(), challenge, hello))


def test_a_process_that_connected_and_died_is_missing_until_it_connects_again():
    first = Waiting(3, 20)
    with first.connect() as dying:
        arrive(dying, TOKEN)
    second = threading.Thread(target=wait_for_all, args=(first.other(2), 20))
    second.start()
    time.sleep(0.5)
    assert first.thread.is_alive() and second.is_alive()
    wait_for_all(first.other(1), 10)
    second.join(20)
    assert first.ended() and first.error is None and not second.is_alive()


HOSTILE = {
    "a browser": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\xff\xfe\n",
    "a list": b"[]\n",
    "a number": b"7\n",
    "a huge number": b"9" * 5000 + b"\n",
    "deep JSON": b"[" * 4000 + b"\n",
    "a rank": b'{"process": 1, "num": 2}\n',
    "a rank without a proof": b' {"process": 1, "num": 2, "challenge": ""}\n',
    "an empty proof": b"\n",
    "no line": b"x" * 100_000,
    "nothing": b"",
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_a_stranger_neither_ends_nor_passes_the_start(sent):
    first = Waiting(2, 20)
    with first.connect() as stranger, contextlib.suppress(OSError):
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1000):  # Process 0 closes the connection.
            pass
    assert first.thread.is_alive()
    wait_for_all(first.other(1), 10)
    assert first.ended() and first.error is None


def test_another_token_is_refused_and_both_sides_say_so(monkeypatch):
    first = Waiting(3, 3)
    with first.connect() as stranger:
        arrive(stranger, "f" * 32)
        assert stranger.recv(100) == b""
    with first.connect() as reflected:  # An answer to the challenge of another.
        reflected.recv(100)
        line = tokens.seal(TOKEN.encode(), "old", Hello(1, 3, "own"))
        reflected.sendall(line)
        assert reflected.recv(100) == b""
    assert first.ended()
    said = str(first.error)
    assert "[1, 2] of 3 did not arrive" in said and "2 from 127.0.0.1" in said
    assert TOKEN not in said


def test_a_process_does_not_believe_a_program_that_is_not_process_0():
    def answer(server):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.sendall(b"meshpar 00\n")
                connection.recv(1000)
                connection.sendall(b'0000 {"problem": "", "missing": false}\n')
                connection.close()

    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=answer, args=[server], daemon=True).start()
        address = f"localhost:{server.getsockname()[1]}"
        error = outcome(ProcessInfo(address, 2, 1), 1)
        server.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, MissingError)
    assert "no process 0 of this run" in str(error)


def test_dripping_bytes_and_many_silent_connections_do_not_prolong_the_start():
    first = Waiting(2, 2)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(first.connect()) for _ in range(300)]
        while first.thread.is_alive() and time.monotonic() - began < 10:
            with contextlib.suppress(OSError):
                silent[-1].sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < 5
    assert "[1] of 2 did not arrive" in str(first.error)


def test_a_process_comes_in_past_many_silent_connections():
    first = Waiting(2, 20)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(first.connect())
        wait_for_all(first.other(1), 10)
    assert first.ended() and first.error is None


@pytest.mark.parametrize(
    "message, words",
    [
        ({"process": 1, "num": 4}, "expects 4 processes, process 0 3"),
        ({"process": 0, "num": 3}, "two processes have rank 0"),
        ({"process": 3, "num": 3}, "rank 3 is not one of 0 to 2"),
    ],
)
def test_ranks_are_checked_and_the_process_hears_of_it(message, words):
    first = Waiting(3, 20)
    with first.connect() as other:
        arrive(other, TOKEN, **message)
        reply = tokens.unseal(TOKEN.encode(), "own", other.makefile("rb").readline())
    assert first.ended() and words in str(first.error) and words in reply["problem"]


def test_two_processes_of_one_rank_are_an_error():
    address = f"localhost:{free_port()}"
    processes = [ProcessInfo(address, 3, rank) for rank in (0, 1, 1)]
    assert "two processes have rank 1" in str(outcomes(processes, 10)[0])


def test_the_coordinators_address_alone_is_listened_on():
    port = free_port()
    (server,) = listen(f"127.0.0.1:{port}", {})
    with server:
        assert server.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        with pytest.raises(PortTakenError, match="another port") as caught:
            listen(f"127.0.0.1:{port}", {})
    assert caught.value.exit_code == 74
    with pytest.raises(MultihostError, match="JAX_COORDINATOR_BIND_ADDRESS"):
        listen(f"192.0.2.1:{port}", {})
    elsewhere = {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.3:{port}"}
    (server,) = listen(f"192.0.2.1:{port}", elsewhere)
    with server:
        assert server.getsockname()[0] == "127.0.0.3"


def test_the_port_is_kept_from_others_until_jax_has_taken_it():
    address = f"127.0.0.1:{free_port()}"
    other = threading.Thread(target=wait_for_all, args=(ProcessInfo(address, 2, 1), 20))
    other.start()
    with all_arrived(ProcessInfo(address, 2, 0), 20) as arrival:
        assert arrival.bound == address
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", int(address.rpartition(":")[2])))
    other.join(20)
    with contextlib.ExitStack() as stack:  # Two runs never share a port.
        for server in listen(address, {}):
            stack.enter_context(server)
        with pytest.raises(PortTakenError):
            listen(address, {})


def test_ipv6_addresses_work():
    first = Waiting(2, 20, host="::1")
    wait_for_all(first.other(1), 10)
    assert first.ended() and first.error is None


def test_a_coordinator_that_is_missing_is_named():
    error = outcome(ProcessInfo(f"localhost:{free_port()}", 2, 1), 1)
    assert "process 1 cannot reach process 0 at localhost" in str(error)


@pytest.mark.parametrize(
    "coordinator", ["host", "host:99999", "host:0", ":1", "host:٣", "::1:80", "h:-1"]
)
def test_an_address_that_cannot_be_is_an_error(coordinator):
    with pytest.raises(MultihostError, match="write|use 1 to 65535"):
        wait_for_all(ProcessInfo(coordinator, 2, 0), 1)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0, -1, 1e9])
def test_a_time_out_that_is_no_time_is_an_error(timeout_s):
    with pytest.raises(MultihostError, match="use seconds above 0"):
        wait_for_all(ProcessInfo("localhost:1", 2, 0), timeout_s)
