"""Seeded schedules of the store's simulator, and the laws that each must keep."""

import random

import numpy as np

from meshpar.errors import MeshparError
from meshpar.islands import ASP, SSP, BoundedDelay, KeyRange, Payload, updates
from meshpar.islands.rules import Rules
from meshpar.islands.simulated_worker import SimulatedWorker
from meshpar.islands.simulator import Network, Simulator

STEPS = 3
NAMES = ("a", "b", "c", "late")
RANGES = [KeyRange(name, len(NAMES) * STEPS) for name in ("u", "v")]
BAD_NETWORK = Network((0.001, 0.3), loss=0.03, duplicates=0.1, retry=0.7, detection=0.5)


def one_slot_each(worker, clock, read):
    """Every push adds 1 to a number of its own, so that reads show what they hold."""
    slot = np.array([NAMES.index(worker) * STEPS + clock])
    return {name: Payload((slot, np.ones(1, np.float32))) for name in read}


def counted(values, state, pushed):
    """Adds 1 for each push in the average of a round: they all have the same share."""
    values[pushed.keys] += np.round(pushed.values / pushed.values.min())


class Schedule:
    """A run under faults drawn from a seed.

    Args:
      seed: of the network, the speeds and the faults.
      consistency: the store's.
      faults: kinds that may happen: "server", "worker", "join", "late".
      at: event at which the server dies; drawn if None.
    """

    def __init__(self, seed, consistency, faults=(), at=None, **settings):
        draws = random.Random(f"schedule {seed}")
        settings = dict(update=updates.add) | settings
        servers = ["s0", "s1", "s2"]
        self.simulator = Simulator(
            settings.pop("ranges", RANGES),
            Rules(consistency, **settings),
            servers=servers,
            replicas=2,
            network=BAD_NETWORK,
            seed=seed,
        )
        self.consistency, self.killed = consistency, set()
        self.draws, self.workers = draws, {}
        self._at = {}
        for kind in faults:
            self._at[kind] = draws.randrange(5, 250)
        if at is not None:
            self._at["server"] = at
        self._victim = draws.choice(servers)

    def start(self, task=one_slot_each, names=("a", "b", "c"), **settings):
        self.simulator.start(names)
        for name in names:
            self.add(name, task, joined=True, **settings)
        return self

    def add(self, name, task=one_slot_each, steps=STEPS, **settings):
        speed = self.draws.choice((0.02, 0.2, 3.0))
        self.workers[name] = SimulatedWorker(
            self.simulator,
            name,
            steps,
            task,
            lambda *_: speed * self.draws.random(),
            retry=BAD_NETWORK.retry,
            **settings,
        )

    def run(self, done=None):
        start = self.simulator.events

        def over():
            for kind, at in list(self._at.items()):
                if self.simulator.events - start >= at:
                    del self._at[kind]
                    self._happen(kind)
            if done:
                return done()
            ended = all(w.done or w.dead for w in self.workers.values())
            return ended and self.simulator.settled and self.replicated

        try:
            self.simulator.run(over, most_events=20_000)
        except MeshparError as error:
            raise AssertionError(f"it hangs: {error}") from error
        return self

    @property
    def replicated(self):
        """Whether every range has its two replicas."""
        simulator = self.simulator
        return all(len(simulator.states(r.name)) == 2 for r in simulator.ranges)

    def _happen(self, kind):
        if kind == "server":
            self.simulator.kill_server(self._victim)
        elif kind == "join":
            self.simulator.add_server("s3")
        elif kind == "late":
            self.add("late")
        elif kind == "worker" and not self.workers["c"].done:
            self.killed.add("c")
            self.workers["c"].kill()

    # Laws.

    def run_and_check(self):
        """Runs, and asserts the laws; a hang is blamed on the law that it broke."""
        try:
            self.run()
        except AssertionError:
            self.check_replicas()
            raise
        self.check_reads()
        self.check_end()

    def check_reads(self):
        for name, worker in self.workers.items():
            for clock, read in worker.reads:
                for values in read.values():
                    held = values.values.reshape(len(NAMES), STEPS)
                    assert set(held.flat) <= {0.0, 1.0}, "applied twice"
                    first = 0 if name != "late" else worker.reads[0][0]
                    own = held[NAMES.index(name)]
                    assert own[first:clock].all(), "own writes are missing"
                    assert not own[clock:].any()
                    self._check_bound(clock, held)

    def _check_bound(self, clock, held):
        """The pushes of surely present members that a read at a clock holds."""
        alive = [n for n in ("a", "b", "c") if n not in self.killed]
        missing = {n: clock - held[NAMES.index(n)][:clock].sum() for n in alive}
        if isinstance(self.consistency, SSP):
            for name in alive:
                must = held[NAMES.index(name)]
                must = must[: max(0, clock - self.consistency.staleness)]
                assert must.all(), f"gap {missing} at clock {clock}"
        elif isinstance(self.consistency, BoundedDelay):
            assert sum(missing.values()) <= self.consistency.tau
        else:
            assert isinstance(self.consistency, ASP)

    def check_end(self):
        """All workers are done, and all replicas are there, right and equal."""
        for name, worker in self.workers.items():
            if name not in self.killed:
                assert worker.done and worker.clock == STEPS
        self.check_replicas()
        for key_range in RANGES:
            first, second = self.simulator.states(key_range.name)
            np.testing.assert_array_equal(first.values, second.values)

    def check_replicas(self):
        """At any time no replica has lost or doubled an acknowledged update."""
        for key_range in RANGES:
            for state in self.simulator.states(key_range.name):
                held = state.values.reshape(len(NAMES), STEPS)
                assert set(held.flat) <= {0.0, 1.0}, "applied twice"
                for name, worker in self.workers.items():
                    for clock in worker.acked:
                        assert held[NAMES.index(name), clock], "an update is lost"
