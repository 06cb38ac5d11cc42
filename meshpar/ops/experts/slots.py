"""Slots of capacity routing: the place of each choice in the queue of its expert.

A group is a sequence, or a part of it, and its queue follows the order of positions, so
that the tokens that find no slot are the same on every layout.

Source: Lepikhin et al., GShard, arXiv:2006.16668, section 2.2 and algorithm 1.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.arrays import Array
from meshpar.contracts.purposes import purpose
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.remat import EXPERT_ROWS
from meshpar.layouts.scope import Scope, current_scope
from meshpar.layouts.token_order import device_order, in_natural_order
from meshpar.ops.context.positions import positions
from meshpar.ops.experts.config import MixtureConfig


class Slots(NamedTuple):
    """The slots of one device's choices, numbered by expert.

    Attributes:
      slot: [B*L*X] the slot of each choice; `num_slots` for none.
      num_slots: slots of all experts.
    """

    slot: Array
    num_slots: int


def slots_of(experts_BLX: Array, config: MixtureConfig) -> Slots:
    """The slots of this device's choices.

    A group gives its first choices before any second one, and earlier tokens before
    later ones. Communication: none, unless `context` splits the length and devices hold
    parts of groups; then one all_gather of the experts of all tokens, int32.

    Args:
      experts_BLX: the experts of each token of this device.
      config: of the mixture.

    Raises:
      MeshparError: a sequence does not divide into groups.
    """
    batch, length, _ = experts_BLX.shape
    scope = current_scope()
    if scope is None or CONTEXT not in scope.manual_axes:
        return _of_groups(experts_BLX, config, length)
    whole, num_experts = length * scope.mesh.shape[CONTEXT], config.num_experts
    group, capacity = config.tokens_per_group(whole), config.capacity(whole)
    if _holds_whole_groups(scope, length, group):
        return _of_groups(experts_BLX, config, whole)
    place_BLX = _places(_of_whole_sequences(experts_BLX, scope), group, num_experts)
    is_kept_BLX = place_BLX[:, positions(length)] < capacity
    # An expert keeps no more choices than these of a device's tokens in a sequence.
    capacity = min(length, whole // group * capacity)
    chosen, is_kept = (x.reshape(batch, -1) for x in (experts_BLX, is_kept_BLX))
    place = jnp.where(is_kept, _queue(chosen, is_kept, num_experts), capacity)
    return _numbered(chosen, place, capacity, num_experts)


def _of_groups(experts_BLX: Array, config: MixtureConfig, length: int) -> Slots:
    """The slots of whole groups of sequences of `length` tokens."""
    group, num_experts = config.tokens_per_group(length), config.num_experts
    place_BLX = _places(experts_BLX, group, num_experts)
    choices = group * config.experts_per_token
    chosen, place = (x.reshape(-1, choices) for x in (experts_BLX, place_BLX))
    return _numbered(chosen, place, config.capacity(length), num_experts)


def _numbered(chosen: Array, place: Array, capacity: int, num_experts: int) -> Slots:
    """Slots by expert, group and place, from [groups, choices]."""
    num_groups = len(chosen)
    first = (chosen * num_groups + jnp.arange(num_groups)[:, None]) * capacity
    num_slots = num_experts * num_groups * capacity
    slot = jnp.where(place < capacity, first + place, num_slots)
    return Slots(slot.reshape(-1), num_slots)


def _places(experts_BLX: Array, group: int, num_experts: int) -> Array:
    """The place of every choice in the queue of its expert and group, [B, L, X]."""
    per_token = experts_BLX.shape[2]
    chosen = experts_BLX.reshape(-1, group, per_token).swapaxes(1, 2)
    chosen = chosen.reshape(len(chosen), -1)
    place = _queue(chosen, jnp.ones_like(chosen, bool), num_experts)
    place = place.reshape(-1, per_token, group).swapaxes(1, 2)
    return place.reshape(experts_BLX.shape)


def _queue(chosen: Array, counts: Array, num_experts: int) -> Array:
    """The number of counted choices before each choice in its expert's queue.

    Args:
      chosen: [groups, choices] experts.
      counts: whether each choice counts.
      num_experts: number of experts.
    """
    is_chosen = chosen[..., None] == jnp.arange(num_experts)[None, None]
    is_chosen = (is_chosen & counts[..., None]).astype(int)
    before = jnp.cumsum(is_chosen, axis=1) - is_chosen
    return jnp.take_along_axis(before, chosen[..., None], axis=2)[..., 0]


def _holds_whole_groups(scope: Scope, length: int, group: int) -> bool:
    """Whether each device's `length` tokens are whole groups, in order of positions."""
    if length % group:
        return False
    num = scope.mesh.shape[CONTEXT]
    held = device_order(scope.layout.token_order, num * length, num).reshape(-1, group)
    return np.array_equal(held, held[:, :1] // group * group + np.arange(group)[None])


def _of_whole_sequences(x_BLX: Array, scope: Scope) -> Array:
    """The rows of all tokens of the sequences, in order of their positions."""
    num, why = scope.mesh.shape[CONTEXT], "experts of the tokens of whole sequences"
    with purpose(why):
        gathered = lax.all_gather(x_BLX, CONTEXT, axis=1, tiled=True)
    gathered = in_natural_order(gathered, scope.layout.token_order, num, 1)
    return checkpoint_name(gathered, EXPERT_ROWS)
