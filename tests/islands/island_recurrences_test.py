"""Islands against the papers' recurrences in numpy, whatever way an island begins.

The order in which islands communicate and train is fixed, so that nothing depends on
timing.
"""

import jax
import numpy as np
import pytest
from support import island_reference
from support.island_reference import (
    CASES,
    Case,
    Reference,
    batch,
    given,
    lowered,
    started,
)

from meshpar.islands.algorithms import make_island
from meshpar.islands.island_program import island_program
from meshpar.islands.threads import make_store
from meshpar.islands.worker import Worker

QUORUM = dict(workers=2, quorum=2)
TURNS = 48


def leaves_of(state):
    return list(map(np.asarray, jax.tree.leaves(jax.device_get(state))))


class Endpoint:
    """A way to a store that answers at once."""

    def __init__(self, islands, name):
        self.islands, self.name = islands, name

    def pull(self, names, clock, known):
        store = self.islands.store
        return [store.pull(n, self.name, clock, known=known.get(n, -1)) for n in names]

    def push(self, clock, payloads):
        for name, payload in payloads.items():
            self.islands.store.push(name, self.name, clock, payload)


class FixedOrder:
    """Islands around a store, one turn after the other; as `Reference`."""

    def __init__(self, case, state):
        program = lowered(case.momentum)
        self.mode, self.start = case.mode, leaves_of(state)
        self.program = island_program(program, self.mode)
        vector = self.program.vector
        self.slices = vector.slices(self.mode.ranges)
        self.store = make_store(self.mode, vector)
        center_N = vector.pack(state.params)
        for part in self.slices:
            self.store.set_values(part.range.name, center_N[part.start : part.stop])
        self.workers, self.turns = {}, {}

    def _worker(self, name, clock):
        island = make_island(self.program, self.mode, self.start)
        endpoint = Endpoint(self, name)
        return Worker(name, island, self.mode, self.slices, endpoint, clock)

    def join(self, name):
        self.workers[name] = self._worker(name, self.store.join(name))
        self.turns[name] = 0

    def leave(self, name):
        del self.workers[name]
        self.store.leave(name)

    def turn(self, name, part):
        worker = self.workers[name]
        worker.train(part) if self.turns[name] % 2 else worker.prepare()
        self.turns[name] += 1

    def resume(self):
        snapshot = self.store.snapshot()
        workers = {name: worker.snapshot() for name, worker in self.workers.items()}
        self.store = make_store(self.mode, self.program.vector)
        self.store.restore(snapshot)
        for name, own in workers.items():
            self.workers[name] = self._worker(name, 0)
            self.workers[name].restore(own)

    def weights(self):
        parts = [self.store.pull(part.range.name).values for part in self.slices]
        return np.concatenate(parts).reshape(4, 4)


BIRTHS = {
    "given weights": lambda islands: None,
    "resumed": lambda islands: islands.resume(),
    "synchronous": lambda islands: None,
    "joins": lambda islands: islands.join("c"),
    "replaced": lambda islands: (islands.leave("b"), islands.join("c")),
}
"""{how islands begin: what happens in the middle}."""


def run(islands, birth):
    """The store's weights after every turn of two islands, in an order by draws."""
    draws, found = np.random.default_rng(5), []
    islands.join("a")
    islands.join("b")
    for turn in range(TURNS):
        if turn == TURNS // 2:
            BIRTHS[birth](islands)
        names = sorted(islands.workers)
        islands.turn(names[draws.integers(len(names))], batch(turn))
        found.append(islands.weights())
    return found


FIXED = CASES | {
    "downpour, quorum": Case(QUORUM | dict(push=3, fetch=2)),
    "diloco, quorum": Case(CASES["diloco 3"].settings | QUORUM),
}


@pytest.mark.parametrize("birth", BIRTHS)
@pytest.mark.parametrize("name", FIXED)
def test_islands_in_a_fixed_order_equal_the_recurrence(name, birth):
    case, steps = FIXED[name], 3 * (birth == "synchronous")
    if steps:
        state = island_reference.synchronous_state(case.momentum, steps)
    else:
        state = lowered(case.momentum).init(0, given())
    got = run(FixedOrder(case, state), birth)
    want = run(Reference(case.mode, started(case.momentum, steps)), birth)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    assert np.abs(want[-1] - want[0]).max() > 0.05


@pytest.mark.parametrize("steps", [0, 3], ids=["given weights", "synchronous"])
@pytest.mark.parametrize("name", CASES)
def test_an_island_in_a_thread_equals_the_recurrence(name, steps):
    def replace(host):
        host.leave(0)
        host.join(0)

    island_reference.check_host(CASES[name], "threads", replace, steps)
