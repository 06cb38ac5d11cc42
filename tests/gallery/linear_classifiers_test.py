"""Penalties of linear classifiers are chosen on pictures that they have not seen."""

import numpy as np

from experiments.gallery.digits import Digits
from experiments.gallery.linear_classifiers import RIDGE, accuracy


def noisy(rows, copies, seed):
    """One feature of 60 says something of the class; rows are repeated."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(rows, 60))
    x[:, 0] *= 3
    y = (x[:, 0] + 2 * draws.normal(size=rows) > 0).astype(np.int32)
    return Digits(np.tile(x, (copies, 1)), np.tile(y, copies))


def test_copies_of_a_picture_do_not_choose_the_penalty():
    pictures, copies = 61, 5
    training, held_out = noisy(pictures, copies, 0), noisy(2000, 1, 1)
    together = np.tile(np.arange(pictures), copies)
    apart = np.arange(pictures * copies)
    found = accuracy(RIDGE, training, together, held_out)
    assert found > accuracy(RIDGE, training, apart, held_out) + 0.1
