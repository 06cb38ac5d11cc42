"""Wire formats of pushes: bfloat16, 8 or 4 bits, top-k, with error feedback.

The formats are those of `meshpar.collectives.compression`, for one range at a time.
"""

import functools
from collections.abc import Mapping

import jax
import numpy as np

from meshpar.collectives.compression import Compression, make_compression
from meshpar.islands.messages import PLAIN, Payload
from meshpar.islands.rules import Decoder


class PushEncoder:
    """Encodes the pushes of a worker, and remembers the errors of encoding.

    Args:
      text: "f32", "bf16", "int8", "int4" or "topk:FRACTION".
      error_feedback: whether the error of a push is added to the next one.

    Attributes:
      errors: {range: error of its last push}.
    """

    def __init__(self, text: str, error_feedback: bool = True):
        self._text, self._feedback = text, error_feedback
        self._format = make_compression(text)
        self.errors: dict[str, np.ndarray] = {}

    def encode(
        self,
        name: str,
        values: np.ndarray,
        clock: int,
        weights: np.ndarray,
        **payload: object,
    ) -> Payload:
        """The payload of a range's part [n] of a push, as `FilteredPushes.encode`."""
        del clock, weights
        if not self._format.lossy:
            return Payload((None, values), PLAIN, **payload)
        if self._feedback:
            values = values + self.errors.get(name, np.float32(0))
        encoded = np.asarray(_encoder(self._text)(_padded(values, self._format)))
        if self._feedback:
            self.errors[name] = values - _decode(self._text, encoded, len(values))
        return Payload(encoded, self._text, **payload)

    def snapshot(self) -> dict[str, np.ndarray]:
        """The errors, as a flat dict."""
        return {f"error|{name}": error for name, error in self.errors.items()}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes what it finds of a snapshot."""
        own = {k.partition("|")[::2]: np.asarray(v) for k, v in snapshot.items()}
        self.errors = {name: v for (kind, name), v in own.items() if kind == "error"}


def decoders(text: str) -> Mapping[str, Decoder]:
    """{encoding: decoder} of a wire format, for the store."""
    if not make_compression(text).lossy:
        return {}
    return {text: lambda data, size, _: (None, _decode(text, data, size))}


def _padded(values: np.ndarray, compression: Compression) -> np.ndarray:
    return np.pad(values, (0, -len(values) % compression.block))


@functools.cache
def _encoder(text: str):
    return jax.jit(make_compression(text).encode)


@functools.cache
def _decoder(text: str):
    return jax.jit(make_compression(text).decode, static_argnums=1)


def _decode(text: str, encoded: np.ndarray, size: int) -> np.ndarray:
    length = size + -size % make_compression(text).block
    return np.array(_decoder(text)(encoded, length))[:size]
