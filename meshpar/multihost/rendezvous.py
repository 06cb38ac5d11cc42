"""The host-side barrier before jax starts: who is there, and who is missing.

Process 0 listens at the coordinator's address until every process has called, then
tells all to go on; when time is up it tells those that came which ones are missing.
The same port then serves jax.distributed, whose own time-out ends processes without
naming any.
"""

import contextlib
import json
import socket
import time

from meshpar.multihost.process import MissingError, MultihostError, ProcessInfo

_POLL_S = 0.2


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise MultihostError(f"coordinator={coordinator!r}: write host:port")
    return host.strip("[]"), int(port)


def _receive(connection: socket.socket) -> dict:
    with connection.makefile("r") as lines:
        return json.loads(lines.readline() or "{}")


def _send(connection: socket.socket, message: dict) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())


def _gone(connection: socket.socket) -> bool:
    """Whether the process at the other end has died since it called."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(5)


def wait_for_all(who: ProcessInfo, timeout_s: float) -> None:
    """Waits until all processes of the run are there.

    Args:
      who: this process.
      timeout_s: how long to wait for the others, in seconds.

    Raises:
      MultihostError: processes that are missing, or the coordinator that is, or two
        processes with one number.
    """
    deadline = time.monotonic() + timeout_s
    if who.process_id == 0:
        _gather(who, deadline, timeout_s)
    else:
        _call(who, deadline, timeout_s)


def _gather(who: ProcessInfo, deadline: float, timeout_s: float) -> None:
    _, port = _address(who.coordinator)
    here: dict[int, socket.socket] = {}
    callers: list[socket.socket] = []  # All that hear the answer.
    problem, kind = "", MultihostError
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(
                socket.create_server(("", port), reuse_port=False)
            )
        except OSError as error:
            raise MultihostError(
                f"process 0 cannot listen at {who.coordinator}: {error.strerror}; "
                "choose another port"
            ) from error
        server.settimeout(_POLL_S)
        while not problem:
            here = {n: one for n, one in here.items() if not _gone(one)}
            if len(here) == who.num_processes - 1:
                break
            if time.monotonic() > deadline:
                missing = sorted({*range(1, who.num_processes)} - {*here})
                problem = (
                    f"process(es) {missing} of {who.num_processes} did not come to "
                    f"{who.coordinator} within {timeout_s:g} s; look at their logs"
                )
                kind = MissingError
                break
            with contextlib.suppress(TimeoutError, OSError, json.JSONDecodeError):
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(5)
                said = _receive(connection)
                number, num = said.get("process"), said.get("num")
                if not isinstance(number, int):
                    continue  # A probe of some health check.
                if number in here or number == 0:
                    problem = f"two processes say that they are process {number}"
                elif num != who.num_processes:
                    problem = (
                        f"process {number} expects {num} processes, process 0 "
                        f"{who.num_processes}"
                    )
                callers.append(connection)
                here[number] = connection
        for connection in callers:
            with contextlib.suppress(OSError):
                missed = kind is MissingError
                _send(connection, {"problem": problem, "missing": missed})
    if problem:
        raise kind(problem)


def _call(who: ProcessInfo, deadline: float, timeout_s: float) -> None:
    address = _address(who.coordinator)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise MissingError(
                f"process {who.process_id} cannot reach process 0 at "
                f"{who.coordinator} within {timeout_s:g} s; does it run, and is the "
                "address right?"
            )
        try:
            with socket.create_connection(address, timeout=min(left, 5)) as connection:
                _send(connection, {"process": who.process_id, "num": who.num_processes})
                connection.settimeout(left + 5)
                answer = _receive(connection)
        except (OSError, json.JSONDecodeError):
            time.sleep(_POLL_S)
            continue
        if "problem" not in answer:
            time.sleep(_POLL_S)  # Process 0 went away before it had all.
            continue
        if answer["problem"]:
            kind = MissingError if answer["missing"] else MultihostError
            raise kind(answer["problem"])
        return
