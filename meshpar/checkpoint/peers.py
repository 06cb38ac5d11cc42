"""Boxes of local checkpoints: loaded from this disk, or received from peers."""

import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from meshpar.checkpoint.boxes import Box
from meshpar.checkpoint.read_problems import warn_once
from meshpar.errors import CheckpointError
from meshpar.multihost.agree import READ_S, allgather_objects, broadcast


class Entry(NamedTuple):
    """The stored place of a box: an entry of an .npz file."""

    file: pathlib.Path
    key: str


def load_boxes(entries: Mapping[Box, Entry]) -> dict[Box, np.ndarray]:
    """{box: its bytes} from this disk; logs and omits boxes that fail to read."""
    contents = {}
    for box, (file, key) in entries.items():
        try:
            with (
                file.open("rb") as opened,
                np.load(opened, allow_pickle=False) as arrays,
            ):
                contents[box] = arrays[key]
        except Exception as error:  # Torn bytes may raise anything.
            warn_once(f"{file}: {box} cannot be read: {error}")
    return contents


def receive_boxes(
    lacking: Collection[Box],
    on_disk: Mapping[Box, Entry],
    leaves: Mapping[str, Any],
) -> dict[Box, np.ndarray]:
    """Receives boxes from peers and sends them theirs; all processes call it.

    Args:
      lacking: boxes that this process needs and cannot read.
      on_disk: {box: entry} of this process's disk.
      leaves: {key path: leaf}, for the boxes' dtypes.

    Returns:
      {box: its bytes, uint8} for the boxes in `lacking`.

    Raises:
      CheckpointError: no process can read a box.
    """
    requests = allgather_objects("boxes lacking", sorted(map(str, lacking)), READ_S)
    texts = sorted({text for boxes in requests.values() for text in boxes})
    requested = {text: Box.parse(text) for text in texts}
    sendable = load_boxes(
        {box: on_disk[box] for box in requested.values() if box in on_disk}
    )
    offers = allgather_objects("boxes readable", list(map(str, sendable)), READ_S)
    received = {}
    for text, box in requested.items():
        source = next((p for p, offered in offers.items() if text in offered), None)
        if source is None:
            raise CheckpointError(f"no process can read {text}")
        size = math.prod(box.shape) * leaves[box.leaf].dtype.itemsize
        content = broadcast(sendable.get(box, np.zeros(size, np.uint8)), source)
        if box in lacking:
            received[box] = content
    return received
