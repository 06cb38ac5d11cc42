"""Capacity drops the same choices however `context` splits the sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshpar
from meshpar import layouts
from meshpar.ops.experts import MixtureConfig, slots

B, L, E, X, N = 2, 32, 4, 2, 4
PART = L // N


def contiguous(rank):
    return rank * PART + np.arange(PART)


def striped(rank):
    return rank + N * np.arange(PART)


def zigzag(rank):
    """The device's part from the front, and its part from the back."""
    half = PART // 2
    return np.concatenate(
        [n * half + np.arange(half) for n in (rank, 2 * N - 1 - rank)]
    )


def chosen():
    """Experts of every token; the first one is liked best."""
    scores = jax.random.normal(jax.random.key(0), (B, L, E))
    scores -= jnp.arange(E)[None, None] / 2
    return jax.lax.top_k(scores, X)[1]


def kept(experts_BLX, config):
    slot, num_slots = slots.slots_of(experts_BLX, config)
    return np.asarray(slot < num_slots).reshape(B, L, X)


@pytest.mark.parametrize(
    ("positions", "group", "gathers"),
    [(contiguous, 0, True), (striped, 0, True), (zigzag, 0, True), (zigzag, 8, True)]
    + [(contiguous, 4, False), (contiguous, 8, False), (zigzag, 4, False)],
)
def test_context_drops_no_other_choices(monkeypatch, positions, group, gathers):
    order = np.stack([positions(rank) for rank in range(N)])
    monkeypatch.setattr(slots, "positions_on", lambda rank, _: jnp.asarray(order)[rank])
    own = lambda _: jnp.asarray(order)[jax.lax.axis_index("context")]  # noqa: E731
    monkeypatch.setattr(slots, "positions", own)
    config = MixtureConfig(E, X, capacity_factor=0.5, group=group)
    layout = layouts.parse(f"context={N}")
    mesh = meshpar.make_mesh(layout, jax.devices()[:N])
    sizes, moves = [], []

    def on_device(experts_BLX):
        with layouts.use(layout, mesh, ["context"]) as scope:
            slot, num_slots = slots.slots_of(experts_BLX, config)
        sizes.append(num_slots)
        moves.extend(scope.moves)
        return slot.reshape(B, PART, X)

    spec = PartitionSpec(None, "context")
    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec))
    slot = np.asarray(run(chosen()[:, order.reshape(-1)]))
    want = kept(chosen(), config)
    np.testing.assert_array_equal(slot < sizes[0], want[:, order.reshape(-1)])
    assert 0 < want.sum() < want.size
    for part in np.split(slot, N, axis=1):
        used = part[part < sizes[0]]
        assert len(used) == len(set(used))
    payloads = [move.payload_bytes for move in moves]
    assert payloads == ([4 * B * L * X] if gathers else [])
