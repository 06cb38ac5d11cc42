"""A barrier before jax starts, which names the processes that are missing.

Process 0 listens at the coordinator's address until every process of the run has
connected, then replies to all of them. After a time-out its reply names the missing
processes. The same port then serves jax.distributed, whose own time-out ends processes
without naming any.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator

from meshpar.multihost import address, admission
from meshpar.multihost import token as tokens
from meshpar.multihost.process import MissingError, MultihostError, ProcessInfo

_POLL_S = 0.2

_LONGEST_S = 7 * 24 * 3600.0


def check_timeout(timeout_s: float) -> None:
    """Raises an error unless a time-out is a number of seconds, up to a week.

    Raises:
      MultihostError: it is not.
    """
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= _LONGEST_S):
        raise MultihostError(
            f"timeout={timeout_s} for the start: use seconds above 0 and up to "
            f"{_LONGEST_S:.0f}, such as --start_timeout=120"
        )


@contextlib.contextmanager
def all_arrived(process: ProcessInfo, timeout_s: float) -> Iterator[str]:
    """A context that begins when all processes of the run have arrived.

    Within it, process 0 keeps the coordinator's port from other programs.

    Args:
      process: this process.
      timeout_s: how long to wait for the others, in seconds.

    Yields:
      The address at which process 0 listened; "" on other processes.

    Raises:
      MissingError: names the processes that did not arrive, process 0 among them.
      PortTakenError: another program listens at the coordinator's port.
      MultihostError: two processes have one rank, or expect different numbers of
        processes, or this process has no token of the run.
    """
    check_timeout(timeout_s)
    token = tokens.run_token(os.environ)
    address.parse(process.coordinator)
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as held:
        bound = ""
        if process.process_id == 0:
            servers = address.listen(process.coordinator)
            bound = address.bound_address(servers)
            for holding in address.hold(servers):
                held.enter_context(holding)
            _serve(process, token, servers, deadline, timeout_s)
        else:
            _connect(process, token, deadline, timeout_s)
        yield bound


def _serve(
    process: ProcessInfo,
    token: bytes,
    servers: list[socket.socket],
    deadline: float,
    timeout_s: float,
) -> None:
    """Waits for the other processes, replies to them, and raises their problem."""
    with contextlib.closing(admission.Admission(process, token, servers)) as admitted:
        missing, problem = admitted.wait(deadline), admitted.problem
        if missing:
            problem = (
                f"process(es) {missing} of {process.num_processes} did not arrive at "
                f"{process.coordinator} within {timeout_s:g} s; look at their logs"
            )
            if admitted.refused:
                hosts = ", ".join(f"{n} from {h}" for h, n in admitted.refused.items())
                problem += (
                    f"; connections without the token of this run were refused "
                    f"({hosts}): give all processes the same {tokens.TOKEN}"
                )
        admitted.reply({"problem": problem, "missing": bool(missing)})
    if problem:
        raise (MissingError if missing else MultihostError)(problem)


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """Reads a line in bounded time and length.

    Raises:
      OSError: the deadline has passed, or the line is too long.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        read = connection.recv(tokens.MAX_LINE)
        line += read
        if not read or len(line) > tokens.MAX_LINE or time.monotonic() > deadline:
            raise OSError("the connection ended")
    return line


def _connect(
    process: ProcessInfo, token: bytes, deadline: float, timeout_s: float
) -> None:
    """Connects to process 0, waits for its reply and raises the problem in it."""
    why = "check that process 0 runs and that the address is right"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                address.parse(process.coordinator), timeout=min(left, 5)
            ) as connection:
                why = (
                    "a program listens there that is no process 0 of this run; check "
                    f"the address, and give all processes the same {tokens.TOKEN}"
                )
                reply = _ask(connection, process, token, deadline)
        except (OSError, UnicodeError):
            reply = None  # Process 0 is not there yet, or died before all had come.
        if reply is None:
            time.sleep(_POLL_S)
        elif reply["problem"]:
            raise (MissingError if reply["missing"] else MultihostError)(
                reply["problem"]
            )
        else:
            return
    raise MissingError(
        f"process {process.process_id} cannot reach process 0 at "
        f"{process.coordinator} within {timeout_s:g} s; {why}"
    )


def _ask(
    connection: socket.socket, process: ProcessInfo, token: bytes, deadline: float
) -> dict | None:
    """Proves to process 0 that this process belongs to the run.

    Returns:
      The reply of process 0; None if another program answers.
    """
    greeted_by = min(deadline, time.monotonic() + admission.PROOF_S)
    word, _, challenge = _read_line(connection, greeted_by).decode().partition(" ")
    if word != admission.GREETING:
        return None
    own_challenge = tokens.make_challenge()
    message = {
        "process": process.process_id,
        "num": process.num_processes,
        "challenge": own_challenge,
    }
    connection.sendall(tokens.seal(token, challenge.strip(), message))
    # Process 0 replies at its own deadline, which may be a little later.
    line = _read_line(connection, deadline + admission.PROOF_S)
    return tokens.unseal(token, own_challenge, line)
