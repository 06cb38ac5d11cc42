"""Filters: data that workers and servers leave out of their packets.

Source: Li et al., Communication Efficient Distributed Machine Learning with the
  Parameter Server, NeurIPS 2014, section 3.3; Li et al., OSDI 2014, section 3.7.
"""

import dataclasses
import hashlib
import zlib

import ml_dtypes
import numpy as np

from meshpar.errors import MeshparError, nearest
from meshpar.islands.rules import RefusedError
from meshpar.methods.dbpg.packet import Filter, Memory, Packet

RECENT_KEY_LISTS = 2
"""Key lists that a receiver remembers per channel."""


class UnknownKeysError(RefusedError):
    """The receiver does not remember this key list: send the keys themselves."""


class RandomSkip(Filter):
    """Leaves out keys at random: the same ones for all workers in a task.

    They are not updated in this task. The choice is a hash of key and task, so it costs
    no bytes and both sides make it.
    """

    name = "random skip"

    def __init__(self, probability: float, seed: int = 0):
        super().__init__()
        self._seed = seed
        if not 0 <= probability < 1:
            raise MeshparError(
                f"probability={probability} of a skip: use a number from 0 to below 1"
            )
        self._limit = int(probability * 2**32)

    def _kept(self, packet: Packet) -> np.ndarray:
        # Multiplications by odd constants spread the bits (Knuth, TAOCP 6.4).
        mixed = packet.keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64((packet.task * 0xD1B54A32D192ED03 + self._seed) % 2**64)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        return (mixed >> np.uint64(32)) >= np.uint64(self._limit)

    def encode(self, packet: Packet) -> Packet:
        """Drops the values of keys that are skipped."""
        kept = self._kept(packet)
        return dataclasses.replace(packet, values=packet.values[:, kept])

    def decode(self, packet: Packet, memory: Memory) -> Packet:
        """Drops the keys as well."""
        del memory
        return dataclasses.replace(packet, keys=packet.keys[self._kept(packet)])


class SignificantlyModified(Filter):
    """Sends numbers only if they changed by more than a threshold since last sent.

    The receiver goes on with the last ones. NaN counts as a value of its own.
    """

    name = "significantly modified"

    def __init__(self, size: int, threshold: float = 0.0):
        """Takes the number of keys of the largest range, and the threshold."""
        super().__init__()
        if not threshold >= 0:
            raise MeshparError(f"threshold={threshold}: use a number, at least 0")
        self._size, self._threshold = size, threshold
        self._sent: Memory = {}

    def _last(self, memory: Memory, packet: Packet) -> np.ndarray:
        """Last values of a channel, [columns, size]; zeros at first."""
        name = f"last|{packet.channel}"
        if name not in memory:
            memory[name] = np.zeros((packet.columns, self._size), np.float32)
        return memory[name]

    def encode(self, packet: Packet) -> Packet:
        """Drops the values that the receiver has; adds a bit for every key."""
        memory, values = self._last(self._sent, packet), packet.values
        last = memory[:, packet.keys]
        same = np.abs(values - last) <= self._threshold
        same |= np.isnan(values) & np.isnan(last)
        changed = ~same.all(axis=0)
        memory[:, packet.keys[changed]] = values[:, changed]
        bits = np.packbits(changed)
        return dataclasses.replace(packet, values=values[:, changed], changed=bits)

    def decode(self, packet: Packet, memory: Memory) -> Packet:
        """Fills in the last values."""
        last = self._last(memory, packet)
        changed = np.unpackbits(packet.changed, count=len(packet.keys)).astype(bool)
        last[:, packet.keys[changed]] = packet.values
        values = last[:, packet.keys]
        return dataclasses.replace(packet, values=values, changed=None)


class KeyCaching(Filter):
    """Sends a hash of the keys in place of a list that the receiver remembers."""

    name = "key caching"

    def __init__(self):
        super().__init__()
        self._known: Memory = {}

    @staticmethod
    def _name(channel: str, keys: np.ndarray) -> tuple[str, bytes]:
        digest = hashlib.blake2b(keys.tobytes(), digest_size=8).digest()
        return f"keys|{channel}|{digest.hex()}", digest

    @staticmethod
    def _remember(memory: Memory, channel: str, name: str, keys: np.ndarray) -> None:
        """Makes a list the newest one of its channel, and forgets the oldest."""
        memory.pop(name, None)
        memory[name] = keys
        names = [known for known in memory if known.startswith(f"keys|{channel}|")]
        for old in names[:-RECENT_KEY_LISTS]:
            del memory[old]

    def encode(self, packet: Packet) -> Packet:
        """Replaces the keys if this channel has sent them lately."""
        name, digest = self._name(packet.channel, packet.keys)
        seen = name in self._known
        self._remember(self._known, packet.channel, name, packet.keys)
        if not seen:
            return packet
        return dataclasses.replace(packet, keys=None, digest=digest)

    def decode(self, packet: Packet, memory: Memory) -> Packet:
        """Puts the keys back.

        Raises:
          UnknownKeysError: the receiver does not remember them.
        """
        if packet.keys is not None:
            name, keys = self._name(packet.channel, packet.keys)[0], packet.keys
        else:
            name = f"keys|{packet.channel}|{packet.digest.hex()}"
            keys = memory.get(name)
            if keys is None:
                raise UnknownKeysError(f"{packet.channel}: unknown list of keys")
        self._remember(memory, packet.channel, name, keys)
        return dataclasses.replace(packet, keys=keys, digest=b"")

    def forget(self, channel: str) -> bool:
        """Sends the keys themselves the next time."""
        for name in [n for n in self._known if n.startswith(f"keys|{channel}|")]:
            del self._known[name]
        return True


def _zlib_pack(values: np.ndarray) -> bytes:
    # Equal bytes of neighbours stand together, so exponents compress.
    return zlib.compress(values.view(np.uint8).reshape(-1, 4).T.tobytes(), 1)


def _zlib_unpack(packed: bytes) -> np.ndarray:
    flat = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(4, -1)
    return np.ascontiguousarray(flat.T).view(np.float32).reshape(-1)


COMPRESSIONS = {
    "zlib": (_zlib_pack, _zlib_unpack),
    "bf16": (
        lambda values: values.astype(ml_dtypes.bfloat16).tobytes(),
        lambda packed: np.frombuffer(packed, ml_dtypes.bfloat16).astype(np.float32),
    ),
}
"""{name: (pack, unpack)} of float32 values; zlib loses nothing."""


class ValueCompression(Filter):
    """Packs the values: "zlib" without loss, or "bf16" in two bytes each."""

    name = "compression"

    def __init__(self, kind: str):
        super().__init__()
        if kind not in COMPRESSIONS:
            raise MeshparError(f"compression={kind!r}; {nearest(kind, COMPRESSIONS)}")
        self._pack, self._unpack = COMPRESSIONS[kind]

    def encode(self, packet: Packet) -> Packet:
        """Replaces the values by fewer bytes."""
        values = np.ascontiguousarray(packet.values)
        return dataclasses.replace(packet, values=None, packed=self._pack(values))

    def decode(self, packet: Packet, memory: Memory) -> Packet:
        """Unpacks them."""
        del memory
        values = self._unpack(packet.packed).reshape(packet.columns, -1)
        return dataclasses.replace(packet, values=values, packed=b"")
