"""Mistakes in methods that compile little: laws, factors, codes and searches."""

import jax
import jax.numpy as jnp
import numpy as np
from support.planted_papers import Mistake, planted

from experiments.gallery import gradient_coding as coding_figure
from experiments.gallery import gradient_diversity as diversity_figure
from experiments.gallery import hyperparameter_search as search_figure
from experiments.gallery import layer_dropping as dropping_figure
from experiments.gallery import unsupervised as unsupervised_figure
from experiments.gallery import unsupervised_models
from meshpar.contracts import cost
from meshpar.methods import (
    gradient_diversity,
    layer_dropping,
    speedup_laws,
    sufficient_factors,
)
from meshpar.methods.gradient_coding import coded_sum, codes
from meshpar.methods.random_search import trials

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
    Mistake(
        "poseidon",
        "the bytes of the second factor are not counted",
        planted(
            sufficient_factors,
            "factor_bytes",
            lambda right: lambda rows, m, n, *rest: right(rows, m, 0, *rest),
        ),
        "compiled programs of 8 devices",
    ),
]

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

MISTAKES = [*LAWS, *FACTORS, *LAYERS, *CODES, *DIVERSITY, *TRIALS, *FEATURES]
