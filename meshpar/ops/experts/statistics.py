"""Statistics of a mixture of experts: balancing losses, and dropped tokens.

Counts and scores are summed over all tokens of a batch, on all devices, before they are
multiplied: a mean of products of local means would change with the layout.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, vary
from meshpar.contracts.purposes import purpose
from meshpar.ops.experts.router import Routing

DEVICE_LOAD = "experts_device_load"
"""Name of the metric of `Statistics.device_load`; it differs between layouts."""


class Statistics(NamedTuple):
    """Statistics of all tokens of one microbatch; float32, the same on all devices.

    Layers hand them on beside their activations, `packed`: a pipeline sends one array,
    and no compiler leaves out the gradients of some.

    Attributes:
      balance: GShard's auxiliary loss, 1 if all experts have equal loads.
      z: mean square of the log of the sum of exponentials of the router's logits.
      dropped: share of the choices that found no slot.
      overflow: share of the choices beyond the bound of an exchange.
      bias: 0, whose gradient by the bias of the router is the load of each expert; part
        of the loss where `balanced` trains one.
      load: of the most loaded expert, as a multiple of an even share.
      device_load: of the most loaded device along `expert`, as a multiple of an even
        share; it differs between layouts.

    Source: Lepikhin et al., GShard, arXiv:2006.16668, section 2.2; Zoph et al., ST-MoE,
      arXiv:2202.08906, section 3 (z-loss).
    """

    balance: Array
    z: Array
    dropped: Array
    overflow: Array
    bias: Array
    load: Array
    device_load: Array

    @classmethod
    def unpacked(cls, packed: Array) -> "Statistics":
        """The inverse of `packed`."""
        return cls(*packed)

    @property
    def packed(self) -> Array:
        """One array [7]; zeros are the statistics of no mixture."""
        return jnp.stack(self)

    def after(self, earlier: Array) -> Array:
        """This mixture and earlier ones, packed: sums, and the largest loads."""
        before = Statistics.unpacked(earlier)
        sums = Statistics(*map(jnp.add, self, before))
        # The largest loads have no gradients. Otherwise zeros would be computed, and
        # the loads a second time for them.
        now, before = lax.stop_gradient((self, before))
        largest = {
            name: jnp.maximum(getattr(now, name), getattr(before, name))
            for name in ("load", "device_load")
        }
        return sums._replace(**largest).packed


class Lost(NamedTuple):
    """Choices of one device's tokens that were lost.

    Attributes:
      dropped: those that found no slot.
      overflow: those beyond the bound of an exchange.
    """

    dropped: Array
    overflow: Array


def statistics_of(
    routing: Routing,
    lost: Lost,
    axes: tuple[str, ...] = (),
    ways: int = 1,
    varies: bool = False,
) -> tuple[Statistics, Array]:
    """(statistics of all devices' tokens, choices of each expert, float32 [E]).

    Communication: one all_reduce of 2 E + 3 numbers.

    Args:
      routing: of this device's tokens.
      lost: the choices of this device's tokens that were lost.
      axes: manual axes that split the tokens.
      ways: devices that share the experts.
      varies: whether to mark the results as differing along `axes`.
    """
    num_experts, per_token = routing.shares.shape[-1], routing.experts.shape[-1]
    is_chosen = jax.nn.one_hot(routing.experts, num_experts, dtype=jnp.float32)
    counts_E = jnp.sum(is_chosen, axis=(0, 1, 2))
    z_BL = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
    sums = jnp.concatenate(
        [
            counts_E,
            jnp.sum(routing.shares, axis=(0, 1)),
            jnp.stack([jnp.sum(z_BL), *(x.astype(jnp.float32) for x in lost)]),
        ]
    )
    tokens = routing.experts.shape[0] * routing.experts.shape[1]
    if axes:
        tokens *= lax.axis_size(axes)
        with purpose("statistics of experts"):
            sums = lax.psum(sums, axes)
            sums = vary(sums, axes) if varies else sums
    counts_E, shares_E, rest = jnp.split(sums, [num_experts, 2 * num_experts])
    counts_E = lax.stop_gradient(counts_E)
    loads_E = counts_E / (tokens * per_token)
    dropped, overflow = lax.stop_gradient(rest[1:]) / (tokens * per_token)
    balance = num_experts * jnp.sum(loads_E * (shares_E / tokens))
    load = num_experts * jnp.max(loads_E)
    device_load = ways * jnp.max(jnp.sum(loads_E.reshape(ways, -1), axis=1))
    statistics = Statistics(
        balance,
        rest[0] / tokens,
        dropped,
        overflow,
        jnp.zeros_like(load),
        load,
        device_load,
    )
    return statistics, counts_E
