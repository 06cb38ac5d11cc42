"""Refusals of a layout under which a model is to continue prompts."""

from meshpar.layouts.axes import DATA, REPLICA
from meshpar.layouts.offload import PARAMETERS
from meshpar.layouts.refusals.refusal import (
    Refusal,
    as_data,
    kept_resident,
    offloads,
    sizes,
)

OF_GENERATION: tuple[Refusal, ...] = (
    Refusal(
        "generation",
        "a model without a cache",
        lambda c: "" if c.model.caches else "generation",
        "the model gives no cache",
        "give cached=, by generation.linen_cache(...), generation.nnx_cache(...) or as "
        "a generation.CachedModel",
    ),
    Refusal(
        "generation",
        f"{REPLICA}=N",
        lambda c: ", ".join(sizes(c, REPLICA)),
        "its replicas differ, and generation needs one model",
        f"use {DATA} in place of {REPLICA}, after reading the average of the replicas",
        lambda c: [as_data(c, REPLICA)],
    ),
    Refusal(
        f"offload={PARAMETERS}",
        "generation by a model's own loop over its layers",
        lambda c: "" if c.model.streams else ", ".join(offloads(c, PARAMETERS)),
        "it brings weights to the device layer by layer, and the model's own loop over "
        "its layers does not",
        "run its layers by meshpar.ops.over_layers and give a "
        "meshpar.generation.CachedModel with streams=True, or leave it out",
        lambda c: list(kept_resident(c))[-1:],
    ),
)
"""What `generator` refuses."""
