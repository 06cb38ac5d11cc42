"""Mistakes in synchronous SGD and in the laws of what steps and messages cost."""

import jax
import jax.numpy as jnp
import optax
from support.planted_papers import Mistake, planted

from experiments.gallery import communication_patterns as patterns_figure
from experiments.gallery import descent_rates
from experiments.gallery import large_batches as batches_figure
from experiments.gallery import megatron_collectives as megatron_figure
from experiments.gallery import roofline as roofline_figure
from experiments.gallery import synchronous_sgd as sgd_figure
from experiments.gallery import time_to_accuracy as time_figure
from experiments.gallery.paper import Claim
from meshpar.collectives import patterns, rings
from meshpar.contracts import hlo_work
from meshpar.explain import roofline
from meshpar.jaxprs import flops
from meshpar.layouts.plan import Plan
from meshpar.layouts.scope import constrain
from meshpar.lowering.jit import JitLowering
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.methods import batch_rules, pattern_costs
from meshpar.methods.time_to_accuracy import Cluster
from meshpar.ops import tensor_parallel

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
        "`wait` hands on a value before the one it waits for has arrived",
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


# Megatron's collectives.


def _whole_between_matmuls(right):
    """The result of a column-parallel matmul is gathered on all devices."""

    def column_parallel(x, *weights, matmul=None):
        return tuple(
            constrain(y, "batch", "length", *[None] * (y.ndim - 2))
            for y in right(x, *weights, matmul=matmul)
        )

    return column_parallel


def _one_by_one(right):
    """Queries, keys and values are multiplied apart, each with its collectives."""

    def column_parallel(x, *weights, matmul=None):
        return tuple(y for w in weights for y in right(x, w, matmul=matmul))

    return column_parallel


def _plain_claims():
    return megatron_figure.plain_claims(megatron_figure.both(megatron_figure.PLAIN))


def _sequence_claims():
    plain = megatron_figure.layer(megatron_figure.PLAIN, True)
    layers = megatron_figure.both(megatron_figure.SEQUENCE)
    return megatron_figure.sequence_claims(plain, layers)


MEGATRON = [
    Mistake(
        "megatron_collectives",
        "activations are gathered between the two matmuls",
        planted(tensor_parallel, "column_parallel", _whole_between_matmuls),
        "collectives of a layer: forward pass, and step",
        _plain_claims,
    ),
    Mistake(
        "megatron_collectives",
        "the gradients of q, k and v are scattered apart",
        planted(tensor_parallel, "column_parallel", _one_by_one),
        "sequence parallelism: forward pass, and step",
        _sequence_claims,
    ),
]

# Rooflines.


def _one_small_step():
    return [roofline_figure.flops_claim({2: roofline_figure.on_cpu(2)})]


ROOFLINE = [
    Mistake(
        "roofline",
        "the ridge is that of a link to other chips",
        planted(
            roofline,
            "ridge",
            lambda right: lambda chip: chip.peak_flops / chip.link_bandwidth,
        ),
        "FLOPs per byte at the ridge",
        roofline_figure.chip_claims,
    ),
    Mistake(
        "roofline",
        "a matmul's own rows move nothing",
        planted(
            roofline,
            "matmul_rows",
            lambda right: lambda chip, *sizes: roofline.ridge(chip),
        ),
        "rows from which a matmul",
        roofline_figure.chip_claims,
    ),
    Mistake(
        "roofline",
        "a multiplication and an addition count once",
        planted(
            hlo_work,
            "own_flops",
            lambda right: lambda instruction, scope: right(instruction, scope) / 2,
        ),
        "FLOPs of a compiled step",
        _one_small_step,
    ),
]

# Time to accuracy.


def _law_claims():
    return time_figure.law_claims(time_figure.PLANTED)


def _by_steps_of_one_row(right):
    return lambda self, workers, batch, rows: rows * self.step_seconds(workers, batch)


def _without_the_way_back(right):
    def seconds(self, workers, batch):
        return right(self, workers, batch) - (workers - 1) * self.latency

    return seconds


TIME = [
    Mistake(
        "time_to_accuracy",
        "the messages of the gather are forgotten",
        planted(Cluster, "step_seconds", _without_the_way_back),
        "passes times seconds of a pass",
        _law_claims,
    ),
    Mistake(
        "time_to_accuracy",
        "a pass has as many steps as rows",
        planted(Cluster, "pass_seconds", _by_steps_of_one_row),
        "passes times seconds of a pass",
        _law_claims,
    ),
    Mistake(
        "time_to_accuracy",
        "the best number of workers counts every message once",
        planted(
            Cluster,
            "best_workers",
            lambda right: lambda self, batch: min(2**0.5 * right(self, batch), batch),
        ),
        "workers with the shortest step",
        _law_claims,
    ),
]

# Large batches.

BATCHES = [
    Mistake(
        "large_batches",
        "LARS scales no step",
        planted(
            batch_rules,
            "lars",
            lambda right: lambda rate: optax.sgd(rate, momentum=0.9),
        ),
        "3 steps on data=8, with warm-up",
        batches_figure.recurrence_claims,
    ),
    Mistake(
        "large_batches",
        "a rate is warmed up a step late",
        planted(
            batch_rules,
            "warmed_up",
            lambda right: lambda rate, steps: lambda step: right(rate, steps)(step - 1),
        ),
        "3 steps on data=8, with warm-up",
        batches_figure.recurrence_claims,
    ),
]

# Sizes of models.

SIZES = [
    Mistake(
        "model_sizes",
        "one of Adam's moments is not in the plan",
        planted(
            Plan,
            "bytes_per_device",
            lambda right: (
                lambda self: (
                    lambda found: {**found, "optimizer": found["optimizer"] / 2}
                )(right(self))
            ),
        ),
        "GB of training state with Adam",
    ),
    Mistake(
        "model_sizes",
        "a multiplication and an addition count once",
        planted(
            flops, "equation_flops", lambda right: lambda eqn: (right(eqn) or 0) / 2
        ),
        "FLOPs of training BERT-large",
    ),
]

MISTAKES = [
    *SGD,
    *PATTERNS,
    *MEGATRON,
    *ROOFLINE,
    *TIME,
    *BATCHES,
    *SIZES,
]
