"""Packets between one worker and one range, and the filters that they pass.

A packet passes the filters of its direction in order; the receiver undoes them in
reverse order. Every filter counts the bytes that it saved. The filters are in
`filters.py`.
"""

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

KEY_BYTES, VALUE_BYTES = 4, 4
"""Bytes of one key and of one number in a packet that no filter changed."""

Memory = dict[str, np.ndarray]
"""The memory of a receiver; on a server the cache of a range, which is replicated."""


@dataclasses.dataclass(frozen=True, eq=False)
class Packet:
    """Numbers by key, between one worker and one range.

    Attributes:
      channel: names worker and range; filters remember what they need per channel.
      task: number of the task, the same for all workers.
      keys: sorted, int32 [keys]; None if the digest stands for them.
      values: float32 [columns, keys]; None if they are packed.
      implied: whether the receiver knows the keys already, as in an answer.
      digest: hash of the keys, if it is sent.
      changed: one bit per key whose values are sent, packed; None if all are.
      packed: compressed values.
      columns: numbers per key.
    """

    channel: str
    task: int
    keys: np.ndarray | None
    values: np.ndarray | None
    implied: bool = False
    digest: bytes = b""
    changed: np.ndarray | None = None
    packed: bytes = b""
    columns: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values, digest and bits; names and numbers are not counted."""
        keys = 0 if self.keys is None or self.implied else self.keys.nbytes
        values = 0 if self.values is None else self.values.nbytes
        bits = 0 if self.changed is None else self.changed.nbytes
        return keys + values + bits + len(self.digest) + len(self.packed)


class Filter(abc.ABC):
    """One filter of one direction.

    Attributes:
      name: of the filter, in tables.
      saved: bytes that it saved so far.
    """

    name = ""

    def __init__(self):
        self.saved = 0

    @abc.abstractmethod
    def encode(self, packet: Packet) -> Packet:
        """The packet to send."""

    @abc.abstractmethod
    def decode(self, packet: Packet, memory: Memory) -> Packet:
        """The packet that was given to `encode`, up to what the filter drops."""

    def forget(self, channel: str) -> bool:
        """Forgets the receiver's assumed state; True if the filter relies on one."""
        del channel
        return False


class Link:
    """One direction between workers and servers: its filters and its bytes.

    Attributes:
      filters: in the order in which a sender applies them.
      sent: bytes that were sent.
    """

    def __init__(self, filters: Sequence[Filter]):
        self.filters = tuple(filters)
        self.sent = 0

    def encode(self, packet: Packet) -> Packet:
        """Applies the filters, and counts the bytes."""
        for part in self.filters:
            before = packet.num_bytes
            packet = part.encode(packet)
            part.saved += before - packet.num_bytes
        self.sent += packet.num_bytes
        return packet

    def decode(self, packet: Packet, memory: Memory) -> Packet:
        """Undoes the filters, with what the receiver remembers."""
        for part in reversed(self.filters):
            packet = part.decode(packet, memory)
        return packet

    def forget(self, channel: str) -> bool:
        """Forgets the receiver's assumed state; True if any filter relies on one."""
        return any([part.forget(channel) for part in self.filters])
