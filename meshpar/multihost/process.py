"""The rank of this process: from flags, our launchers or the cluster's environment."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from meshpar import compat
from meshpar.errors import MeshparError

_VARIABLES = ("MESHPAR_COORDINATOR", "MESHPAR_NUM_PROCESSES", "MESHPAR_PROCESS_ID")


class MultihostError(MeshparError):
    """The processes of a run do not fit together, or some are missing."""


class MissingError(MultihostError):
    """Some processes did not arrive in time; a launcher may start the run again."""

    exit_code = 76


class ProcessInfo(NamedTuple):
    """One process of a run.

    Attributes:
      coordinator: host:port of process 0.
      num_processes: processes of the run.
      process_id: rank of this process, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int


def _from_launcher(environment: Mapping[str, str]) -> ProcessInfo | None:
    """The rank from MESHPAR_*; MPICH or the cluster may supply all but the address."""
    coordinator, num_processes, process_id = map(environment.get, _VARIABLES)
    if "PMI_SIZE" in environment and coordinator:  # MPICH.
        num_processes = num_processes or environment["PMI_SIZE"]
        process_id = process_id or environment.get("PMI_RANK")
    elif coordinator and not num_processes and (cluster := _detected()):
        return cluster._replace(coordinator=coordinator)
    values = (coordinator, num_processes, process_id)
    if not any(values):
        return None
    if not all(values):
        unset = [n for n, v in zip(_VARIABLES, values, strict=True) if not v]
        raise MultihostError(
            f"{', '.join(unset)} not set; a launcher sets all of {_VARIABLES}"
        )
    counts = (_count(n, v) for n, v in zip(_VARIABLES[1:], values[1:], strict=True))
    return ProcessInfo(coordinator, *counts)


def _count(name: str, text: str) -> int:
    """A whole number from the environment."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise MultihostError(f"{name}={text!r}: use a whole number from 0")
    return int(text)


def _detected() -> ProcessInfo | None:
    """The rank from the cluster that jax detects; None outside of one."""
    try:
        cluster = compat.detected_cluster()
    except (ValueError, KeyError, IndexError, RuntimeError, OSError) as error:
        raise MultihostError(
            "the variables of the cluster (SLURM, Open MPI, Kubernetes or Cloud TPU) "
            f"in the environment cannot be read: {type(error).__name__}: {error}; "
            f"unset them, or set all of {_VARIABLES}"
        ) from error
    if cluster is None:
        return None
    host, _, port = cluster[0].rpartition(":")
    if ":" in host and not host.startswith("["):  # Open MPI's IPv6 addresses.
        return ProcessInfo(f"[{host}]:{port}", *cluster[1:])
    return ProcessInfo(*cluster)


def process_info(
    coordinator: str = "", num_processes: int = 0, process_id: int = -1
) -> ProcessInfo | None:
    """The rank of this process and the address of its run.

    Sources, first one wins: the arguments (a program's flags), MESHPAR_* (our
    launchers), the cluster that jax detects (SLURM, Open MPI, Kubernetes, Cloud TPU).

    Args:
      coordinator: host:port of process 0, or "".
      num_processes: processes of the run, or 0.
      process_id: rank of this process, or -1.

    Returns:
      None for a single process.

    Raises:
      MultihostError: some but not all of the values are given, or the rank is out of
        range.
    """
    given = (bool(coordinator), num_processes != 0, process_id != -1)
    if any(given) and not all(given):
        raise MultihostError(
            f"coordinator={coordinator!r}, num_processes={num_processes}, "
            f"process_id={process_id}: give all three or none"
        )
    if all(given):
        process = ProcessInfo(coordinator, num_processes, process_id)
    else:
        process = _from_launcher(os.environ)
    if process is None:
        process = _detected()
    if process and not 0 <= process.process_id < process.num_processes:
        raise MultihostError(
            f"process_id={process.process_id} is not one of num_processes="
            f"{process.num_processes} (0 to {process.num_processes - 1})"
        )
    return None if process is None or process.num_processes == 1 else process
