"""Mistakes in pipelines that never wait, and in what runs beside them."""

import numpy as np
from support.planted_papers import Mistake, planted

from experiments.gallery import decision_tree as tree_figure
from experiments.gallery import deepspeed_inference as inference_figure
from experiments.gallery import experts as experts_figure
from experiments.gallery import flexflow as flexflow_figure
from experiments.gallery import geeps as geeps_figure
from experiments.gallery import pipedream as pipedream_figure
from experiments.gallery import zero_r as zero_r_figure
from meshpar.generation import floor as reading
from meshpar.generation.generate import Generator
from meshpar.layouts.layout import Layout
from meshpar.layouts.offload import ACTIVATIONS, OPTIMIZER
from meshpar.methods import decision_tree, random_second_expert
from meshpar.methods.flexflow.markov import MarkovSearch
from meshpar.methods.flexflow.simulator import _Run
from meshpar.methods.pipedream import order, partitioner
from meshpar.methods.pipedream.versions import NEWEST, Versions

# PipeDream.


def _updated_weights_backward(right):
    """Backward passes use the newest weights, as if nothing was stashed."""

    def backward(self, stage, minibatch):
        if self.policy == "stashed":
            return Versions(self.replicas, NEWEST).backward(stage, minibatch)
        return right(self, stage, minibatch)

    return backward


def _own_newest(right):
    """Stages take the newest weights that they have, whatever came with the input."""

    def forward(self, stage, minibatch):
        if self.policy == "vertical_sync":
            return Versions(self.replicas).forward(stage, minibatch)
        return right(self, stage, minibatch)

    return forward


def _one_fewer_in_flight(right):
    return lambda replicas: [max(1, n - 1) for n in right(replicas)]


def _half_the_activations(right):
    """Gradients of activations are not sent back."""

    def partition(layers, machines, bandwidth):
        half = [x._replace(activation_bytes=x.activation_bytes / 2) for x in layers]
        return right(half, machines, bandwidth)

    return partition


def _quick_recurrences():
    return pipedream_figure.recurrence_claims(replicated=False)


def _quick_partitions():
    return pipedream_figure.partition_claims(10)


PIPEDREAM = [
    Mistake(
        "pipedream",
        "a backward pass uses the newest weights",
        planted(Versions, "backward", _updated_weights_backward),
        "stashed: 24 minibatches",
        _quick_recurrences,
    ),
    Mistake(
        "pipedream",
        "with vertical sync a stage takes the newest weights that it has",
        planted(Versions, "forward", _own_newest),
        "vertical_sync: 24 minibatches",
        _quick_recurrences,
    ),
    Mistake(
        "pipedream",
        "the partitioner forgets that gradients travel back",
        planted(partitioner, "partition", _half_the_activations),
        "the partitioner finds the best",
        _quick_partitions,
    ),
    Mistake(
        "pipedream",
        "workers have one minibatch fewer in flight",
        planted(order, "warm_up", _one_fewer_in_flight),
        "events of the workers",
        _quick_partitions,
    ),
]

# FlexFlow.


def _only_worse(right):
    return lambda self, now, new, least: new >= now


def _endless_links(right):
    """Transfers do not wait for each other."""

    def send(self, transfer, index, term):
        self.sends = 0.0
        return right(self, transfer, index, term)

    return send


def _unread(right):
    """Operators do not wait for the transfers of their operands."""
    return lambda self, until, term: right(self, 0.0, term)


def _quick_search():
    return flexflow_figure.search_claims((0,), flexflow_figure.MESHES[:2])


def _events():
    return [flexflow_figure.event_claim()]


FLEXFLOW = [
    Mistake(
        "flexflow",
        "chains take proposals that are worse, and leave those that are better",
        planted(MarkovSearch, "_takes", _only_worse),
        "chains find the best",
        _quick_search,
    ),
    Mistake(
        "flexflow",
        "transfers over one link run at the same time",
        planted(_Run, "_send", _endless_links),
        "18 simulated steps",
        _events,
    ),
    Mistake(
        "flexflow",
        "an operator does not wait for what it reads",
        planted(_Run, "_wait", _unread),
        "18 simulated steps",
        _events,
    ),
]

# DeepSpeed Inference.


def _one_place_late(right):
    """Prefill puts every token of a prompt into the cache one place too late."""

    def cached(self, params, tokens, last):
        return right(self, params, np.roll(tokens, 1, axis=1), last)

    return cached


def _whole_weights(right):
    """Each device of `tensor` reads all weights."""

    def found(arrays, shardings):
        whole = sum(x.size * x.dtype.itemsize for x in arrays[0].values())
        return whole + right(arrays[1], shardings[1])

    return found


def _quick_equality():
    return inference_figure.equality_claims(("tensor=2",))


def _speeds():
    found = {
        (layout, batch): inference_figure.predicted(layout, batch)
        for layout in ("tensor=1", "tensor=8", "data=8")
        for batch in (8, 128)
    }
    return inference_figure.speed_claims(found)


INFERENCE = [
    Mistake(
        "deepspeed_inference",
        "tokens of a prompt are in the cache one place too late",
        planted(Generator, "_cached", _one_place_late),
        "8 tokens of tensor=2",
        _quick_equality,
    ),
    Mistake(
        "deepspeed_inference",
        "the floor of decoding counts whole weights on every device",
        planted(reading, "bytes_per_device", _whole_weights),
        "predicted seconds of a token",
        _speeds,
    ),
]

# GeePS.


def _without(part):
    """A part of what `offload=` names stays on the chip."""

    def wrong(right):
        return property(lambda self: right.fget(self) - {part})

    return wrong


GEEPS = [
    Mistake(
        "geeps",
        "what layers save stays on the chip",
        planted(Layout, "offloaded", _without(ACTIVATIONS)),
        "MB of 6 layers",
        geeps_figure.quick_claims,
    ),
    Mistake(
        "geeps",
        "the momentum stays on the chip",
        planted(Layout, "offloaded", _without(OPTIMIZER)),
        "MB of 6 layers",
        geeps_figure.quick_claims,
    ),
]

# ZeRO-R.


def _whole_stream(right):
    """The residual stream is whole on every device of `tensor`."""
    return property(lambda self: right.fget(self) | {"residual_length": ()})


def _gathered_at_once(right):
    """The weights of all layers are gathered together."""
    return property(lambda self: min(2, right.fget(self)))


def _checkpoints():
    return zero_r_figure.checkpoint_claims()[0]


def _buffers():
    return [zero_r_figure.buffer_claim()]


ZERO_R = [
    Mistake(
        "zero_r",
        "checkpoints are whole on every device of tensor",
        planted(Layout, "activation_rules", _whole_stream),
        "kB of a layer's checkpoint",
        _checkpoints,
    ),
    Mistake(
        "zero_r",
        "the weights of all layers are gathered at once",
        planted(Layout, "zero_level", _gathered_at_once),
        "largest collective of 12 layers",
        _buffers,
    ),
]

# Decision trees, and random second experts.


def _unpruned(right):
    return lambda devices, prune=True: right(devices, False)


def _in_one_order(right):
    """Paths with the same kinds and degrees in another order are taken for one."""

    def strategies(devices, prune=True):
        found = right(devices, prune)
        return list({(s.stages, frozenset(s.splits)): s for s in found}.values())

    return strategies


def _always_second(right):
    return lambda logits, capacity, key=None: right(logits, capacity)


def _tree():
    return tree_figure.count_claims(8)


TREES = [
    Mistake(
        "decision_tree",
        "branches that mix data and sharded data parallelism are left in",
        planted(decision_tree, "strategies", _unpruned),
        "strategies of 8 devices",
        _tree,
    ),
    Mistake(
        "decision_tree",
        "the order of the levels does not count",
        planted(decision_tree, "strategies", _in_one_order),
        "strategies of 8 devices",
        _tree,
    ),
    Mistake(
        "experts",
        "every second expert comes along, whatever its gate",
        planted(random_second_expert, "gating", _always_second),
        "top-2 gating with a random second expert",
        lambda: [experts_figure.gating_claim()],
    ),
]

MISTAKES = PIPEDREAM + FLEXFLOW + INFERENCE + GEEPS + ZERO_R + TREES
