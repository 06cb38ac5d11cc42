"""Training as a script without any toolkit does it: jax, optax and a loop."""

import jax
import numpy as np
import optax


def train(loss_fn, params, optimizer, batches):
    """Trains on one device; returns the losses and the last parameters.

    `loss_fn(params, batch)` is a scalar, `params` any pytree.
    """
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))
    return np.array(losses), params
