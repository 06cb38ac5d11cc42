"""Gradient codes: exact for every set of s stragglers, and not for s + 1."""

import itertools

import numpy as np
import pytest

from meshpar.errors import MeshparError
from meshpar.methods.gradient_coding import codes

CODES = [
    *((codes.cyclic, n, s) for n, s in [(4, 0), (5, 1), (5, 4), (8, 2), (9, 3)]),
    *((codes.fractional_repetition, n, s) for n, s in [(4, 0), (6, 1), (9, 2)]),
]


@pytest.mark.parametrize("make, n, s", CODES)
def test_every_set_of_s_stragglers_gives_the_exact_sum(make, n, s):
    code = make(n, s)
    gradients = np.random.default_rng(0).normal(size=(n, 50))
    sent = [code.encode(i, gradients[code.parts(i)]) for i in range(n)]
    assert [len(code.parts(i)) for i in range(n)] == [s + 1] * n
    for missing in itertools.combinations(range(n), s):
        alive = [i for i in range(n) if i not in missing]
        found = code.decode(alive) @ np.array([sent[i] for i in alive])
        np.testing.assert_allclose(found, gradients.sum(axis=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make, n, s", CODES)
def test_one_more_straggler_is_an_error(make, n, s):
    code = make(n, s)
    for missing in itertools.combinations(range(n), s + 1):
        alive = [i for i in range(n) if i not in missing]
        whole_group = len({i // (s + 1) for i in missing}) == 1
        if make is codes.fractional_repetition and not whole_group:
            np.testing.assert_allclose(code.decode(alive) @ code.matrix[alive], 1)
            continue
        with pytest.raises(codes.StragglersError, match="wait for more of them"):
            code.decode(alive)


def test_codes_that_cannot_be():
    with pytest.raises(MeshparError, match="tolerates=4 of 4 workers: use"):
        codes.cyclic(4, 4)
    with pytest.raises(MeshparError, match="tolerates=-1 of 4 workers: use"):
        codes.fractional_repetition(4, -1)
    with pytest.raises(MeshparError, match="that 3 divides, or the cyclic code"):
        codes.fractional_repetition(8, 2)
