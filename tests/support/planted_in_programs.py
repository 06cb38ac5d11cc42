"""Mistakes in programs: layouts, plans, pipelines, experts and generation."""

import dataclasses

import jax
import jax.numpy as jnp
from support.planted_papers import Mistake, planted

from experiments.gallery import experts as experts_figure
from experiments.gallery import galvatron as galvatron_figure
from experiments.gallery import gpipe as gpipe_figure
from experiments.gallery import host_memory as host_figure
from experiments.gallery import local_sgd as local_sgd_figure
from experiments.gallery import model_parallel as partitioned_figure
from experiments.gallery import partitioned
from experiments.gallery import zero_memory as zero_figure
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan
from meshpar.layouts.resolve import _LeafPlans
from meshpar.local_sgd.exchange import Exchange
from meshpar.local_sgd.schedule import SyncSchedule
from meshpar.lowering import chunked_update, shard_map
from meshpar.ops.experts import config as experts_config
from meshpar.ops.experts import router
from meshpar.pipeline.executor import Executor
from meshpar.planner import layer_policies
from meshpar.schedules import published
from meshpar.schedules.table import Schedule

# Plans and ZeRO.


def _one_level_less(right):
    return property(lambda self: {2: 1}.get(right.fget(self), right.fget(self)))


def _whole_moments(right):
    """Adam's moments are whole on every device, as without ZeRO."""

    def leaf(self, keys, x):
        found = right(self, keys, x)
        whole = found.bytes_per_device * self.layout.fsdp
        spec = tuple(() for _ in found.spec)
        return dataclasses.replace(found, spec=spec, bytes_per_device=whole)

    return leaf


PLANS = [
    Mistake(
        "zero_memory",
        "zero=2 leaves the gradients whole",
        planted(Layout, "zero_level", _one_level_less),
        "temporary memory falls",
        zero_figure.measured_claims,
    ),
    Mistake(
        "zero_memory",
        "Adam's moments are not sharded",
        planted(_LeafPlans, "optimizer_leaf", _whole_moments),
        "ZeRO-1 (optimizer)",
    ),
    Mistake(
        "megatron",
        "the state is counted twice",
        planted(
            Plan,
            "bytes_per_device",
            lambda right: lambda self: {k: 2 * v for k, v in right(self).items()},
        ),
        "this state is that of arithmetic",
    ),
    Mistake(
        "megatron",
        "the stages hold twice as many inputs",
        planted(
            Schedule,
            "in_flight",
            lambda right: lambda self: [2 * n for n in right(self)],
        ),
        "these activations are those of arithmetic",
    ),
]

# Pipeline schedules.


def _every_other_tick(right):
    """GPipe starts a microbatch in every other tick."""

    def fused(name, stages, microbatches, chunks, start):
        found = right(name, stages, microbatches, chunks, start)
        if name != "gpipe":
            return found
        forward = {op: tick + op.microbatch for op, tick in found.forward.items()}
        backward = {op: tick + microbatches for op, tick in found.backward.items()}
        return dataclasses.replace(found, forward=forward, backward=backward)

    return fused


def _all_forward_first(right):
    def fused(name, stages, microbatches, chunks, start):
        if name == "1f1b":
            start = microbatches + stages - 1
        return right(name, stages, microbatches, chunks, start)

    return fused


def _as_long_as_f(right):
    return lambda self, f=1.0, b=2.0, w=0.0: right(self, f, f, w)


def _scaled_gradients(right):
    """Microbatches are summed, and the mean is taken over all but one."""

    def train(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        grown = jax.tree.map(lambda x: x * (8 / 7), (found.shared, found.stack))
        return found._replace(shared=grown[0], stack=grown[1])

    return train


PIPELINES = [
    Mistake(
        "pipeline_bubbles",
        "1F1B runs all forward passes first",
        planted(published, "_fused", _all_forward_first),
        "1F1B holds as many activations",
    ),
    Mistake(
        "pipeline_bubbles",
        "a backward pass takes as long as a forward pass, its work twice",
        planted(Schedule, "time", _as_long_as_f),
        "bubbles follow the closed forms",
    ),
    Mistake(
        "pipeline_bubbles",
        "GPipe starts a microbatch in every other tick",
        planted(published, "_fused", _every_other_tick),
        "bubbles follow the closed forms",
    ),
    Mistake(
        "gpipe",
        "GPipe starts a microbatch in every other tick",
        planted(published, "_fused", _every_other_tick),
        "bubble of the tables of ticks",
        lambda: gpipe_figure.bubble_claims(gpipe_figure.bubbles()),
    ),
    Mistake(
        "gpipe",
        "the mean over 8 microbatches divides by 7",
        planted(Executor, "train", _scaled_gradients),
        "4 stages and 8 microbatches train",
        lambda: [gpipe_figure.equality_claim()],
    ),
]

# Host memory.


def _stays_on_the_device(right):
    return lambda plan, model, optimizer: plan


def _moves_all_but_one_moment(right):
    """Only the first of Adam's moments goes to host memory."""

    def offloaded(plan, model, optimizer):
        found = right(plan, model, optimizer)
        leaves = [
            dataclasses.replace(leaf, on_host=leaf.on_host and ".nu" not in leaf.path)
            for leaf in found.optimizer
        ]
        return dataclasses.replace(found, optimizer=tuple(leaves))

    return offloaded


HOST = [
    Mistake(
        "host_memory",
        "offload= is read, and nothing is moved",
        planted(chunked_update, "offloaded_plan", _stays_on_the_device),
        "bytes of a layer's parameter in host memory",
        lambda: [host_figure.measured_claim()],
    ),
    Mistake(
        "host_memory",
        "one of Adam's moments stays on the device",
        planted(chunked_update, "offloaded_plan", _moves_all_but_one_moment),
        "bytes of a layer's parameter in host memory",
        lambda: [host_figure.measured_claim()],
    ),
]

# Experts.


def _no_router_weights(right):
    def route(*args, **kwargs):
        found = right(*args, **kwargs)
        return found._replace(weights=jnp.ones_like(found.weights))

    return route


def _room_for_all(right):
    """Every expert has room for all tokens."""
    return lambda self, length: length


EXPERTS = [
    Mistake(
        "experts",
        "outputs of experts are added without the router's weights",
        planted(router, "route", _no_router_weights),
        "a mixture with capacity equals",
        lambda: [experts_figure.mixture_claim()],
    ),
    Mistake(
        "experts",
        "every expert computes all tokens",
        planted(experts_config.MixtureConfig, "capacity", _room_for_all),
        "MFLOPs of a device",
    ),
    Mistake(
        "experts",
        "tokens above the capacity are not dropped",
        planted(experts_config.MixtureConfig, "capacity", _room_for_all),
        "a mixture with capacity equals",
        lambda: [experts_figure.mixture_claim()],
    ),
]

# Galvatron's search.


def _fastest_alone(right):
    return lambda partials: right(partials)[:1]


GALVATRON = [
    Mistake(
        "galvatron",
        "the dynamic program keeps the fastest partial choice alone",
        planted(layer_policies, "_unbeaten", _fastest_alone),
        "the dynamic program over layers",
        lambda: [galvatron_figure.search_claim()],
    ),
    Mistake(
        "galvatron",
        "a change of use between layers costs nothing",
        planted(
            layer_policies,
            "best_choices",
            lambda right: lambda layers, budget, change=0.0: right(layers, budget),
        ),
        "the dynamic program over layers",
        lambda: [galvatron_figure.search_claim()],
    ),
]

# Layouts.


def _sum_of_losses(right):
    """Gradients are summed over the devices, where they were means already."""
    return lambda grads, shardings: {
        path: 2 * x for path, x in right(grads, shardings).items()
    }


LAYOUTS = [
    Mistake(
        "legal_layouts",
        "gradients are twice as large where devices sum them",
        planted(shard_map, "all_reduce_grads", _sum_of_losses),
        "4 random layouts of 8 devices",
    ),
    Mistake(
        "legal_layouts",
        "the mean over microbatches divides by one less in pipelines",
        planted(Executor, "train", _scaled_gradients),
        "4 random layouts of 8 devices",
    ),
]

# Local SGD.


def _half_way(right):
    """Replicas go half of the way to their mean."""

    def at_once(self, params, *args, **kwargs):
        mean, *rest = right(self, params, *args, **kwargs)
        half = {path: (x + params[path]) / 2 for path, x in mean.items()}
        return half, *rest

    return at_once


def _recurrence():
    return [local_sgd_figure.recurrence_claim()]


LOCAL_SGD = [
    Mistake(
        "local_sgd",
        "replicas go half of the way to their mean",
        planted(Exchange, "at_once", _half_way),
        "4 replicas equal plain SGD",
        _recurrence,
    ),
    Mistake(
        "local_sgd",
        "periods are twice as long as they should be",
        planted(
            SyncSchedule,
            "_bounds",
            lambda right: lambda self, i: tuple(2 * x for x in right(self, i // 2)),
        ),
        "4 replicas equal plain SGD",
        _recurrence,
    ),
]

# Partitioned layers.


def _own_rows_twice(right):
    """The rows above come from the device itself."""

    def apply(self, x, w, axis):
        if not self.cross:
            return right(self, x, w, axis)
        halo = self._halo
        rows = jnp.concatenate([x[:, -halo:], x, x[:, :halo]], axis=1)
        return partitioned._locally_connect(rows, w, self.window)

    return apply


def _small_claims():
    found = {
        name: partitioned_figure.check(layers)
        for name, layers in partitioned_figure.small_networks().items()
    }
    return partitioned_figure._claims(found, {"a": {32: 1.0}, "b": {32: 3.0}}, 3.0)


def _gathers_everywhere(right):
    def apply(self, x, w, axis):
        whole = jax.lax.all_gather(x, axis, axis=3, tiled=True)
        if self.cross or self.reads_picture:
            return right(self, x, w, axis)
        size = x.shape[3]
        first = jax.lax.axis_index(axis) * size
        return right(self, jax.lax.dynamic_slice_in_dim(whole, first, size, 3), w, axis)

    return apply


PARTITIONED = [
    Mistake(
        "model_parallel",
        "windows read the device's own rows in place of its neighbours'",
        planted(partitioned.LocallyConnected, "apply", _own_rows_twice),
        "locally connected: 8 devices equal one",
        _small_claims,
    ),
    Mistake(
        "model_parallel",
        "maps are gathered at layers without cross-talk",
        planted(partitioned.Convolution, "apply", _gathers_everywhere),
        "grouped convolutions: collectives at the chosen",
        _small_claims,
    ),
]


def _whole_chunks(right):
    """A chunk of layers takes as long as a whole stage."""

    def time(self, f=1.0, b=2.0, w=0.0):
        return right(self, f, b, w) * self.num_chunks

    return time


MORE = [
    Mistake(
        "pipeline_bubbles",
        "a chunk of layers takes as long as a whole stage",
        planted(Schedule, "time", _whole_chunks),
        "bubbles follow the closed forms",
    ),
    Mistake(
        "megatron",
        "a chunk of layers takes as long as a whole stage",
        planted(Schedule, "time", _whole_chunks),
        "the gains are those of the bubbles",
    ),
    Mistake(
        "galvatron",
        "the dynamic program does not look at the budget",
        planted(
            layer_policies,
            "best_choices",
            lambda right: lambda layers, budget, change: right(layers, 1e30, change),
        ),
        "the dynamic program over layers",
        lambda: [galvatron_figure.search_claim()],
    ),
]

MISTAKES = [
    *(*PLANS, *PIPELINES, *HOST, *EXPERTS, *GALVATRON, *LAYOUTS),
    *(*LOCAL_SGD, *PARTITIONED, *MORE),
]
