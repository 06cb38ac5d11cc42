"""Where this process stands among others: what launchers and clusters say of it."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from meshpar import compat
from meshpar.errors import MeshparError

_OURS = ("MESHPAR_COORDINATOR", "MESHPAR_NUM_PROCESSES", "MESHPAR_PROCESS_ID")


class MultihostError(MeshparError):
    """The processes of a run do not fit together, or one of them is missing."""


class MissingError(MultihostError):
    """Processes that did not come: a launcher may start the run again."""

    exit_code = 76


class ProcessInfo(NamedTuple):
    """One process of a run.

    Attributes:
      coordinator: host:port of process 0.
      num_processes: processes of the run.
      process_id: number of this one, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int


def _from_ours(environment: Mapping[str, str]) -> ProcessInfo | None:
    """MESHPAR_* as our own launchers set them; MPICH's numbers fill in for two."""
    names = dict(zip(_OURS, map(environment.get, _OURS), strict=True))
    if "PMI_SIZE" in environment and names[_OURS[0]]:
        names[_OURS[1]] = names[_OURS[1]] or environment["PMI_SIZE"]
        names[_OURS[2]] = names[_OURS[2]] or environment["PMI_RANK"]
    elif names[_OURS[0]] and not names[_OURS[1]] and compat.detected_cluster():
        # A coordinator alone beside a cluster that knows the rest.
        _, num, process = compat.detected_cluster()
        return ProcessInfo(names[_OURS[0]], num, process)
    if not any(names.values()):
        return None
    if lacking := [name for name, value in names.items() if value is None]:
        raise MultihostError(
            f"{', '.join(lacking)} not set; a launcher sets all of {_OURS}"
        )
    return ProcessInfo(names[_OURS[0]], int(names[_OURS[1]]), int(names[_OURS[2]]))


def process_info(
    coordinator: str = "", num_processes: int = 0, process_id: int = -1
) -> ProcessInfo | None:
    """This process among the others of its run.

    Flags win over MESHPAR_* of our launchers, and those over what jax finds in the
    environment of SLURM, Open MPI, Kubernetes and Cloud TPU.

    Args:
      coordinator: host:port of process 0, or "".
      num_processes: processes of the run, or 0.
      process_id: number of this process, or -1.

    Returns:
      None for a single process.

    Raises:
      MultihostError: half of what is needed, or a number out of range.
    """
    given = (bool(coordinator), num_processes > 0, process_id >= 0)
    if any(given) and not all(given):
        raise MultihostError(
            f"coordinator={coordinator!r}, num_processes={num_processes}, "
            f"process_id={process_id}: give all three or none"
        )
    found = ProcessInfo(coordinator, num_processes, process_id) if all(given) else None
    found = found or _from_ours(os.environ)
    if found is None and (detected := compat.detected_cluster()):
        found = ProcessInfo(*detected)
    if found and not 0 <= found.process_id < found.num_processes:
        raise MultihostError(
            f"process_id={found.process_id} is not one of num_processes="
            f"{found.num_processes} (0 to {found.num_processes - 1})"
        )
    return None if found is None or found.num_processes == 1 else found
