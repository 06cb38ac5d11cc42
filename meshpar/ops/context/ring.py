"""Ring attention: keys and values travel around the devices, block by block.

No device holds more keys than its own and those in transit. The whole ring is one
function with a gradient of its own: the backward pass runs the ring again with the
output and the float32 log-sum-exp of all blocks together.

Source: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array
from meshpar.collectives.varying import vary
from meshpar.layouts.axes import CONTEXT
from meshpar.ops.context.exchange import (
    num_ranks,
    on_devices,
    record,
    scope_in_use,
    spec_of,
    widened,
)
from meshpar.ops.context.positions import positions_on

_MASKED = -1e30
"""Score of a key that is not seen; finite, as blocks may have no other."""


def ring_attention(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    """Causal attention of this device's queries to the keys that come by.

    Communication: n-1 permutes of this device's keys and values, as many in the
    backward pass, and n of the float32 sums of their gradients.

    Args:
      q_BLNH: queries of this device's tokens, any float dtype.
      k_BLKH: their keys.
      v_BLKH: their values.
    """
    kv, num = jnp.stack([k_BLKH, v_BLKH]), num_ranks()
    why = "keys and values around the ring"
    hops = dict(times=num - 1, has_gradient=False)
    record("permute", widened(kv), why, **hops)
    # A pipeline runs a stage again in its backward pass; the compiler may run one ring
    # for both.
    twice = scope_in_use().layout.pipe > 1
    again = dict(in_backward=True, bound=twice)
    record("permute", widened(kv), f"{why}, again", **hops, **again)
    sums = kv.astype(jnp.float32)
    why = "gradients of keys and values around the ring"
    record("permute", sums, why, times=num, in_backward=True)
    q_spec, kv_spec = spec_of(q_BLNH), spec_of(kv)
    lse_spec = PartitionSpec(*q_spec[:3])
    forward = on_devices(_forward, (q_spec, kv_spec), (q_spec, lse_spec))
    backward = on_devices(
        _backward, (q_spec, kv_spec, q_spec, lse_spec, q_spec), (q_spec, kv_spec)
    )

    @jax.custom_vjp
    def ring(q_BLNH: Array, kv: Array) -> Array:
        return forward(q_BLNH, kv)[0]

    def saved(q_BLNH: Array, kv: Array) -> tuple[Array, tuple[Array, ...]]:
        y_BLNH, lse_BLN = forward(q_BLNH, kv)
        return y_BLNH, (q_BLNH, kv, y_BLNH, lse_BLN)

    ring.defvjp(saved, lambda saved, dy_BLNH: backward(*saved, dy_BLNH))
    return ring(q_BLNH, kv)


def _forward(q_BLNH: Array, kv: Array) -> tuple[Array, Array]:
    """(outputs, float32 log-sum-exp of all scores) of this device's queries."""
    q, num = _grouped(q_BLNH, kv), lax.axis_size(CONTEXT)
    *dims, head_dim = q.shape
    empty = _filled((*dims, head_dim), 0.0, kv), _filled(dims, _MASKED, kv)

    def add_block(sums: tuple[Array, Array], kv: Array, hops: Any) -> Any:
        y, lse = sums
        s = _scores(q, kv[0], hops)
        block_lse = jax.nn.logsumexp(s, axis=-1)
        both = jnp.logaddexp(lse, block_lse)
        weights = jnp.exp(s - both[..., None])
        new = jnp.einsum("BLKGM,BMKH->BLKGH", weights, kv[1].astype(jnp.float32))
        return y * jnp.exp(lse - both)[..., None] + new, both

    def step(carry: Any, hops: Array) -> Any:
        sums, kv = carry
        coming = _hop(kv)  # Sent first, to travel beside the block.
        return (add_block(sums, kv, hops), coming), None

    (sums, kv), _ = lax.scan(step, (empty, kv), jnp.arange(num - 1))
    y, lse = add_block(sums, kv, num - 1)
    lse_BLN = lse.reshape(q_BLNH.shape[:3])
    return y.astype(q_BLNH.dtype).reshape(q_BLNH.shape), lse_BLN


def _backward(
    q_BLNH: Array, kv: Array, y_BLNH: Array, lse_BLN: Array, dy_BLNH: Array
) -> tuple[Array, Array]:
    """Gradients of (queries, keys and values); sums of the latter travel along."""
    q, num = _grouped(q_BLNH, kv), lax.axis_size(CONTEXT)
    dy = _grouped(dy_BLNH, kv).astype(jnp.float32)
    y = _grouped(y_BLNH, kv).astype(jnp.float32)
    lse, delta = lse_BLN.reshape(q.shape[:-1]), jnp.sum(dy * y, axis=-1)

    def block(kv: Array, hops: Any) -> tuple[Array, Array]:
        k, v = kv.astype(jnp.float32)
        weights = jnp.exp(_scores(q, kv[0], hops) - lse[..., None])
        dv = jnp.einsum("BLKGM,BLKGH->BMKH", weights, dy)
        ds = weights * (jnp.einsum("BLKGH,BMKH->BLKGM", dy, v) - delta[..., None])
        ds *= q.shape[-1] ** -0.5
        dq = jnp.einsum("BLKGM,BMKH->BLKGH", ds, k)
        dk = jnp.einsum("BLKGM,BLKGH->BMKH", ds, q.astype(jnp.float32))
        return dq, jnp.stack([dk, dv])

    def step(carry: Any, hops: Array) -> Any:
        dq, dkv, kv = carry
        coming = _hop(kv)
        new_dq, new_dkv = block(kv, hops)
        return (dq + new_dq, _hop(dkv + new_dkv), coming), None

    zeros = (_filled(x.shape, 0.0, kv) for x in (q, kv))
    (dq, dkv, kv), _ = lax.scan(step, (*zeros, kv), jnp.arange(num - 1))
    new_dq, new_dkv = block(kv, num - 1)
    dq, dkv = dq + new_dq, _hop(dkv + new_dkv)  # The last hop leads home.
    return dq.reshape(q_BLNH.shape).astype(q_BLNH.dtype), dkv.astype(kv.dtype)


def _grouped(x_BLNH: Array, kv: Array) -> Array:
    """Queries by the head of keys that they share: [B, L, K, G, H]."""
    batch, length, _, head_dim = x_BLNH.shape
    return x_BLNH.reshape(batch, length, kv.shape[3], -1, head_dim)


def _filled(shape: tuple[int, ...], number: float, like: Array) -> Array:
    """A float32 array that varies over the axes over which another one does."""
    axes = jax.typeof(like).manual_axis_type.varying
    return vary(jnp.full(shape, number, jnp.float32), tuple(axes))


def _scores(q: Array, k: Array, hops: Any) -> Array:
    """Masked float32 scores of the keys that have made so many hops."""
    rank, num, length = lax.axis_index(CONTEXT), lax.axis_size(CONTEXT), k.shape[1]
    queries = positions_on(rank, length)
    keys = positions_on((rank - hops) % num, length)
    s = jnp.einsum("BLKGH,BMKH->BLKGM", q, k, preferred_element_type=jnp.float32)
    is_seen_LM = queries[:, None] >= keys[None]
    s *= q.shape[-1] ** -0.5
    return jnp.where(is_seen_LM[None, :, None, None], s, _MASKED)


def _hop(x: Array) -> Array:
    """Sends to the next device; the last one sends to the first."""
    num = lax.axis_size(CONTEXT)
    pairs = [(rank, (rank + 1) % num) for rank in range(num)]
    return lax.ppermute(widened(x), CONTEXT, pairs).astype(x.dtype)
