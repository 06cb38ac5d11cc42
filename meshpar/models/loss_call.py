"""Calls of a user's loss functions, which may also ask for a random key or the step."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.models.layer_stack import HEAD_KEY, Key, fold_key
from meshpar.models.model import STEP, Model
from meshpar.replicated import unmarked

_LOSS_KEY = HEAD_KEY + 1
"""The number that is folded into a batch's key for losses that ask for a key."""


def asks_for(fn: Callable, name: str) -> bool:
    """Whether a function takes an argument of this name, "key" or "step"."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return name in parameters and parameters[name].kind in kinds


def call_loss(fn: Callable, *args: Any, params: Params, key: Key) -> Any:
    """fn(*args), with `key=` and `step=` if it asks for them.

    Args:
      fn: a user's function.
      *args: its positional arguments; the last one is the batch.
      params: the variables of the model, with the number of steps.
      key: random key of the batch; None in evaluation mode.

    Raises:
      MeshparError: it needs a key, and evaluation passes none.
    """
    *args, batch = args
    extra: dict[str, Any] = {}
    if asks_for(fn, "key"):
        extra["key"] = fold_key(key, _LOSS_KEY)
    if asks_for(fn, "step"):
        extra["step"] = params[STEP]
    try:
        return fn(*args, unmarked(batch), **extra)
    except (AttributeError, TypeError, ValueError) as error:
        if key is not None or "key" not in extra or "None" not in str(error):
            raise
        raise MeshparError(
            "the loss needs a random key, and evaluation passes none (key=None): give "
            "an evaluation_loss_fn= that needs none, or draw nothing where key is None "
            f"({type(error).__name__}: {error})"
        ) from error


def with_axis(model: Model, name: str) -> Model:
    """The model, with losses that run under an axis of size 1 called `name`.

    Models that were written for `jax.pmap` average over its axis by name; here one call
    sees all rows.

    Raises:
      MeshparError: the model runs layer by layer.
    """
    if not name:
        return model
    if model.layered is not None:
        raise MeshparError(
            f"axis_name={name!r} is for models whose loss sees the whole batch at "
            "once; leave it out, or do not run the model layer by layer"
        )

    def under_axis(loss: Callable) -> Callable:
        def run(*args: Any) -> Any:
            results = jax.vmap(lambda _: loss(*args), axis_name=name)(jnp.zeros(1))
            return jax.tree.map(lambda x: x[0], results)

        return run

    loss, evaluation_loss = map(under_axis, (model.loss, model.evaluation_loss))
    plain = model.plain
    if plain is not None:
        plain = dataclasses.replace(plain, loss=under_axis(plain.loss))
    return dataclasses.replace(
        model, loss=loss, evaluation_loss=evaluation_loss, plain=plain
    )


def with_arguments(
    model: Model, fns: Sequence[Callable], evaluation_loss_fn: Callable | None
) -> Model:
    """The model with what its loss functions ask for.

    It has the number of steps among its variables if a function has an argument `step`.

    Args:
      model: the model.
      fns: the loss function of training, or the parts of it.
      evaluation_loss_fn: that of evaluation; `fns` by default.

    Raises:
      MeshparError: the model has a variable of that path.
    """
    apart = evaluation_loss_fn is not None
    evaluates = [evaluation_loss_fn] if apart else fns
    asks = any(asks_for(fn, "key") for fn in evaluates)
    model = dataclasses.replace(model, asks_for_key=asks, evaluates_apart=apart)
    if not any(asks_for(fn, "step") for fn in (*fns, *evaluates)):
        return model
    if STEP in model.params:
        raise MeshparError(
            f"the loss asks for the step, which meshpar keeps at the path {STEP!r}, "
            "where the model has a variable; rename that"
        )
    step = Param((), jnp.dtype(jnp.int32), None, trained=False, is_state=True)

    def init(key: Array) -> Params:
        return {**model.init(key), STEP: jnp.zeros((), jnp.int32)}

    return dataclasses.replace(model, params={**model.params, STEP: step}, init=init)
