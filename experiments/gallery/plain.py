"""Plain training on one device, without layouts: what programs are compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

import meshpar

Params = Mapping[str, Any]


def gradients(model: meshpar.Model, params: Params, batch: Any) -> tuple[float, Params]:
    """(loss, {path: gradient}) of a whole batch, by jax alone."""
    loss, found = jax.jit(jax.value_and_grad(lambda p, b: model.loss(p, b, None).loss))(
        dict(params), batch
    )
    return float(loss), found


def train(
    model: meshpar.Model,
    optimizer: optax.GradientTransformation,
    params: Params,
    batches: Sequence[Any],
) -> tuple[list[float], Params]:
    """(losses, weights at the end) of steps of an optax optimizer."""
    params, losses = dict(params), []
    state = optimizer.init(params)
    for batch in batches:
        loss, found = gradients(model, params, batch)
        updates, state = optimizer.update(found, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss)
    return losses, jax.device_get(params)


def error(
    program: meshpar.TrainProgram,
    optimizer: optax.GradientTransformation,
    batches: Sequence[Any],
) -> float:
    """Largest relative error of a loss or a weight of a program, against `train`."""
    state, losses = program.init(0), []
    start = jax.device_get(dict(state.params))
    for batch in batches:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    wanted, weights = train(program.model, optimizer, start, batches)
    return max(
        float(np.abs(np.divide(losses, wanted) - 1).max()),
        distance(jax.device_get(dict(state.params)), weights, start),
    )


def distance(found: Params, wanted: Params, start: Params) -> float:
    """Largest error of a weight's way from its start, relative to the way's length."""
    return max(
        float(np.linalg.norm(found[path] - x) / np.linalg.norm(x - start[path]))
        for path, x in wanted.items()
    )
