"""Training as a script without any toolkit does it: jax, optax and a loop."""

import jax
import numpy as np
import optax


def train(loss_fn, params, state, optimizer, batches):
    """Trains on one device; returns the losses, the last parameters and state.

    `loss_fn(params, state, batch)` is (scalar, state) for pytrees params and state.
    """
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params, state, opt_state, batch):
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = gradient(params, state, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    losses = []
    for batch in batches:
        params, state, opt_state, loss = train_step(params, state, opt_state, batch)
        losses.append(float(loss))
    return np.array(losses), params, state
