"""Passes over the digits that batch sizes need for a loss, with rates from a grid."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import optax

from experiments.gallery import digits
from meshpar.methods.random_search.trials import Trials

ROWS, HELD_OUT = 1024, 256
"""Digits of a pass, and those on which the loss is measured."""


class Tuned(NamedTuple):
    """The least passes of a batch size.

    Attributes:
      passes: over the data until the held-out loss is at the target.
      rate: of SGD that takes so many.
      inside: whether it is neither the smallest nor the largest that was tried.
    """

    passes: float
    rate: float
    inside: bool


def batches(batch: int, steps: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of shuffled passes over the first `ROWS` training digits."""
    training, draws = digits.load()[0], np.random.default_rng([seed, batch])
    order = np.concatenate(
        [draws.permutation(ROWS) for _ in range(-(-steps * batch // ROWS))]
    )
    for step in range(steps):
        chosen = order[step * batch : (step + 1) * batch]
        yield {"x": training.x[chosen], "y": training.y[chosen]}


def curves(
    batch: int, rates: np.ndarray, passes: float, every: int, seed: int
) -> np.ndarray:
    """Held-out losses [evaluations, rates], one every so many steps."""
    steps = int(passes * ROWS / batch)
    example = next(batches(batch, 1, 0))
    trials = Trials(
        digits.model(),
        lambda v: optax.sgd(v["rate"]),
        {"rate": rates},
        example,
        jax.devices()[:1],
    )
    held_out = {name: x[:HELD_OUT] for name, x in digits.load()[1]._asdict().items()}
    state, found = trials.init(seed), []
    for step, rows in enumerate(batches(batch, steps, seed), 1):
        state, _ = trials.step(state, rows)
        if step % every == 0:
            found.append(np.asarray(trials.evaluate(state, held_out)))
    return np.array(found)


def tuned(
    batch: int, rates: np.ndarray, target: float, passes: float, seeds: tuple[int, ...]
) -> Tuned:
    """The least passes of a batch size over a grid of rates, as a mean over seeds."""
    every = max(1, ROWS // batch // 4)
    needed = []
    for seed in seeds:
        below = curves(batch, rates, passes, every, seed) <= target
        first = np.where(below.any(0), below.argmax(0) + 1, np.inf)
        needed.append(first * every * batch / ROWS)
    mean = np.mean(needed, axis=0)
    best = int(mean.argmin())
    return Tuned(float(mean[best]), float(rates[best]), 0 < best < len(rates) - 1)
