"""A plain loop: jax.value_and_grad and optax on one device."""

from collections.abc import Iterator
from typing import Any

import jax
import optax


def losses(loss, params, optimizer, batches):
    """The loss of every step, and the parameters at the end.

    Args:
      loss: (parameters, batch) -> scalar.
      params: a pytree to start from.
      optimizer: an optax transformation.
      batches: one for each step.
    """

    def with_state(params, state, batch, step):
        value = loss(params, batch)
        return value, value, state

    found = list(steps(with_state, params, (), optimizer, batches))
    return [float(value) for value, *_ in found], found[-1][1]


def steps(loss, params, variables, optimizer, batches) -> Iterator[tuple[Any, ...]]:
    """(metrics, parameters, other variables, gradients) of every step.

    Args:
      loss: (parameters, other variables, batch, number of the step) -> (scalar,
        metrics, new variables).
      params: a pytree to start from.
      variables: those that are not trained, to start from.
      optimizer: an optax transformation; it sees the loss as `value`.
      batches: one for each step.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def of_params(params, *rest):
        value, metrics, new = loss(params, *rest)
        return value, (metrics, new)

    @jax.jit
    def run(params, variables, state, batch, step):
        differentiated = jax.value_and_grad(of_params, has_aux=True)
        (value, (metrics, new)), grads = differentiated(params, variables, batch, step)
        updates, state = optimizer.update(grads, state, params, value=value)
        return metrics, optax.apply_updates(params, updates), new, state, grads

    state = jax.jit(optimizer.init)(params)
    for step, batch in enumerate(batches):
        metrics, params, variables, state, grads = run(
            params, variables, state, batch, step
        )
        yield metrics, params, variables, grads
