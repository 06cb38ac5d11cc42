"""Whether training differentiates the layers of a model."""

from typing import Any

from meshpar.arrays import abstract
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
