"""Mistakes in synchronous SGD and in the laws of what steps and messages cost."""

import jax
import jax.numpy as jnp
from support.planted_papers import Mistake, planted

from experiments.gallery import communication_patterns as patterns_figure
from experiments.gallery import descent_rates
from experiments.gallery import synchronous_sgd as sgd_figure
from experiments.gallery.paper import Claim
from meshpar.collectives import patterns, rings
from meshpar.lowering.jit import JitLowering
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.methods import pattern_costs

# Synchronous SGD.


def _of_the_first_worker(right):
    """All workers compute the gradient of the first worker's rows."""

    def gradients(self, state, batch):
        size = self.layout.num_devices

        def first(x):
            return jnp.tile(x[: len(x) // size], (size, *[1] * (x.ndim - 1)))

        return right(self, state, jax.tree.map(first, batch))

    return gradients


def _reduced_by_part(right):
    """Gradients are reduced once more, as after every microbatch."""

    def sums(self, params, key, batch):
        totals, grads = right(self, params, key, batch)
        ways = self.layout.num_devices
        again = {
            path: jax.lax.psum(jax.lax.pcast(x / ways, ("data",), to="varying"), "data")
            for path, x in grads.items()
        }
        return totals, again

    return sums


def _floor_claims() -> list[Claim]:
    """The claim of the floors alone, of one seed."""
    floors = {
        n: (descent_rates.floor(n, 0.1, 400, 64, 0), descent_rates.exact_floor(n, 0.1))
        for n in (1, 8)
    }
    found = sgd_figure.Rates({1.0: (1.0, 1.0)}, None, [-1.0], floors, _HARD)
    return sgd_figure.rate_claims(found)


_HARD = {1: 1.0, 4: 0.5}


def _descent_claims() -> list[Claim]:
    """The claim of gradient descent alone."""
    descents = {1.0: (descent_rates.gradient_descent(1.0, 60), 0.9)}
    floors = {1: (1.0, 1.0)}
    found = sgd_figure.Rates(descents, None, [-1.0], floors, _HARD)
    return sgd_figure.rate_claims(found)


def _scaled(factor):
    """Gradients times a factor of the number of workers."""

    def wrong(right):
        def gradients(self, state, batch):
            found, scale = right(self, state, batch), factor(self.layout.num_devices)
            scaled = {path: scale * x for path, x in found.gradients.items()}
            return found._replace(gradients=scaled)

        return gradients

    return wrong


SGD = [
    Mistake(
        "synchronous_sgd",
        "the gradients of the workers are added up, without their mean",
        planted(JitLowering, "gradients", _scaled(lambda n: n)),
        "the gradient of 8 workers is the mean",
        sgd_figure.equality_claims,
    ),
    Mistake(
        "synchronous_sgd",
        "a step reduces its gradients twice",
        planted(ShardMapLowering, "_sums", _reduced_by_part),
        "a compiled step reduces the gradient once",
        sgd_figure.equality_claims,
    ),
    Mistake(
        "synchronous_sgd",
        "parts go around the ring as whole tensors",
        planted(
            rings,
            "ring_reduce_scatter",
            lambda right: (
                lambda x, axis, dim=0: patterns.scatter(
                    rings.tree_all_reduce(x, axis), axis, 0, dim
                )
            ),
        ),
        "payloads that a device sends for a sum",
        sgd_figure.equality_claims,
    ),
    Mistake(
        "synchronous_sgd",
        "all workers see the rows of the first",
        planted(JitLowering, "gradients", _of_the_first_worker),
        "at a fixed rate SGD stays",
        _floor_claims,
    ),
    Mistake(
        "synchronous_sgd",
        "the mean over 8 workers divides by 7",
        planted(JitLowering, "gradients", _scaled(lambda n: n / (n - 1))),
        "strongly convex, gradient descent",
        _descent_claims,
    ),
]

# Communication patterns.


def _formula(topology, pattern, wrong):
    """A `plant` of another closed form."""
    return lambda patch: patch.setitem(
        pattern_costs._FORMULAS[topology], pattern, wrong
    )


PATTERNS = [
    Mistake(
        "communication_patterns",
        "a scatter gives device i part i - 1",
        planted(
            patterns,
            "scatter",
            lambda right: (
                lambda x, axis, root=0, dim=0: right(
                    jnp.roll(x, len(x) // 8, 0), axis, root, dim
                )
            ),
        ),
        "10 patterns on 8 devices",
        lambda: _with_module(patterns, "scatter"),
    ),
    Mistake(
        "communication_patterns",
        "a wait waits for nothing",
        lambda patch: patch.setattr(
            patterns_figure.collectives, "wait", lambda first, later: later
        ),
        "a message that waits for another",
        patterns_figure.program_claims,
    ),
    Mistake(
        "communication_patterns",
        "a tree sends to one device after another",
        _formula("tree", "broadcast", lambda n, k: (n - 1, n - 1)),
        "the closed forms are the time of messages",
        lambda: patterns_figure.simulation_claims((8,)),
    ),
    Mistake(
        "communication_patterns",
        "bundles on a ring do not grow shorter on their way",
        _formula("ring", "all_to_all", lambda n, k: (n - 1, n - 1)),
        "the closed forms are the time of messages",
        lambda: patterns_figure.simulation_claims((8,)),
    ),
    Mistake(
        "communication_patterns",
        "the crossing counts the messages of the ring, and not those it has more",
        planted(
            pattern_costs,
            "crossing_bytes",
            lambda right: lambda n, *link: right(n, *link) * 126 / 114,
        ),
        "bytes from which a ring of 64",
        patterns_figure.all_reduce_claims,
    ),
]


def _with_module(module, name):
    """The claims, with the facade's function that of its module."""
    facade = patterns_figure.collectives
    right = getattr(facade, name)
    setattr(facade, name, getattr(module, name))
    try:
        return patterns_figure.program_claims()
    finally:
        setattr(facade, name, right)


MISTAKES = [*SGD, *PATTERNS]
