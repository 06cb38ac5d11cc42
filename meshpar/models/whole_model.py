"""Models without layers on devices that each see a part of the batch.

A model whose layers are not known runs as one head: nothing is embedded, one layer
without parameters passes that on, and the head is the whole loss. Weights are gathered
together when a step begins, and gradients are reduced together when it ends, so that
the number of collectives does not grow with that of tensors.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.metrics import LossResult
from meshpar.models.layer_stack import Key, LayeredModel
from meshpar.models.model import Model
from meshpar.replicated import num_rows


def as_one_head(model: Model) -> Model:
    """The model in a layered form whose head is all of it."""

    def embed(shared: Params, batch: Any, key: Key) -> Array:
        del shared, key
        return jnp.zeros((num_rows(batch), 1))

    def layer(weights: Params, x: Array, key: Key, context: Any) -> Array:
        del weights, key, context
        return x

    def head_loss(shared: Params, x: Array, batch: Any, key: Key) -> LossResult:
        del x
        if key is None:
            return model.evaluation_loss(shared, batch)
        return model.loss(shared, batch, key)

    # No path of a parameter is empty before its first slash.
    layered = LayeredModel("/", 1, embed, layer, head_loss)
    return dataclasses.replace(model, layered=layered)
