"""Losses of a plain loop: jax.value_and_grad and optax on one device."""

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

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, found = optimizer.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        found.append(float(value))
    return found, params
