"""A barrier before jax starts, which names the processes that are missing.

Process 0 listens at the coordinator's address until every process of the run has
connected, then replies to all of them. After a time-out either the run goes on in fewer
processes, or the reply names those that are missing. jax.distributed starts after that;
its own time-out ends processes without naming any.
"""

import contextlib
import math
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshpar.errors import shown
from meshpar.multihost import address, admission
from meshpar.multihost import token as tokens
from meshpar.multihost.door import Door, largest_number
from meshpar.multihost.messages import Hello, Place, Refusal
from meshpar.multihost.process import MissingError, MultihostError, ProcessInfo

_LONGEST_S = 7 * 24 * 3600.0

_LONGEST_PROBLEM = 500
"""Characters of a problem that fit into a message, however they are escaped."""

_PATIENCE_S = 600.0
"""How long a process looks for process 0 if the run may go on in fewer, in seconds.

Process 0 may have to save and to start again before it listens.
"""


def check_timeout(timeout_s: float) -> None:
    """Raises an error unless a time-out is a number of seconds, up to a week.

    Raises:
      MultihostError: it is not.
    """
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= _LONGEST_S):
        raise MultihostError(
            f"timeout={timeout_s} for the start: use seconds above 0 and up to "
            f"{_LONGEST_S:.0f}, such as 120 (a command: --start_timeout=120)"
        )


class Arrival(NamedTuple):
    """A process of the run, as jax.distributed starts it.

    Attributes:
      process: address, number of processes and rank; in fewer processes than expected
        all three differ from those that the process was given.
      bound: the address at which process 0 listened; "" on other processes.
      door: where processes wait that come later; None on other processes than 0, and
        if the run never goes on in fewer processes.
    """

    process: ProcessInfo
    bound: str = ""
    door: Door | None = None


@contextlib.contextmanager
def all_arrived(
    process: ProcessInfo, timeout_s: float, fewer: Sequence[int] = ()
) -> Iterator[Arrival]:
    """A context that begins when the processes of the run have arrived.

    Within it, process 0 keeps the port of jax.distributed from other programs. If the
    run may go on in fewer processes, that is a port of its own: at the coordinator's
    address process 0 goes on listening to processes that come later.

    Args:
      process: this process.
      timeout_s: how long to wait for the others, in seconds.
      fewer: numbers of processes in which the run may go on if some do not arrive;
        those of the lowest ranks take part, the others wait without a limit.

    Yields:
      This process among those that take part.

    Raises:
      MissingError: names the processes that did not arrive, process 0 among them.
      PortTakenError: another program listens at the coordinator's port.
      MultihostError: two processes have one rank, or expect different numbers of
        processes, or this process has no token of the run.
    """
    check_timeout(timeout_s)
    token = tokens.run_token(os.environ)
    address.parse(process.coordinator)
    if process.process_id:
        yield Arrival(_connect(process, token, timeout_s, bool(fewer)))
        return
    with contextlib.ExitStack() as held:
        servers = address.listen(process.coordinator)
        holding = (
            [address.hold_another(servers[-1])] if fewer else address.hold(servers)
        )
        for keeper in holding:
            held.enter_context(keeper)
        bound = address.bound_address(holding if fewer else servers)
        _, port = address.parse(bound)
        place = process._replace(
            coordinator=address.with_port(process.coordinator, port)
        )
        admitted = admission.Admission(process, token, servers, bool(fewer))
        numbers = (process.num_processes, *fewer)
        try:
            members = _gather(admitted, process, timeout_s, numbers)
        except MultihostError:
            admitted.close()
            raise
        place = place._replace(num_processes=len(members))
        for rank, member in enumerate(members[1:], 1):
            admitted.admit(member, Place(*place._replace(process_id=rank)))
        if fewer:
            yield Arrival(place, bound, Door(admitted, members, numbers))
        else:
            admitted.close()
            yield Arrival(place, bound)


def _gather(
    admitted: admission.Admission,
    process: ProcessInfo,
    timeout_s: float,
    numbers: Sequence[int],
) -> list[int]:
    """Waits for the other processes; returns the ranks of those that take part."""
    missing, problem = admitted.wait(time.monotonic() + timeout_s), admitted.problem
    members = [0, *sorted(admitted.alive)]
    members = members[: largest_number(numbers, len(members))]
    if missing:
        problem = (
            f"process(es) {missing} of {process.num_processes} did not arrive at "
            f"{process.coordinator} within {timeout_s:g} s"
        )
        if members:
            _say(f"{problem}; the run goes on in {len(members)} process(es)")
            return members
        problem += "; look at their logs"
        if admitted.refused:
            hosts = ", ".join(f"{n} from {h}" for h, n in admitted.refused.items())
            problem += (
                f"; connections without the token of this run were refused "
                f"({hosts}): give all processes the same {tokens.TOKEN}, and the same "
                "version of meshpar"
            )
    if problem:
        admitted.reply(Refusal(shown(problem, _LONGEST_PROBLEM), bool(missing)))
        raise (MissingError if missing else MultihostError)(problem)
    return members


def _say(text: str) -> None:
    print(text, flush=True)


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
    process: ProcessInfo, token: bytes, timeout_s: float, waits: bool
) -> ProcessInfo:
    """Connects to process 0 and waits for its reply.

    Args:
      process: this process.
      token: the token of the run.
      timeout_s: how long to wait for process 0, in seconds.
      waits: whether to wait without a limit once process 0 has been reached.

    Returns:
      The place of this process in the run.

    Raises:
      MultihostError: the problem that process 0 found.
      MissingError: it cannot be reached, or it misses other processes.
    """
    why = "check that process 0 runs and that the address is right"
    patience_s = max(timeout_s, _PATIENCE_S) if waits else timeout_s
    deadline = time.monotonic() + patience_s
    while (left := deadline - time.monotonic()) > 0:
        reply = None
        with contextlib.suppress(OSError, UnicodeError):
            # Process 0 is not there yet, or dies before all have come.
            with socket.create_connection(
                address.parse(process.coordinator), timeout=min(left, 5)
            ) as connection:
                why = (
                    "a program listens there that is no process 0 of this run; check "
                    f"the address, and give all processes the same {tokens.TOKEN}"
                )
                challenge = _prove(connection, process, token, deadline)
                if challenge and waits:
                    why = "check whether the run has ended"
                    _wait(connection, process, timeout_s + admission.PROOF_S)
                    deadline = time.monotonic() + patience_s
                # Process 0 replies at its own deadline, which may be a little later.
                line = _read_line(connection, deadline + admission.PROOF_S)
                content = tokens.unseal(token, challenge, line) or {}
                reply = Place.of(content) or Refusal.of(content)
        match reply:
            case Place(coordinator, num, rank):
                return ProcessInfo(coordinator, num, rank)
            case Refusal(problem, missing):
                raise (MissingError if missing else MultihostError)(problem)
        time.sleep(admission.POLL_S)
    raise MissingError(
        f"process {process.process_id} cannot reach process 0 at "
        f"{process.coordinator} within {patience_s:g} s; {why}"
    )


def _prove(
    connection: socket.socket, process: ProcessInfo, token: bytes, deadline: float
) -> str:
    """Proves to process 0 that this process belongs to the run.

    Returns:
      The challenge that the reply of process 0 has to answer; "" if another program
      answers.
    """
    greeted_by = min(deadline, time.monotonic() + admission.PROOF_S)
    word, _, challenge = _read_line(connection, greeted_by).decode().partition(" ")
    if word != admission.GREETING:
        return ""
    own_challenge = tokens.make_challenge()
    hello = Hello(process.process_id, process.num_processes, own_challenge)
    connection.sendall(tokens.seal(token, challenge.strip(), hello))
    return own_challenge


def _wait(connection: socket.socket, process: ProcessInfo, quiet_s: float) -> None:
    """Waits until process 0 sends something or is gone; says so after a while."""
    address.notice_loss(connection)
    if not select.select([connection], [], [], quiet_s)[0]:
        _say(
            f"process {process.process_id} of {process.num_processes} waits: the run "
            "goes on in fewer processes, until there are enough for more"
        )
        select.select([connection], [], [])
