"""Server-side updates in numpy, for dense and sparse pushes.

An update is a function (values, state, contribution) that changes values and state in
place; the state starts empty and is replicated and saved with the range. Only the keys
of a sparse push are read and written.

Source: Dean et al., DistBelief, NeurIPS 2012 (Adagrad at the server); Zhang et al.,
  Staleness-aware Async-SGD, arXiv:1511.05950; Zheng et al., Delay-compensated SGD,
  arXiv:1609.08326.
"""

import numpy as np

from meshpar.islands.key_range import Contribution
from meshpar.islands.rules import RefusedError, UpdateFunction


def _slot(pushed: Contribution) -> np.ndarray | slice:
    return slice(None) if pushed.keys is None else pushed.keys


def add(values: np.ndarray, state: dict[str, np.ndarray], pushed: Contribution) -> None:
    """Adds pushes to a range: differences of weights, or steps of an optimizer."""
    del state
    if pushed.keys is None:
        values += pushed.values
    else:
        values[pushed.keys] += pushed.values


def sgd(learning_rate: float, momentum: float = 0.0, nesterov: bool = False):
    """Stochastic gradient descent, with momentum as in `optax.sgd`."""
    rate, decay = np.float32(learning_rate), np.float32(momentum)

    def update(values, state, pushed):
        at, step = _slot(pushed), pushed.values
        if momentum:
            trace = state.setdefault("trace", np.zeros_like(values))
            trace[at] = step + decay * trace[at]
            step = step + decay * trace[at] if nesterov else trace[at]
        values[at] -= rate * step

    return update


def adagrad(learning_rate: float, initial: float = 0.1, eps: float = 1e-7):
    """Adagrad, as `optax.adagrad`: each number's rate falls with its own gradients."""

    def update(values, state, pushed):
        if "squares" not in state:
            state["squares"] = np.full_like(values, initial)
        at, squares = _slot(pushed), state["squares"]
        squares[at] += pushed.values**2
        step = pushed.values / np.sqrt(squares[at] + np.float32(eps))
        values[at] -= np.float32(learning_rate) * step

    return update


def staleness_damped(update: UpdateFunction, power: float = 1.0) -> UpdateFunction:
    """Shrinks a push by (1 + staleness) ** -power before the update.

    The staleness is the number of updates between the worker's read and its push.
    """

    def damped(values, state, pushed):
        share = np.float32((1 + pushed.staleness) ** -power)
        update(values, state, pushed._replace(values=pushed.values * share))

    return damped


def delay_compensated(update: UpdateFunction, strength: float) -> UpdateFunction:
    """Corrects a late gradient to first order: g + strength * g * g * (w - w_read).

    The product g * g stands for the diagonal of the Hessian. The push carries what its
    worker had read (`Payload.read`).
    """

    def compensated(values, state, pushed):
        if pushed.read is None:
            raise RefusedError(
                "delay compensation needs the values that the worker read"
            )
        moved = values[_slot(pushed)] - pushed.read
        gradient = pushed.values
        gradient = gradient + np.float32(strength) * gradient * gradient * moved
        update(values, state, pushed._replace(values=gradient))

    return compensated
