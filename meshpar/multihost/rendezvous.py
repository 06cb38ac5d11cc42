"""A barrier before jax starts, which names the processes that are missing.

Process 0 listens at the coordinator's address until every process has connected, then
replies to all of them. After a time-out its reply names the missing processes. The same
port then serves jax.distributed, whose own time-out ends processes without naming any.
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
    """A message; {} from a peer that is not ours, such as a health check's probe."""
    with connection.makefile("r", errors="replace") as lines:
        line = lines.readline()
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}


def _send(connection: socket.socket, message: dict) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())


def _is_closed(connection: socket.socket) -> bool:
    """Whether the process at the other end has died."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(5)


def wait_for_all(process: ProcessInfo, timeout_s: float) -> None:
    """Waits until all processes of the run have arrived.

    Args:
      process: this process.
      timeout_s: how long to wait for the others, in seconds.

    Raises:
      MissingError: names the processes that did not arrive, process 0 among them.
      MultihostError: two processes have one rank, or expect different numbers of
        processes.
    """
    deadline = time.monotonic() + timeout_s
    if process.process_id == 0:
        _serve(process, deadline, timeout_s)
    else:
        _connect(process, deadline, timeout_s)


def _serve(process: ProcessInfo, deadline: float, timeout_s: float) -> None:
    """Waits for the other processes, replies to them, and raises their problem."""
    _, port = _address(process.coordinator)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(
                socket.create_server(("", port), reuse_port=False)
            )
        except OSError as error:
            raise MultihostError(
                f"process 0 cannot listen at {process.coordinator}: {error.strerror}; "
                "choose another port"
            ) from error
        server.settimeout(_POLL_S)
        connections, missing, problem = _accept_all(process, server, stack, deadline)
        if missing:
            problem = (
                f"process(es) {missing} of {process.num_processes} did not arrive at "
                f"{process.coordinator} within {timeout_s:g} s; look at their logs"
            )
        for connection in connections:
            with contextlib.suppress(OSError):
                _send(connection, {"problem": problem, "missing": bool(missing)})
    if problem:
        raise (MissingError if missing else MultihostError)(problem)


def _accept_all(
    process: ProcessInfo,
    server: socket.socket,
    stack: contextlib.ExitStack,
    deadline: float,
) -> tuple[list[socket.socket], list[int], str]:
    """Accepts connections until all processes are connected, or cannot be.

    Args:
      process: process 0.
      server: the listening socket, with a short time-out.
      stack: closes the connections.
      deadline: when to stop waiting, by `time.monotonic`.

    Returns:
      All connections, dead ones included; the ranks that are missing at the deadline;
      why the processes do not fit together, or "".
    """
    connections: list[socket.socket] = []
    alive: dict[int, socket.socket] = {}
    while True:
        alive = {rank: c for rank, c in alive.items() if not _is_closed(c)}
        if len(alive) == process.num_processes - 1:
            return connections, [], ""
        if time.monotonic() > deadline:
            missing = sorted({*range(1, process.num_processes)} - {*alive})
            return connections, missing, ""
        with contextlib.suppress(OSError):
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(5)
            message = _receive(connection)
            rank, num_processes = message.get("process"), message.get("num")
            if not isinstance(rank, int):
                continue  # Not a process of ours.
            connections.append(connection)
            if rank in alive or rank == 0:
                return connections, [], f"two processes have rank {rank}"
            if num_processes != process.num_processes:
                problem = (
                    f"process {rank} expects {num_processes} processes, process 0 "
                    f"{process.num_processes}"
                )
                return connections, [], problem
            alive[rank] = connection


def _connect(process: ProcessInfo, deadline: float, timeout_s: float) -> None:
    """Connects to process 0, waits for its reply and raises the problem in it."""
    address = _address(process.coordinator)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise MissingError(
                f"process {process.process_id} cannot reach process 0 at "
                f"{process.coordinator} within {timeout_s:g} s; check that process 0 "
                "runs and that the address is right"
            )
        try:
            with socket.create_connection(address, timeout=min(left, 5)) as connection:
                _send(
                    connection,
                    {"process": process.process_id, "num": process.num_processes},
                )
                connection.settimeout(left + 5)
                reply = _receive(connection)
        except OSError:
            time.sleep(_POLL_S)
            continue
        if "problem" not in reply:
            time.sleep(_POLL_S)  # Process 0 died before all had connected.
            continue
        if reply["problem"]:
            raise (MissingError if reply["missing"] else MultihostError)(
                reply["problem"]
            )
        return
