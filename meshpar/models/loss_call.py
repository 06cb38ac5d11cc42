"""Calls of a user's loss functions, which may also ask for a random key or the step."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.layouts.param import Param
from meshpar.models.layer_stack import Key, fold_key

STEP = "training_step"
"""Path of the number of steps done, for models whose loss asks for it."""

_KEY_NUMBER = 3
"""What the key of loss functions is folded with; parts of a model use 0 to 2."""


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
      *args: its positional arguments.
      params: the variables of the model, with the number of steps.
      key: random key of the batch; None in evaluation mode.
    """
    extra: dict[str, Any] = {}
    if asks_for(fn, "key"):
        extra["key"] = fold_key(key, _KEY_NUMBER)
    if asks_for(fn, "step"):
        extra["step"] = params[STEP]
    return fn(*args, **extra)


def with_step(params: dict[str, Param], *fns: Callable | None) -> dict[str, Param]:
    """Parameters, with the number of steps if one of the functions asks for it.

    Raises:
      ValueError: the model has a variable of that path.
    """
    if not any(asks_for(fn, "step") for fn in fns if fn is not None):
        return params
    if STEP in params:
        raise ValueError(
            f"the loss asks for the step, which meshpar keeps at the path {STEP!r}, "
            "where the model has a variable; rename that"
        )
    step = Param((), jnp.dtype(jnp.int32), None, trained=False, is_state=True)
    return {**params, STEP: step}


def init_with_step(variables: Params, params: dict[str, Param]) -> Params:
    """Fresh variables, with the number of steps if the model has it."""
    if STEP not in params:
        return variables
    return {**variables, STEP: jnp.zeros((), jnp.int32)}


def without_step(variables: Params) -> Params:
    """The variables of the module itself."""
    return {path: x for path, x in variables.items() if path != STEP}


def next_step(params: Params, step: Array) -> Params:
    """The variables after a step; only the number of steps changes.

    Args:
      params: {path: array}.
      step: steps done.
    """
    if STEP not in params:
        return {}
    return {STEP: jax.lax.convert_element_type(step, jnp.int32)}
