"""Traces on shapes, which run and allocate nothing."""

from typing import Any

import jax

import meshpar


def trace_loss(model: meshpar.Model, batch: Any) -> None:
    """Traces the training loss of a model."""
    params = {
        path: jax.ShapeDtypeStruct(param.shape, param.dtype)
        for path, param in model.params.items()
    }
    jax.eval_shape(lambda p: model.loss(p, batch, jax.random.key(0)).loss, params)
