"""A flat dict of arrays as one array of bytes, whose shape is known beforehand."""

import json
from collections.abc import Mapping

import numpy as np

from meshpar.errors import MeshparError


def packed(arrays: Mapping[str, np.ndarray], size: int) -> np.ndarray:
    """A flat dict of arrays as uint8 [size], so that checkpoints know its shape.

    Raises:
      MeshparError: it does not fit.
    """
    table, parts, start = [], [], 0
    for name, array in arrays.items():
        array = np.array(array, order="C")
        table.append([name, array.dtype.str, list(array.shape), start])
        parts.append(array.reshape(-1).view(np.uint8))
        start += array.nbytes
    head = json.dumps(table).encode()
    total = 8 + len(head) + start
    if total > size:
        raise MeshparError(
            f"the state of the islands has {total} bytes, and checkpoints of this run "
            f"have room for {size}: use fewer islands, or more frequent pushes"
        )
    blob = np.zeros(size, np.uint8)
    blob[:8] = np.frombuffer(np.int64(len(head)).tobytes(), np.uint8)
    blob[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    blob[8 + len(head) : total] = np.concatenate([*parts, np.zeros(0, np.uint8)])
    return blob


def unpacked(blob: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `packed`."""
    length = int(np.frombuffer(blob[:8].tobytes(), np.int64)[0])
    start = 8 + length
    arrays = {}
    for name, dtype, shape, offset in json.loads(blob[8:start].tobytes()):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        part = blob[start + offset : start + offset + count].tobytes()
        arrays[name] = np.frombuffer(part, dtype).reshape(shape).copy()
    return arrays
