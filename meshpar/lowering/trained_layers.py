"""Whether gradients pass through the layers of a model, and read its embedding."""

from typing import Any

import jax

from meshpar.arrays import Params, abstract
from meshpar.fsdp.jaxprs import used_inputs
from meshpar.lowering.frame import Frame


def differentiates_layers(frame: Frame, batch: Any) -> bool:
    """Whether a gradient passes through the layers, or the head alone is trained.

    Args:
      frame: the shard_map program.
      batch: abstract batch of one replica.
    """
    shared, stack = frame.layered.split(frame.plan.gradients)
    if stack or not shared:
        return True
    weights = frame.layered.split(abstract(frame.plan.weights))[0]
    used = used_inputs(lambda p, b: frame.layered.embed(p, b, None), weights, batch)
    return not used.isdisjoint(shared)


def trains_all_outside(frame: Frame) -> bool:
    """Whether all parameters outside the layers are trained."""
    split, plan = frame.layered.split, frame.plan
    return split(plan.gradients)[0].keys() == split(plan.parameters)[0].keys()


def embeds_again(frame: Frame, batch: Any) -> bool:
    """Whether the gradient of the embedding reads rows of it, as after a norm.

    Args:
      frame: the shard_map program.
      batch: abstract batch of one replica.
    """
    embed, split = frame.layered.embed, frame.layered.split
    weights = split(abstract(frame.plan.weights))[0]
    trained = split(frame.plan.gradients)[0]

    def gradient(weights: Params, batch: Any, dx: Any) -> Params:
        own = {path: weights[path] for path in trained}
        return jax.vjp(lambda own: embed(weights | own, batch, None), own)[1](dx)[0]

    dx = jax.eval_shape(lambda w, b: embed(w, b, None), weights, batch)
    used = used_inputs(gradient, weights, batch, dx)
    tables = (frame.plan.weights[path] for path in used)
    return any("vocab" in (leaf.names or ()) for leaf in tables)
