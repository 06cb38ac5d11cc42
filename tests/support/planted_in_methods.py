"""Mistakes in methods that compile little: schedules, stores, codes and searches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from support.planted_papers import Mistake, planted

from experiments.gallery import gradient_coding as coding_figure
from experiments.gallery import gradient_diversity as diversity_figure
from experiments.gallery import hyperparameter_search as search_figure
from experiments.gallery import layer_dropping as dropping_figure
from experiments.gallery import sandblaster as sandblaster_figure
from experiments.gallery import staleness as staleness_figure
from experiments.gallery import unsupervised as unsupervised_figure
from experiments.gallery import unsupervised_models
from meshpar.contracts import cost
from meshpar.islands import algorithms, consistency, updates
from meshpar.local_sgd import gossip
from meshpar.methods import (
    gradient_diversity,
    layer_dropping,
    speedup_laws,
    sufficient_factors,
)
from meshpar.methods.dbpg import filters, proximal
from meshpar.methods.gradient_coding import coded_sum, codes
from meshpar.methods.hogwild import shared_arrays
from meshpar.methods.hogwild import training as hogwild
from meshpar.methods.random_search import trials
from meshpar.methods.sandblaster import lbfgs, portions

# Laws of speedup.


def _pairs_once(right):
    """Every pair of devices counts once, not twice."""

    def speedup(self, n):
        return n / (1 + self.sigma * (n - 1) + self.kappa * n * (n - 1) / 2)

    return speedup


def _fit_of_times(right):
    """Fits speedups with the terms of times."""

    def fit(times, terms, value):
        return right(times, lambda n: tuple(n * x for x in terms(n)), value)

    return fit


LAWS = [
    Mistake(
        "scaling",
        "a pair of devices waits once for each other, not twice",
        planted(speedup_laws.Strong, "speedup", _pairs_once),
        "the laws are the sums",
    ),
    Mistake(
        "scaling",
        "the fits have every term times the number of devices",
        planted(speedup_laws, "_fit", _fit_of_times),
        "planted serial share sigma",
    ),
    Mistake(
        "scaling",
        "the best number of devices forgets the serial share and the root",
        lambda patch: patch.setattr(
            speedup_laws.Strong,
            "best_devices",
            property(lambda self: 1 / self.kappa if self.kappa else np.inf),
        ),
        "the fastest number of devices",
    ),
]

# Sufficient factors.


def _product_of_own_rows(right):
    """Multiplies the device's own rows, and sums nothing."""

    def dense(x_RI, w_IO, axis):
        @jax.custom_vjp
        def apply(x, w):
            return x @ w

        def back(saved, dy):
            x, w = saved
            own = x.T @ dy
            first = jax.lax.axis_index(axis) == 0
            return dy @ w.T, jax.lax.psum(jnp.where(first, own, 0 * own), axis)

        apply.defvjp(lambda x, w: (x @ w, (x, w)), back)
        return apply(x_RI, w_IO)

    return dense


FACTORS = [
    Mistake(
        "poseidon",
        "the picker counts the rows of half of the workers",
        planted(
            sufficient_factors,
            "pick",
            lambda right: lambda rows, m, n: right(max(1, rows // 2), m, n),
        ),
        "it flips where",
    ),
    Mistake(
        "poseidon",
        "only the first device's rows enter the product of the factors",
        planted(sufficient_factors, "dense", _product_of_own_rows),
        "the product of the factors",
    ),
    Mistake(
        "poseidon",
        "an all_reduce is counted as one payload",
        planted(
            cost,
            "wire_bytes",
            lambda right: (
                lambda kind, payload, n: (
                    right(kind, payload, n) / (1 + (kind == "all_reduce"))
                )
            ),
        ),
        "compiled programs of 8 devices",
    ),
]

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


# Layer dropping.


def _coins_of_the_last_layer(right):
    def runs(schedule, step, number, depth, seed=0):
        return right(schedule, step, depth - 1, depth, seed)

    return runs


LAYERS = [
    Mistake(
        "layer_dropping",
        "a layer's change is not divided by its keep probability",
        planted(layer_dropping, "_scaled", lambda right: lambda x, y, keep: y),
        "a layer that runs adds its change over",
        lambda: [dropping_figure.scale_claim()],
    ),
    Mistake(
        "layer_dropping",
        "the first layer is dropped as often as the last",
        planted(
            layer_dropping,
            "keep_probability",
            lambda right: (
                lambda schedule, step, number, depth: right(
                    schedule, step, depth, depth
                )
            ),
        ),
        "a layer that runs adds its change over",
        lambda: [dropping_figure.scale_claim()],
    ),
    Mistake(
        "layer_dropping",
        "one coin decides about all layers",
        planted(layer_dropping, "runs", _coins_of_the_last_layer),
        "layers skipped at theta = 0.5",
        lambda: dropping_figure._loss_claims(0.0, 1.0),
    ),
]

# Gradient codes.


def _code_claims():
    return coding_figure.exactness_claims()[:2]


def _means_of_the_alive(right):
    """Answers count alike, as if every one were a share of the sum."""

    def decode(self, workers):
        right(self, workers)
        answers = self.matrix[list(workers)]
        return np.full(len(workers), len(self.matrix) / answers.sum())

    return decode


CODES = [
    Mistake(
        "gradient_coding",
        "answers are added up with equal shares",
        planted(codes.Code, "decode", _means_of_the_alive),
        "cyclic, n=8, s=1: exact for every set",
        _code_claims,
    ),
    Mistake(
        "gradient_coding",
        "what cannot be decoded is decoded as well as it can be",
        lambda patch: patch.setattr(codes, "_TOLERANCE", np.inf),
        "cyclic, n=8, s=1: sets of s + 1 stragglers",
        _code_claims,
    ),
    Mistake(
        "gradient_coding",
        "coefficients go to the workers in reverse order",
        planted(
            coded_sum.CodedSum,
            "coefficients",
            lambda right: lambda self, workers: right(self, workers)[::-1],
        ),
        "cyclic, n=8, s=1: exact for every set",
        _code_claims,
    ),
]

# Gradient diversity.


def _sum_of_chunks(right):
    """Squares the sum of the gradients that are computed together."""
    return lambda tree: right(jax.tree.map(lambda x: x.sum(axis=0), tree))


DIVERSITY = [
    Mistake(
        "gradient_diversity",
        "the gradients of eight rows are summed before they are squared",
        planted(gradient_diversity, "_square", _sum_of_chunks),
        "the metric on data=8 equals brute force",
        diversity_figure.meter_claims,
    ),
    Mistake(
        "gradient_diversity",
        "the bound counts the square of the rows",
        lambda patch: patch.setattr(
            gradient_diversity.Diversity,
            "batch_bound",
            property(lambda self: self.rows**2 * self.diversity),
        ),
        "rows that stand four times do not raise",
        diversity_figure.meter_claims,
    ),
]

# Trials of hyperparameters.


def _rate_of_another_trial(right):
    def step(self, values, state, batch):
        return right(self, values | {"rate": values["rate"] * 1.01}, state, batch)

    return step


def _mean_of_all_trials(right):
    def step(self, values, state, batch):
        state, loss = right(self, values, state, batch)
        params = jax.tree.map(
            lambda x: x + 1e-3 * (jax.lax.pmean(x, trials.TRIAL) - x), state.params
        )
        return state._replace(params=params), loss

    return step


def _trial_claims():
    return search_figure.equality_claims(runs=1, steps=2)


TRIALS = [
    Mistake(
        "hyperparameter_search",
        "a trial trains with a rate that is not its own",
        planted(trials.Trials, "_one_step", _rate_of_another_trial),
        "1 trials in one program equal",
        _trial_claims,
    ),
    Mistake(
        "hyperparameter_search",
        "trials pull their weights toward the mean of all",
        planted(trials.Trials, "_one_step", _mean_of_all_trials),
        "no collective in the program",
        _trial_claims,
    ),
]

# The parameter server.


def _drops_whole_bound(right):
    """Every weight at zero is far, whatever its gradient."""
    return lambda weights, gradients, l1, threshold: weights == 0


FILTERS = [
    Mistake(
        "parameter_server",
        "the KKT filter takes every weight at zero for far",
        planted(proximal, "is_far", _drops_whole_bound),
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

# Features without labels.


def _through_the_reconstruction(right):
    """The gradient also goes through the reconstruction."""

    def divergence(model, batch, key):
        v0 = batch["x"]
        v1 = model.down(model.up(v0))
        loss = (model.free_energy(v0) - model.free_energy(v1)).mean()
        return loss, {"error": jnp.square(v0 - v1).sum(1).mean()}

    return divergence


def _no_penalty(right):
    def codes(self, x):
        patched = unsupervised_models.SparseCoder.__new__(type(self))
        vars(patched).update(vars(self))
        patched.penalty = self.penalty / 4
        return right(patched, x)

    return codes


FEATURES = [
    Mistake(
        "unsupervised",
        "the gradient of CD-1 goes through the reconstruction",
        planted(unsupervised_models, "divergence", _through_the_reconstruction),
        "the gradients of CD-1",
        unsupervised_figure.reference_claims,
    ),
    Mistake(
        "unsupervised",
        "codes are found with a quarter of the penalty",
        planted(unsupervised_models.SparseCoder, "codes", _no_penalty),
        "the objective of the codes",
        unsupervised_figure.reference_claims,
    ),
]

MORE = [
    Mistake(
        "scaling",
        "Gustafson's law loses the serial part of one device",
        planted(
            speedup_laws.Weak,
            "speedup",
            lambda right: lambda self, n: n - self.serial * n,
        ),
        "the laws are the sums",
    ),
    Mistake(
        "poseidon",
        "the second factor is sent for nothing",
        planted(
            sufficient_factors,
            "factor_bytes",
            lambda right: lambda rows, m, n, *rest: right(rows, m, 0, *rest),
        ),
        "compiled programs of 8 devices",
    ),
    Mistake(
        "gradient_diversity",
        "the bound is the diversity, without the rows",
        lambda patch: patch.setattr(
            gradient_diversity.Diversity,
            "batch_bound",
            property(lambda self: self.diversity),
        ),
        "rows that stand four times do not raise",
        diversity_figure.meter_claims,
    ),
]

MISTAKES = [
    *(*LAWS, *FACTORS, *GOSSIP, *STALENESS, *SANDBLASTER, *LAYERS, *CODES),
    *(*DIVERSITY, *TRIALS, *FILTERS, *HOGWILD, *FEATURES, *MORE),
]
