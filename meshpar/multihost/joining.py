"""The start of jax.distributed: a process joins the others of its run."""

import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from meshpar import compat
from meshpar.multihost.agree import allgather_objects
from meshpar.multihost.process import MissingError, ProcessInfo
from meshpar.multihost.rendezvous import all_arrived, check_timeout


class Membership(NamedTuple):
    """The processes that run.

    Attributes:
      num_processes: their number.
      can_grow: () -> whether so many others wait that a restart would have more; only
        process 0 knows.
    """

    num_processes: int = 1
    can_grow: Callable[[], bool] = lambda: False


def initialize(
    process: ProcessInfo | None, timeout_s: float = 120, fewer: Sequence[int] = ()
) -> Membership:
    """Joins the other processes of the run; does nothing for a single process.

    Args:
      process: this process, from `process_info`.
      timeout_s: how long to wait for the others, in seconds.
      fewer: numbers of processes in which the run may go on if some do not arrive.

    Raises:
      MissingError: names the processes that did not arrive in time.
      PortTakenError: another program listens at the coordinator's port.
      MultihostError: the processes do not fit together, or have no token of the run.
    """
    check_timeout(timeout_s)
    if process is None:
        return Membership()
    with all_arrived(process, timeout_s, fewer) as (process, bound, door):
        if process.num_processes > 1:
            _start(process, bound, timeout_s)
    local = jax.local_devices()
    print(
        f"process {process.process_id} of {process.num_processes} on "
        f"{socket.gethostname()}, pid {os.getpid()}: {len(local)} x "
        f"{local[0].device_kind}",
        flush=True,
    )
    _use_cache_together(timeout_s)
    if door is None:
        return Membership(process.num_processes)
    return Membership(process.num_processes, door.can_grow)


def _start(process: ProcessInfo, bound: str, timeout_s: float) -> None:
    """Starts jax.distributed.

    Args:
      process: address, number of processes and rank.
      bound: the address at which process 0 is to listen; "" on other processes.
      timeout_s: how long to wait for the others, in seconds.

    Raises:
      MissingError: it did not start.
    """
    try:
        jax.distributed.initialize(
            process.coordinator,
            process.num_processes,
            process.process_id,
            initialization_timeout=max(1, int(timeout_s)),
            coordinator_bind_address=bound or None,
        )
    except jax.errors.JaxRuntimeError as error:
        raise MissingError(
            f"all processes arrived, but jax.distributed did not start at "
            f"{process.coordinator}: {error}; start the run again"
        ) from error


def _use_cache_together(timeout_s: float) -> None:
    """Turns jax's compilation cache off if the processes cannot share its programs.

    Process 0 alone writes to the cache. Where a key includes the process, process 0
    would find its programs, run them and wait in a collective for the others, which
    still compile; on CPUs that wait ends with an error after 30 seconds. As the others
    compile in any case, the start takes no longer without the cache.
    """
    identity = compat.compilation_cache_identity()
    identities = allgather_objects("compilation cache", identity, timeout_s)
    if len(set(identities.values())) == 1:
        return
    has_folder = bool(compat.compilation_cache_folder())
    compat.disable_compilation_cache()
    if has_folder and jax.process_index() == 0:
        print(
            "all processes compile anew: on this platform the compilation cache would "
            "serve process 0 alone",
            flush=True,
        )
