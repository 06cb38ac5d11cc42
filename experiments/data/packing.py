"""Packing: whole documents share samples, and none sees another one.

Windows of a stream cut documents anywhere. Packed samples cut none that fits, and say
which document each token belongs to.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.data.files import Tokens


class Piece(NamedTuple):
    """A part of a document: tokens [start, start + size] with their next tokens.

    Attributes:
      start: place of its first token in the stream.
      size: number of tokens that have a next token.
    """

    start: int
    size: int


def pieces_of(starts: np.ndarray, num_tokens: int, length: int) -> list[Piece]:
    """Cuts documents into pieces of at most `length` tokens.

    Args:
      starts: places of the documents' first tokens, ascending.
      num_tokens: of the stream.
      length: of a sample.
    """
    ends = np.append(starts[1:], num_tokens)
    return [
        Piece(place, min(length, end - 1 - place))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for place in range(start, end - 1, length)
    ]


def pack(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Fills samples with pieces: each, largest first, where it leaves the least room.

    Source: Ding et al., Fewer Truncations Improve Language Modeling, arXiv:2404.10830,
      section 3.2 (best-fit decreasing).

    Args:
      pieces: of at most `length` tokens.
      length: of a sample.
    """
    samples: list[list[Piece]] = []
    open_samples: dict[int, list[int]] = {}
    rooms: list[int] = []  # Those of the open samples, ascending.
    for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.start)):
        fits = bisect.bisect_left(rooms, piece.size)
        if fits == len(rooms):
            number, room = len(samples), length
            samples.append([])
        else:
            room = rooms[fits]
            number = open_samples[room].pop()
            if not open_samples[room]:
                del open_samples[room], rooms[fits]
        samples[number].append(piece)
        if room := room - piece.size:
            if room not in open_samples:
                bisect.insort(rooms, room)
            open_samples.setdefault(room, []).append(number)
    return samples


class PackedSamples:
    """Samples of whole documents, each of which counts its positions from 0.

    A sample is {"tokens", "targets", "segments", "positions"}, int32 [length], and
    "weights", float32 [length]: 0 for padding, which is a document of its own.
    """

    def __init__(self, tokens: Tokens, starts: np.ndarray, length: int):
        self._tokens, self._length = tokens, length
        self._samples = pack(pieces_of(starts, len(tokens), length), length)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        names = "tokens", "targets", "segments", "positions"
        sample = {name: np.zeros(self._length, np.int32) for name in names}
        weights, end = np.zeros(self._length, np.float32), 0
        for number, (start, size) in enumerate(self._samples[i]):
            own = slice(end, end + size)
            tokens = np.asarray(self._tokens[start : start + size + 1], np.int32)
            sample["tokens"][own], sample["targets"][own] = tokens[:-1], tokens[1:]
            sample["segments"][own] = number
            sample["positions"][own] = np.arange(size)
            weights[own], end = 1, end + size
        sample["segments"][end:] = len(self._samples[i])
        return {**sample, "weights": weights}
