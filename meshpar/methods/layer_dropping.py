"""Progressive layer dropping: skips layers at random, more of them as training goes on.

In step t layer i of L runs with probability p = 1 - i / L (1 - theta(t)), and its
change of the activations is divided by p. (The paper divides the changes of attention
and of the feed-forward part, each where it is added.) The coin comes from the step and
the layer alone, so that all devices, microbatches, pipeline stages and recomputations
decide alike. `lax.cond` really skips what is dropped. Evaluation runs all layers.

Source: Zhang, He, Accelerating Training of Transformer-Based Language Models with
  Progressive Layer Dropping, NeurIPS 2020, arXiv:2010.13369, section 4.2 and
  algorithm 1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array, Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.models.layer_stack import Key, LayeredModel
from meshpar.models.model import STEP, Model

_NUMBER = "layer_number"
"""Last part of the path of each layer's number, which travels with its weights."""

Schedule = Callable[[Any], Any]
"""Number of steps done -> theta, the keep probability below the last layer."""


def progressive(least: float, steps: int, speed: float = 100.0) -> Schedule:
    """theta(t) = (1 - least) exp(-speed t / steps) + least, which falls from 1.

    Args:
      least: theta at the end.
      steps: number of training steps.
      speed: gamma times the number of steps; the paper takes 100.

    Raises:
      MeshparError: a probability or a number of steps that cannot be.
    """
    if not 0 < least <= 1 or steps < 1 or not speed > 0:
        raise MeshparError(
            f"progressive(least={least}, steps={steps}, speed={speed}): use a "
            "probability above 0 and up to 1, and positive numbers"
        )
    return lambda step: (1 - least) * jnp.exp(-speed * step / steps) + least


def keep_probability(schedule: Schedule, step: Any, number: Any, depth: int) -> Array:
    """The probability that layer `number` of `depth`, from 0, runs in a step."""
    theta = jnp.float32(schedule(jnp.float32(step)))
    return 1 - jnp.float32(number) / depth * (1 - theta)


def runs(
    schedule: Schedule, step: Any, number: Any, depth: int, seed: int = 0
) -> Array:
    """Whether a layer runs in a step."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), number)
    return jax.random.uniform(key) < keep_probability(schedule, step, number, depth)


def layers_run(schedule: Schedule, steps: int, depth: int, seed: int = 0) -> np.ndarray:
    """The layers that run in each step, bool [steps, depth]."""
    over_layers = jax.vmap(lambda t, i: runs(schedule, t, i, depth, seed), (None, 0))
    over_steps = jax.vmap(over_layers, (0, None))
    return np.asarray(jax.jit(over_steps)(jnp.arange(steps), jnp.arange(depth)))


def with_dropped_layers(model: Model, schedule: Schedule, seed: int = 0) -> Model:
    """The model, with layers that are skipped in training as a schedule says.

    Layers must be residual: each adds something to its input. The number of steps and
    the numbers of the layers become variables of the model, so that a checkpoint of
    one is not one of the other.

    Args:
      model: a model with layers.
      schedule: such as `progressive`; constant 1 is the model itself, bit for bit.
      seed: of the coins.

    Raises:
      MeshparError: a model without layers, or one with a variable of that path.
    """
    if model.layered is None:
        raise MeshparError(
            "layers can be dropped where meshpar runs them one by one: name them "
            "(layers=), or give a LayerStack"
        )
    path, depth = f"{model.layered.prefix}{_NUMBER}", model.layered.depth
    if path in model.params:
        raise MeshparError(f"the model has a variable {path!r}; rename it")
    int32 = jnp.dtype(jnp.int32)
    own = {
        STEP: Param((), int32, None, trained=False, is_state=True),
        path: Param((depth,), int32, ("layers",), trained=False, is_state=True),
    }
    start = {STEP: jnp.zeros((), int32), path: jnp.arange(depth, dtype=int32)}
    layered = _dropped(model.layered, path, schedule, seed)

    def init(key: Array) -> Params:
        return {**start, **model.init(key)}

    def loss(params: Params, batch: Any, key: Key) -> Any:
        return layered.loss(params, batch, key)

    def without_numbers(params: Params) -> Params:
        return {p: x for p, x in params.items() if p != path}

    def evaluation_loss(params: Params, batch: Any) -> Any:
        return model.evaluation_loss(without_numbers(params), batch)

    return dataclasses.replace(
        model,
        params={**own, **model.params},
        init=init,
        loss=loss,
        evaluation_loss=evaluation_loss,
        bind=lambda params: model.bind(without_numbers(params)),
        layered=layered,
        plain=None,
    )


def _dropped(
    layered: LayeredModel, path: str, schedule: Schedule, seed: int
) -> LayeredModel:
    def context(shared: Params, batch: Any, key: Key) -> tuple:
        # Integers carry tangents through custom gradients; no gradient may enter here.
        step = jax.lax.stop_gradient(shared[STEP].astype(jnp.float32))
        return step.astype(jnp.int32), layered.context(shared, batch, key)

    def layer(params: Params, x: Any, key: Key, context: tuple) -> Any:
        step, rest = context
        weights = {p: w for p, w in params.items() if p != path}
        if key is None:
            return layered.layer(weights, x, key, rest)
        number = params[path]
        keep = keep_probability(schedule, step, number, layered.depth)

        def run(x: Any) -> Any:
            y = layered.layer(weights, x, key, rest)
            return jax.tree.map(lambda a, b: _scaled(a, b, keep), x, y)

        on = runs(schedule, step, number, layered.depth, seed)
        return jax.lax.cond(on, run, lambda x: x, x)

    return dataclasses.replace(layered, context=context, layer=layer)


def _scaled(x: Array, y: Array, keep: Array) -> Array:
    """The change from x to y over the probability, and y itself where it is 1."""
    grown = x + (y - x) / keep.astype(x.dtype)
    return jnp.where(keep == 1, y, grown)
