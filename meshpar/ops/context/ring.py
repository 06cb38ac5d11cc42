"""Ring attention: keys and values travel around the devices, block by block.

No device holds more keys than its own and those in transit. The whole ring is one
function with a gradient of its own: the backward pass runs the ring again with the
output and the float32 log-sum-exp of all blocks together. In zigzag order every device
skips the half of each block that none of its queries sees.

Source: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, vary
from meshpar.contracts.purposes import gathers, purpose
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.remat import ATTENTION
from meshpar.ops.context.blocks import (
    Outer,
    Sums,
    block_gradients,
    no_blocks,
    with_block,
)
from meshpar.ops.context.exchange import (
    num_ranks,
    on_devices,
    scope_in_use,
    spec_of,
    whole_segments,
    widened,
)
from meshpar.ops.context.ulysses import join_heads, split_heads
from meshpar.ops.context.visits import Places, put


def ring_attention(
    q_BLNH: Array, k_BLKH: Array, v_BLKH: Array, segments_BL: Array | None, window: int
) -> Array:
    """Causal attention of this device's queries to the keys that come by.

    Communication, on a ring of n devices: n-1 permutes of this device's keys and
    values, as many in the backward pass, and n of the float32 sums of their gradients.
    With `context_heads` neighbours exchange heads first, as in `ulysses_attention`.

    Args:
      q_BLNH: queries of this device's tokens, any float dtype.
      k_BLKH: their keys.
      v_BLKH: their values.
      segments_BL: numbers of their documents, or None.
      window: as in `is_seen`.

    Source: Fang and Zhao, USP, arXiv:2405.07719, section 3 (rings of neighbours).
    """
    layout, others = scope_in_use().layout, ()
    heads = layout.context_heads
    if segments_BL is not None:
        others = (whole_segments(segments_BL),)
    places = Places(num_ranks() // heads, heads, layout.token_order)
    ring = _Ring(places, window)
    q_BLNH, kv = split_heads(q_BLNH, k_BLKH, v_BLKH, heads)
    y_BLNH = _attend(ring, q_BLNH, kv, *others)
    return join_heads(y_BLNH, heads)


_AROUND = "keys and values around the ring"
_BACK = "gradients of keys and values around the ring"


def _attend(ring: "_Ring", q_BLNH: Array, kv: Array, *segments: Array) -> Array:
    """The ring as one differentiable function, on the shards of each device."""
    q_spec, kv_spec = spec_of(q_BLNH), spec_of(kv)
    lse_spec, more = PartitionSpec(*q_spec[:3]), tuple(map(spec_of, segments))
    forward = on_devices(ring.forward, (q_spec, kv_spec, *more), (q_spec, lse_spec))
    backward = on_devices(
        ring.backward, (*[q_spec] * 3, lse_spec, kv_spec, *more), (q_spec, kv_spec)
    )

    @jax.custom_vjp
    def run(q_BLNH: Array, kv: Array, *segments: Array) -> Array:
        return forward(q_BLNH, kv, *segments)[0]

    def saved(q_BLNH: Array, kv: Array, *segments: Array) -> tuple[Array, tuple]:
        results = forward(q_BLNH, kv, *segments)
        y_BLNH, lse_BLN = (checkpoint_name(x, ATTENTION) for x in results)
        return y_BLNH, (q_BLNH, y_BLNH, lse_BLN, kv, *segments)

    def gradients(saved: tuple, dy_BLNH: Array) -> tuple:
        q_BLNH, *rest = saved
        return *backward(q_BLNH, dy_BLNH, *rest), *[None] * len(segments)

    run.defvjp(saved, gradients)
    return run(q_BLNH, kv, *segments)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The two passes around the ring, on the shards of one device.

    Attributes:
      places: those of the ring.
      window: as in `is_seen`.
    """

    places: Places
    window: int

    def forward(
        self, q_BLNH: Array, kv: Array, *segments: Array
    ) -> tuple[Array, Array]:
        """(outputs, float32 log-sum-exp of all scores) of this device's queries."""
        places = self.places
        q, kv = places.arranged(_grouped(q_BLNH, kv), 1), places.arranged(kv, 2)

        def add_block(sums: Sums, kv: Array, hops: Any) -> Sums:
            visit = places.visit(hops, kv.shape[2], segments, self.window)

            def add(sums: Sums, at: Array) -> Sums:
                own = Sums(*(visit.queries_at(at, x) for x in sums))
                k, seen = visit.keys_at(at, kv), visit.seen_at(at)
                new = with_block(own, visit.queries_at(at, q), k, seen)
                pairs = zip(sums, new, strict=True)
                return Sums(*(put(x, y, at[0], 1) for x, y in pairs))

            return visit.over_pairs(add, sums)

        def step(carry: tuple[Sums, Array], hops: Array) -> Any:
            sums, kv = carry
            coming = self._sent(kv, _AROUND)  # First, to travel beside the block.
            return (add_block(sums, kv, hops), coming), None

        coming = self._sent(kv, _AROUND)
        sums = add_block(_varying(no_blocks(q), q, kv), kv, 0)
        (sums, kv), _ = lax.scan(step, (sums, coming), jnp.arange(1, places.num - 1))
        y, lse = (places.as_given(x, 1) for x in add_block(sums, kv, places.num - 1))
        lse_BLN = lse.reshape(q_BLNH.shape[:3])
        return y.astype(q_BLNH.dtype).reshape(q_BLNH.shape), lse_BLN

    def backward(
        self,
        q_BLNH: Array,
        dy_BLNH: Array,
        y_BLNH: Array,
        lse_BLN: Array,
        kv: Array,
        *segments: Array,
    ) -> tuple[Array, Array]:
        """Gradients of (queries, keys and values); sums of the latter travel along."""
        places = self.places
        grouped = (_grouped(x, kv) for x in (q_BLNH, dy_BLNH, y_BLNH))
        q, dy, y = (places.arranged(x, 1) for x in grouped)
        lse = places.arranged(_grouped(lse_BLN[..., None], kv)[..., 0], 1)
        delta = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
        outer, dtype = Outer(lse, dy.astype(kv.dtype), delta), kv.dtype
        kv = places.arranged(kv, 2)

        def add_block(grads: tuple[Array, Array], kv: Array, hops: Any) -> Any:
            visit = places.visit(hops, kv.shape[2], segments, self.window)

            def add(grads: tuple[Array, Array], at: Array) -> Any:
                own = Outer(*(visit.queries_at(at, x) for x in outer))
                k, seen = visit.keys_at(at, kv), visit.seen_at(at)
                new = block_gradients(visit.queries_at(at, q), k, seen, own)
                dq = put(grads[0], visit.queries_at(at, grads[0]) + new[0], at[0], 1)
                dkv = put(grads[1], visit.keys_at(at, grads[1]) + new[1], at[1], 2)
                return dq, dkv

            return visit.over_pairs(add, grads)

        def step(carry: tuple[Array, Array, Array], hops: Any) -> Any:
            *grads, kv = carry
            # A compiler may merge hops with those of a forward pass that runs again.
            with gathers():
                coming = self._sent(kv, f"{_AROUND}, again")
            dq, dkv = add_block(tuple(grads), kv, hops)
            return (dq, self._sent(dkv, _BACK), coming), None

        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (q, kv))
        carry, _ = step((*_varying(tuple(zeros), q, kv), kv), 0)
        (*grads, kv), _ = lax.scan(step, carry, jnp.arange(1, places.num - 1))
        dq, dkv = add_block(tuple(grads), kv, places.num - 1)
        dq = places.as_given(dq, 1).astype(q_BLNH.dtype).reshape(q_BLNH.shape)
        dkv = self._sent(dkv, _BACK)  # The last hop leads home.
        return dq, places.as_given(dkv, 2).astype(dtype)

    def _sent(self, x: Array, why: str) -> Array:
        """Sends to the next place; the last one sends to the first."""
        num, heads = self.places.num_ranks, self.places.heads
        pairs = [(rank, (rank + heads) % num) for rank in range(num)]
        with purpose(why, ""):
            return lax.ppermute(widened(x), CONTEXT, pairs).astype(x.dtype)


def _grouped(x_BLNH: Array, kv: Array) -> Array:
    """Queries by the head of keys that they share: [B, L, K, G, H]."""
    batch, length, _, head_dim = x_BLNH.shape
    return x_BLNH.reshape(batch, length, kv.shape[3], -1, head_dim)


def _varying(tree: Any, *like: Array) -> Any:
    """Arrays that vary over the axes over which others do."""
    axes = set().union(*(jax.typeof(x).manual_axis_type.varying for x in like))
    return jax.tree.map(lambda x: vary(x, tuple(axes)), tree)
