"""Islands that send parts of their gradients, and plain loops that do the same."""

import dataclasses

import jax
import numpy as np
from support.island_reference import BASE, batch, given, gradient, lower

from meshpar.islands import BSP, PushFilter
from meshpar.islands.managed import KEY_BYTES

SIZE, SENT = 16, 5
STARTS = (0, 5, 10)
"""The three ranges of the weights begin here."""

SGD = dataclasses.replace(BASE, momentum=0.0)
"""One island; the store makes steps of SGD."""

OWNERS = dataclasses.replace(
    SGD, workers=2, consistency=BSP(), own_data=True, budget=SENT * KEY_BYTES
)
"""Two islands in rounds that own their rows, and send their largest numbers."""


@dataclasses.dataclass(frozen=True)
class Without(PushFilter):
    """Leaves out some keys of every range, in some pushes."""

    keys: tuple[int, ...] = (0, 3)
    every: int = 1

    def encode(self, data, turn):
        keys, values = data
        assert keys is None and len(turn.weights) == len(values)
        keys = np.arange(len(values))
        if turn.clock % self.every == 0:
            keys = np.delete(keys, self.keys)
        return keys, values[keys]


def without(every=1):
    """The keys that `Without` sends, as a function of the loop below."""
    dropped = [start + key for start in STARTS for key in Without.keys]

    def choose(unsent, step):
        return np.setdiff1d(range(SIZE), dropped if step % every == 0 else [])

    return choose


def everything(unsent, step):
    """All keys."""
    return np.arange(SIZE)


def largest(unsent, step):
    """The keys of the largest sums."""
    return np.argsort(-abs(unsent))[:SENT]


def loop(steps, choose, workers=1, keeps=True):
    """Weights after each step of SGD on means of what workers send, in float64.

    Args:
      steps: number of them.
      choose: (sums of a worker [16], step) -> keys that it sends.
      workers: each has its part of a batch.
      keeps: whether numbers that are not sent wait.
    """
    w, found = given()["own"].astype(float), []
    unsent = np.zeros((workers, SIZE))
    for step in range(steps):
        change, total = np.zeros(SIZE), 0.0
        for own, rows in zip(unsent, np.split(np.arange(8), workers), strict=True):
            part = {name: x[rows] for name, x in batch(step).items()}
            g, weight = gradient(w, part)
            own += g.ravel()
            keys = choose(own, step)
            change[keys] += weight * own[keys]
            total += weight
            own[keys if keeps else slice(None)] = 0
        w = w - SGD.learning_rate * (change / total).reshape(4, 4)
        found.append(w)
    return found


def check(program, wanted, resumes_at=None):
    """Compares the store with the loop after every step; returns the program."""
    state = program.init(0, given())
    for step, w in enumerate(wanted):
        if step == resumes_at:
            portable, extra = program.in_model_order(state), program.extra_state(state)
            program.close()
            program = fresh(program)
            state = program.as_stored(portable, extra)
        state, _ = program.step(state, batch(step))
        program.host.drain()
        found = program.host.center().reshape(4, 4)
        np.testing.assert_allclose(found, w, rtol=0, atol=1e-6)
    return program


def fresh(program, mode=None):
    """The program before its first step, perhaps of another mode with its shapes."""
    running = type(program._running)()
    mode = mode or program.mode
    return dataclasses.replace(program, mode=mode, _running=running)


def lowered(mode):
    """The program of a mode, on devices of its own for each island."""
    devices = jax.devices()[: mode.workers if mode.host == "threads" else 1]
    return lower(0.0, mode, devices)
