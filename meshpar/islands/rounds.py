"""The average of a round: what several workers pushed, as one contribution."""

import numpy as np

from meshpar.islands.key_range import Contribution
from meshpar.islands.rules import RefusedError


def average(contributions: list[Contribution], number: int) -> Contribution:
    """The mean by weight of a round's contributions, in the order given."""
    weights = np.array([part.weight for part in contributions], np.float64)
    shares = weights / weights.sum()
    staleness = max(part.staleness for part in contributions)
    keys = None
    if all(part.keys is not None for part in contributions):
        keys = np.unique(np.concatenate([part.keys for part in contributions]))
    values = None
    for part, share in zip(contributions, shares, strict=True):
        scaled = part.values * part.values.dtype.type(share)
        if keys is None and part.keys is None:
            values = scaled if values is None else values + scaled
            continue
        if keys is None:
            raise RefusedError("a round mixes dense and sparse pushes: use one kind")
        if values is None:
            values = np.zeros(len(keys), part.values.dtype)
        values[np.searchsorted(keys, part.keys)] += scaled
    return Contribution("", number, values, keys, 1.0, staleness)
