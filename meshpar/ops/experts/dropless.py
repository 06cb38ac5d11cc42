"""Dropless routing: every expert takes all of its tokens, sorted by expert.

The rows of each expert stand one after the other, as `grouped_matmul` wants them.
Compiled programs need buffers of a fixed size. `MixtureConfig.bound` limits the choices
that one device sends to another, and those beyond it are counted; without it buffers
hold the worst case, in which each device chooses the experts of one. A device sends its
tokens to all devices that share the experts, or rows in buffers for each of them where
those are no larger.

Source: Gale et al., MegaBlocks, arXiv:2211.15841, sections 4 and 5.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.layouts.axes import EXPERT
from meshpar.ops.experts.capacity import RunExperts
from meshpar.ops.experts.config import MixtureConfig
from meshpar.ops.experts.exchange import Exchange
from meshpar.ops.experts.grouped_matmul import grouped_matmuls, in_groups
from meshpar.ops.experts.rows import Missing, inverse_index, take_rows
from meshpar.ops.experts.statistics import Lost


class _Sent(NamedTuple):
    """The rows that one device sends: their slots in the buffer, and their counts.

    Attributes:
      slot: [choices] the slot of each in the buffer; `num_slots` for overflow.
      num_slots: n times the most rows that one device sends to another.
      counts: int32 [n, E / n], rows for each expert of each device.
    """

    slot: Array
    num_slots: int
    counts: Array


def _sent(expert: Array, config: MixtureConfig, ways: int) -> _Sent:
    """Sorts choices by expert; `expert` is [choices]."""
    num, most = len(expert), config.most_sent(len(expert), ways)
    order = jnp.argsort(expert, stable=True)
    place = inverse_index(order, num)
    counts_NE = jnp.sum(expert[:, None] == jnp.arange(config.num_experts)[None], axis=0)
    counts_NE = counts_NE.reshape(ways, -1)
    ends_NE = jnp.cumsum(counts_NE, axis=1)
    ends_N = jnp.cumsum(ends_NE[:, -1])
    device = expert // counts_NE.shape[1]
    rank = place - (ends_N - ends_NE[:, -1])[device]
    slot = jnp.where(rank < most, device * most + rank, ways * most)
    sent_NE = jnp.diff(jnp.minimum(ends_NE, most), axis=1, prepend=0)
    return _Sent(slot, ways * most, sent_NE)


class _Received(NamedTuple):
    """The places of the rows that a device's experts receive.

    Attributes:
      place: [slots] the row of each slot of the buffer, or of each choice, among those
        of the experts; `num_rows` for empty slots and experts of other devices.
      num_rows: of all experts, with padding.
      sizes: int32 rows of each expert, with padding.
    """

    place: Array
    num_rows: int
    sizes: Array


def _received(counts_NE: Array, num_slots: int) -> _Received:
    """The places of received rows, from their counts by source and expert."""
    num_experts = counts_NE.shape[1]
    sizes_E, num_rows = in_groups(jnp.sum(counts_NE, axis=0), num_slots)
    start_NE = (jnp.cumsum(sizes_E) - sizes_E)[None]
    start_NE += jnp.cumsum(counts_NE, axis=0) - counts_NE
    ends_NE = jnp.cumsum(counts_NE, axis=1)
    slot = jnp.arange(num_slots // len(counts_NE))
    expert = jnp.sum(slot[None, :, None] >= ends_NE[:, None], axis=2)
    known = jnp.minimum(expert, num_experts - 1)
    first_NE = start_NE - (ends_NE - counts_NE)
    place = slot[None] + jnp.take_along_axis(first_NE, known, axis=1)
    place = jnp.where(expert < num_experts, place, num_rows)
    return _Received(place.reshape(-1), num_rows, sizes_E)


def run_dropless(
    x_TD: Array,
    experts_BLX: Array,
    weights_TX: Array,
    config: MixtureConfig,
    exchange: Exchange,
    run: RunExperts,
) -> tuple[Array, Lost]:
    """Runs one device's tokens; returns (outputs y[T, D], the lost choices).

    Communication: tokens to all devices and outputs back, each (n-1)/n of n * T * D
    numbers; experts and weights of tokens, n * T * X numbers each. Where a bound allows
    at most T choices from one device to another, as in `_run_in_buffers`.

    Args:
      x_TD: tokens, T = B * L.
      experts_BLX: their experts.
      weights_TX: float32 weights of the experts' outputs.
      config: of the mixture.
      exchange: between the devices that share the experts.
      run: runs this device's experts on rows [S, D].
    """
    most = config.most_sent(experts_BLX.size, exchange.ways)
    if config.bound and _fits_buffers(most, len(x_TD)):
        return _run_in_buffers(x_TD, experts_BLX, weights_TX, config, exchange, run)
    per_token, num_local = config.experts_per_token, config.num_experts // exchange.ways
    experts = exchange.gather(experts_BLX.reshape(-1), "experts of tokens", False)
    first = lax.axis_index(EXPERT) * num_local if exchange.ways > 1 else 0
    experts_NC = (experts - first).reshape(exchange.ways, -1)
    experts_NC, overflow = _bounded(experts_NC, num_local, most)
    rows = _rows(experts_NC.reshape(-1), num_local, per_token, exchange.ways * most)
    choice = inverse_index(rows.place, rows.num_rows)[:, None]
    token, by_token = choice // per_token, rows.place.reshape(-1, per_token)

    def matmuls(x_SD: Array, *weights: Array) -> list[Array]:
        return grouped_matmuls(x_SD, weights, rows.sizes)

    x_TD = exchange.gather(x_TD, "tokens to all experts")
    weights = exchange.gather(weights_TX.reshape(-1), "weights of tokens")
    # Empty slots have no weight, and nothing reads what experts make of them.
    has_absent = exchange.ways > 1 or most < len(experts)
    rows_SD = take_rows(x_TD, token, by_token, Missing(False, has_absent))
    weight_S = take_rows(weights, choice, rows.place[:, None])
    y_SD = run(rows_SD, weight_S, matmuls)
    y_TD = take_rows(y_SD, by_token, token, Missing(has_absent, False))
    y_TD = exchange.scatter(y_TD, "outputs of all experts")
    return y_TD, Lost(overflow, overflow)


def _fits_buffers(most: int, tokens: int) -> bool:
    """Whether buffers for every device move no more rows than the tokens themselves."""
    return most <= tokens


def _bounded(experts_NC: Array, num_experts: int, most: int) -> tuple[Array, Array]:
    """Leaves a device's experts the first `most` choices of each source.

    Args:
      experts_NC: the expert of each choice by source; another device's if out of range.
      num_experts: of this device.
      most: choices from one source that count, in the order of `_sent`.

    Returns:
      (experts, `num_experts` for choices that do not count; number of those beyond the
      bound).
    """
    is_here_NC = (experts_NC >= 0) & (experts_NC < num_experts)
    experts_NC = jnp.where(is_here_NC, experts_NC, num_experts)
    if most >= experts_NC.shape[1]:
        return experts_NC, jnp.zeros((), int)
    rank_NC = jnp.argsort(jnp.argsort(experts_NC, axis=1, stable=True), axis=1)
    overflow = jnp.sum(is_here_NC & (rank_NC >= most))
    return jnp.where(rank_NC < most, experts_NC, num_experts), overflow


def _rows(expert: Array, num_experts: int, per_token: int, most: int) -> _Received:
    """The places of choices among the rows of a device's experts.

    Args:
      expert: [choices] the expert of each; `num_experts` for another device's.
      num_experts: of this device.
      per_token: choices of one token.
      most: most choices of this device's experts.
    """
    is_here = expert < num_experts
    most = min(most, len(expert) // per_token * min(per_token, num_experts))
    rank = inverse_index(jnp.argsort(expert, stable=True), len(expert))
    counts_E = jnp.sum(expert[:, None] == jnp.arange(num_experts)[None], axis=0)
    sizes_E, num_rows = in_groups(counts_E, most)
    moved_E = jnp.cumsum(sizes_E - counts_E) - (sizes_E - counts_E)
    place = rank + moved_E[jnp.minimum(expert, num_experts - 1)]
    return _Received(jnp.where(is_here, place, num_rows), num_rows, sizes_E)


def _run_in_buffers(
    x_TD: Array,
    experts_BLX: Array,
    weights_TX: Array,
    config: MixtureConfig,
    exchange: Exchange,
    run: RunExperts,
) -> tuple[Array, Lost]:
    """`run_dropless` with buffers for the rows of every pair of devices.

    Communication: the buffers go to the experts' devices and back, each with (n-1)/n of
    n * most_sent * D numbers; the counts, E int32.
    """
    ways, per_token = exchange.ways, config.experts_per_token
    sent = _sent(experts_BLX.reshape(-1), config, ways)
    counts_NE = exchange.swap(sent.counts, "counts of rows")
    received = _received(counts_NE, sent.num_slots)
    choice = inverse_index(sent.slot, sent.num_slots)
    token, by_token = (choice // per_token)[:, None], sent.slot.reshape(-1, per_token)
    source = inverse_index(received.place, received.num_rows)[:, None]
    place = received.place[:, None]

    def to_experts(x: Array, why: str) -> Array:
        x = exchange.swap(x.reshape(ways, -1, *x.shape[1:]), why)
        return take_rows(x.reshape(-1, *x.shape[2:]), source, place)

    def to_tokens(x: Array, why: str) -> Array:
        x = take_rows(x, place, source)
        parts = x.reshape(ways, -1, *x.shape[1:])
        return exchange.swap(parts, why, is_saved=False).reshape(x.shape)

    def matmuls(x_SD: Array, *weights: Array) -> list[Array]:
        return grouped_matmuls(x_SD, weights, received.sizes)

    rows_SD = take_rows(x_TD, token, by_token)
    weight_S = take_rows(weights_TX.reshape(-1), choice[:, None], sent.slot[:, None])
    rows_SD = to_experts(rows_SD, "rows to their experts")
    weight_S = to_experts(weight_S, "weights of rows")
    rows_SD = to_tokens(run(rows_SD, weight_S, matmuls), "rows back from their experts")
    overflow = jnp.sum(sent.slot == sent.num_slots)
    return take_rows(rows_SD, by_token, token), Lost(overflow, overflow)
