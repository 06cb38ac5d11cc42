"""Arrays in shared memory: several processes of one machine read and write them.

The process that makes the arrays removes them. After a kill the resource tracker of
multiprocessing does, as soon as the last process that uses them has ended.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from multiprocessing import shared_memory
from typing import NamedTuple

import numpy as np

from meshpar.errors import MeshparError

_SHARED_FOLDER = "/dev/shm"


class SharedArray(NamedTuple):
    """One array in shared memory, in a form that another process can be sent.

    Attributes:
      name: of the segment of shared memory.
      shape: of the array.
      dtype: name of its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@contextlib.contextmanager
def share(
    arrays: Mapping[str, np.ndarray],
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, SharedArray]]]:
    """Copies arrays to shared memory, which is removed at the end of the context.

    Args:
      arrays: {name: array} of any shape and numeric dtype.

    Yields:
      {name: the shared array} and {name: segment}. No reference to a shared array may
      outlive the context.

    Raises:
      MeshparError: the machine has too little shared memory.
    """
    _check_room(sum(array.nbytes for array in arrays.values()))
    opened, shared, segments = [], {}, {}
    try:
        for name, array in arrays.items():
            memory = shared_memory.SharedMemory(create=True, size=max(1, array.nbytes))
            opened.append(memory)
            segments[name] = SharedArray(memory.name, array.shape, array.dtype.name)
            shared[name] = _view(memory, segments[name])
            shared[name][...] = array
        yield shared, segments
    finally:
        for memory in opened:
            memory.unlink()
        shared.clear()
        for memory in opened:
            memory.close()


@contextlib.contextmanager
def attach(segments: Mapping[str, SharedArray]) -> Iterator[dict[str, np.ndarray]]:
    """Opens arrays that another process shares.

    Args:
      segments: {name: segment} from `share`.

    Yields:
      {name: the shared array}. No reference to one may outlive the context.
    """
    opened, shared = [], {}
    try:
        for name, segment in segments.items():
            memory = shared_memory.SharedMemory(segment.name)
            opened.append(memory)
            shared[name] = _view(memory, segment)
        yield shared
    finally:
        shared.clear()
        for memory in opened:
            memory.close()


def _view(memory: shared_memory.SharedMemory, segment: SharedArray) -> np.ndarray:
    return np.ndarray(segment.shape, segment.dtype, memory.buf)


def _check_room(num_bytes: int) -> None:
    """Raises MeshparError if shared memory is too small: writing would be fatal."""
    if not os.path.isdir(_SHARED_FOLDER):
        return  # The system keeps shared memory elsewhere, and refuses by itself.
    room = os.statvfs(_SHARED_FOLDER)
    free = room.f_bavail * room.f_frsize
    if num_bytes > free:
        raise MeshparError(
            f"{num_bytes / 1e6:,.0f} MB of shared memory are needed, but "
            f"{_SHARED_FOLDER} has {free / 1e6:,.0f} MB free: give it more (of a "
            "container: --shm-size), or use fewer rows"
        )
