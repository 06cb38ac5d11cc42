"""Mistakes in methods of replicas, islands and stores that train apart."""

import dataclasses

import numpy as np
from support.planted_papers import Mistake, planted

from experiments.gallery import sandblaster as sandblaster_figure
from experiments.gallery import staleness as staleness_figure
from meshpar.islands import algorithms, consistency, updates
from meshpar.local_sgd import gossip
from meshpar.methods.dbpg import filters, proximal
from meshpar.methods.hogwild import shared_arrays
from meshpar.methods.hogwild import training as hogwild
from meshpar.methods.sandblaster import lbfgs, portions

# Gossip.


def _half_mixed(right):
    return lambda replicas: [(m + np.eye(replicas)) / 2 for m in right(replicas)]


GOSSIP = [
    Mistake(
        "gossip",
        "a replica of the ring keeps two thirds of itself",
        lambda patch: patch.setitem(
            gossip._GRAPHS, "ring", _half_mixed(gossip._GRAPHS["ring"])
        ),
        "a round on the ring shrinks",
    ),
    Mistake(
        "gossip",
        "the last neighbour of the ring is left out on the devices",
        planted(
            gossip,
            "neighbour_distances",
            lambda right: lambda matrix: right(matrix)[:1],
        ),
        "so does a compiled ring",
    ),
    Mistake(
        "gossip",
        "the exponential graph repeats distance 1",
        lambda patch: patch.setitem(
            gossip._GRAPHS,
            "exponential",
            lambda n: [gossip._exponential(n)[0]] * (n.bit_length() - 1),
        ),
        "the exponential graph averages exactly",
    ),
]

# Stale synchronous, elastic and Downpour.


def _waiting_claims():
    runs = staleness_figure._waiting(dataclasses.replace(_SETTING), 20.0)
    shares = {s: found[0].waiting for s, found in runs.items()}
    gaps = {s: staleness_figure.clock_gap(found[0]) for s, found in runs.items()}
    return staleness_figure.waiting_claims(shares, gaps)


_SETTING = sandblaster_figure.Setting(True, (0,), lambda text, share: None)


def _one_clock_loose(right):
    def allows(self, clock, clocks):
        return right(self, clock - 1, clocks)

    return allows


def _forgets_the_move(right):
    """An island does not move toward the center by what it pushes."""

    def contribution(self, center_N):
        pushed = right(self, center_N)
        self.elastic_N = np.zeros_like(self.elastic_N)
        return pushed

    return contribution


def _adagrad_by_magnitudes(right):
    def adagrad(rate, initial=0.1, eps=1e-7):
        def update(values, state, pushed):
            squares = state.setdefault("squares", np.full_like(values, initial))
            squares += np.abs(pushed.values)
            values -= np.float32(rate) * pushed.values / np.sqrt(squares)

        return update

    return adagrad


STALENESS = [
    Mistake(
        "staleness",
        "SSP lets a worker go one clock further",
        planted(consistency.SSP, "allows", _one_clock_loose),
        "the largest gap between two workers' clocks",
        _waiting_claims,
    ),
    Mistake(
        "staleness",
        "SSP(s) waits as BSP does",
        planted(
            consistency.SSP,
            "allows",
            lambda right: lambda self, clock, clocks: clock <= min(clocks),
        ),
        "waiting falls with every step",
        _waiting_claims,
    ),
    Mistake(
        "staleness",
        "an elastic island pushes, but does not move toward the center",
        planted(algorithms.WeightIsland, "contribution", _forgets_the_move),
        "one elastic island equals",
        staleness_figure.recurrence_claims,
    ),
    Mistake(
        "staleness",
        "Adagrad adds magnitudes, not squares",
        planted(updates, "adagrad", _adagrad_by_magnitudes),
        "Downpour with one worker equals Adagrad",
        staleness_figure.recurrence_claims,
    ),
]

# Sandblaster.


def _no_backup(right):
    return lambda work, speeds, backup: right(work, speeds, False)


def _waits_for_all_copies(right):
    """A batch ends with the last copy of a portion, not with the first."""

    def schedule(work, speeds, backup):
        found = right(work, speeds, backup)
        alone = right(work, speeds, False)
        return dataclasses.replace(found, seconds=alone.seconds)

    return schedule


def _direction_of_gradient(right):
    """Pairs of differences are never kept: steepest descent."""

    def init(self, ranges, evaluate, memory):
        right(self, ranges, evaluate, 1)

    return init


SANDBLASTER = [
    Mistake(
        "sandblaster",
        "no backup copy is ever started",
        planted(portions, "schedule", _no_backup),
        "with backups a batch ends",
        lambda: _sandblaster_costs(),
    ),
    Mistake(
        "sandblaster",
        "a batch waits for every copy of a portion",
        planted(portions, "schedule", _waits_for_all_copies),
        "with backups a batch ends",
        lambda: _sandblaster_costs(),
    ),
    Mistake(
        "sandblaster",
        "L-BFGS keeps one pair of differences",
        planted(lbfgs.Coordinator, "__init__", _direction_of_gradient),
        "equals SciPy's L-BFGS",
    ),
]


def _sandblaster_costs():
    costs = {
        backup: {
            n: sandblaster_figure.cost(n, backup) for n in sandblaster_figure._PORTIONS
        }
        for backup in (False, True)
    }
    return sandblaster_figure.claims_of([1.0], [1.0], costs)


# The parameter server.


def _anywhere(right):
    """A weight is far if its gradient is small, whether it is at zero or not."""
    return lambda weights, gradients, l1, threshold: abs(gradients) < l1 - threshold


FILTERS = [
    Mistake(
        "parameter_server",
        "the KKT filter leaves out weights that are not at zero",
        planted(proximal, "is_far", _anywhere),
        "the objective with all filters",
    ),
    Mistake(
        "parameter_server",
        "zlib packs bfloat16",
        lambda patch: patch.setitem(
            filters.COMPRESSIONS, "zlib", filters.COMPRESSIONS["bf16"]
        ),
        "key caching and compression change no bit",
    ),
    Mistake(
        "parameter_server",
        "known lists of keys are sent again",
        planted(
            filters.KeyCaching, "encode", lambda right: lambda self, packet: packet
        ),
        "every filter sends less",
    ),
]

# Hogwild.


def _in_turns(right):
    """Processes wait for each other, so that none overwrites another."""

    def run(segments, settings):
        with shared_arrays.attach(segments) as shared:
            for rank in range(settings.processes):
                hogwild._train_rows(shared, settings, rank)

    return run


def _steps_times_processes(right):
    def run(segments, settings):
        rate = settings.learning_rate * settings.processes
        right(segments, dataclasses.replace(settings, learning_rate=rate))

    return run


HOGWILD = [
    Mistake(
        "hogwild",
        "processes take turns, each with its own rows",
        planted(hogwild, "_run_workers", _in_turns),
        "sparse rows: the objective",
    ),
    Mistake(
        "hogwild",
        "steps grow with the number of processes",
        planted(hogwild, "_run_workers", _steps_times_processes),
        "sparse rows: the objective",
    ),
]

MISTAKES = [*GOSSIP, *STALENESS, *SANDBLASTER, *FILTERS, *HOGWILD]
