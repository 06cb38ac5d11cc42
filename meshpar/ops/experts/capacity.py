"""Capacity routing: every expert has a number of slots for each group of tokens.

Source: Lepikhin et al., GShard, arXiv:2006.16668, section 2.2.
"""

from collections.abc import Callable

import jax.numpy as jnp

from meshpar.arrays import Array
from meshpar.ops.experts.config import MixtureConfig
from meshpar.ops.experts.exchange import Exchange
from meshpar.ops.experts.rows import inverse_index, take_rows
from meshpar.ops.experts.slots import slots_of
from meshpar.ops.experts.statistics import Lost

Matmuls = Callable[..., list[Array]]
"""(rows, matrices of each expert, ...) -> rows times the matrices of their experts."""

RunExperts = Callable[[Array, Array, Matmuls], Array]
"""(rows, float32 weight of each, matmuls) -> outputs of the experts times weights."""


def run_with_capacity(
    x_TD: Array,
    experts_BLX: Array,
    weights_TX: Array,
    config: MixtureConfig,
    exchange: Exchange,
    run: RunExperts,
) -> tuple[Array, Lost]:
    """Runs one device's tokens; returns (outputs y[T, D], the lost choices).

    Communication: that of `slots_of`; the slots of all experts go to the experts'
    devices and back, each with (n-1)/n of num_slots * D numbers.

    Args:
      x_TD: tokens, T = B * L.
      experts_BLX: their experts.
      weights_TX: float32 weights of the experts' outputs.
      config: of the mixture.
      exchange: between the devices that share the experts.
      run: runs this device's experts on rows [E / n, slots, D].
    """
    slot, num_slots = slots_of(experts_BLX, config)
    per_token, ways = config.experts_per_token, exchange.ways
    choice = inverse_index(slot, num_slots)
    token = (choice // per_token)[:, None]
    by_token = slot.reshape(-1, per_token)
    rows_SD = take_rows(x_TD, token, by_token)
    weight_S = take_rows(weights_TX.reshape(-1), choice[:, None], slot[:, None])

    def to_experts(x: Array, why: str) -> Array:
        x = exchange.swap(x.reshape(ways, -1, *x.shape[1:]), why)
        parts = x.reshape(ways, config.num_experts // ways, -1, *x.shape[2:])
        return parts.swapaxes(0, 1).reshape(parts.shape[1], -1, *x.shape[2:])

    def to_tokens(x: Array, why: str) -> Array:
        parts = x.reshape(x.shape[0], ways, -1, *x.shape[2:]).swapaxes(0, 1)
        x = exchange.swap(parts, why, is_saved=False)
        return x.reshape(num_slots, *x.shape[3:])

    rows_ESD = to_experts(rows_SD, "rows to their experts")
    weight_ES = to_experts(weight_S, "weights of rows")

    def matmuls(x_ESD: Array, *weights: Array) -> list[Array]:
        return [jnp.einsum("ESD,EDF->ESF", x_ESD, w_EDF) for w_EDF in weights]

    rows_ESD = run(rows_ESD, weight_ES, matmuls)
    rows_SD = to_tokens(rows_ESD, "rows back from their experts")
    lost = Lost(jnp.sum(slot == num_slots), jnp.zeros((), int))
    return take_rows(rows_SD, by_token, token), lost
