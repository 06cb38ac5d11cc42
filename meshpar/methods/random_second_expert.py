"""GShard's top-2 gating with a random second expert.

Every token goes to its best expert. Its second goes along with probability 2 g2, where
g1 + g2 = 1 are the normalized gates of the two: a second expert of little weight is
mostly left out, and saves a slot. An expert takes at most `capacity` tokens of a group,
first choices before second ones, in the order of the tokens.

Source: Lepikhin et al., GShard, ICLR 2021, arXiv:2006.16668, section 2.2 and
  algorithm 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshpar.arrays import Array
from meshpar.errors import MeshparError


class Gating(NamedTuple):
    """Where the tokens of a group go.

    Attributes:
      combine: float32 [T, E, C], the weight of what expert E computes in slot C, for
        token T; 0 where the token is not.
      balance: the auxiliary loss, mean over experts of (share of the tokens whose first
        choice it is) times (mean gate).
    """

    combine: Array
    balance: Array

    @property
    def dispatch(self) -> Array:
        """Whether slot C of expert E has token T, [T, E, C]."""
        return self.combine > 0


def gating(logits_TE: Array, capacity: int, key: Array | None = None) -> Gating:
    """Gates of the tokens of one group, in float32.

    Args:
      logits_TE: scores of the router.
      capacity: most tokens of an expert.
      key: random key of the second experts; None takes every second expert, as in
        evaluation.

    Raises:
      MeshparError: fewer than two experts, or no capacity.
    """
    num_tokens, num_experts = logits_TE.shape
    if num_experts < 2 or capacity < 1:
        raise MeshparError(
            f"{num_experts} experts, capacity={capacity}: use at least 2 experts and 1 "
            "slot"
        )
    gates_TE = jax.nn.softmax(logits_TE.astype(jnp.float32))
    best_TX, experts_TX = jax.lax.top_k(gates_TE, 2)
    weights_TX = best_TX / best_TX.sum(axis=-1, keepdims=True)
    goes_TX = jnp.ones((num_tokens, 2), bool)
    if key is not None:
        draws_T = jax.random.uniform(key, (num_tokens,))
        goes_TX = goes_TX.at[:, 1].set(2 * weights_TX[:, 1] > draws_T)
    first_TE, second_TE = (
        jax.nn.one_hot(experts_TX[:, x], num_experts) * goes_TX[:, x, None]
        for x in range(2)
    )
    before_TE = jnp.cumsum(first_TE, axis=0) - first_TE
    taken_E = jnp.minimum(first_TE.sum(axis=0), capacity)
    after_TE = jnp.cumsum(second_TE, axis=0) - second_TE + taken_E[None]
    combine_TEC = sum(
        weights_TX[:, x, None, None] * _slots(chosen_TE, places_TE, capacity)
        for x, (chosen_TE, places_TE) in enumerate(
            ((first_TE, before_TE), (second_TE, after_TE))
        )
    )
    balance = jnp.mean(first_TE.mean(axis=0) * gates_TE.mean(axis=0))
    return Gating(combine_TEC, balance)


def _slots(chosen_TE: Array, places_TE: Array, capacity: int) -> Array:
    """1 in the slot of each chosen expert [T, E, C]; beyond the last there is none."""
    slots_TEC = jax.nn.one_hot(places_TE.astype(jnp.int32), capacity)
    return chosen_TE[..., None] * slots_TEC
