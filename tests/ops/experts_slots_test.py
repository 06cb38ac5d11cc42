"""Capacity drops the same choices however `context` splits the sequences."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshpar
from meshpar import layouts
from meshpar.contracts.written import written_collectives
from meshpar.layouts.token_order import CONTIGUOUS, STRIPED, ZIGZAG, device_order
from meshpar.ops.experts import MixtureConfig, slots

B, L, E, X, N = 2, 32, 4, 2, 4
PART = L // N


def chosen():
    """Experts of every token; the first one is liked best."""
    scores = np.random.default_rng(0).normal(size=(B, L, E)) - np.arange(E) / 2
    return np.argsort(-scores, axis=-1)[..., :X].astype(np.int32)


def kept(experts_BLX, config):
    @jax.jit
    def is_kept(experts_BLX):
        slot, num_slots = slots.slots_of(experts_BLX, config)
        return slot < num_slots

    return np.asarray(is_kept(experts_BLX)).reshape(B, L, X)


@pytest.mark.parametrize(
    ("order", "group", "gathers"),
    [(CONTIGUOUS, 0, True), (STRIPED, 0, True), (ZIGZAG, 0, True), (ZIGZAG, 8, True)]
    + [(CONTIGUOUS, 4, False), (CONTIGUOUS, 8, False), (ZIGZAG, 4, False)],
)
def test_context_drops_no_other_choices(order, group, gathers):
    places = device_order(order, L, N)
    config = MixtureConfig(E, X, capacity_factor=0.5, group=group)
    layout = layouts.parse(f"context={N},context_order={order}")
    mesh = meshpar.mesh.make_mesh(layout, jax.devices()[:N])
    sizes = []

    def on_device(experts_BLX):
        with layouts.use(layout, mesh, ["context"]):
            slot, num_slots = slots.slots_of(experts_BLX, config)
        sizes.append(num_slots)
        return slot.reshape(B, PART, X)

    spec = PartitionSpec(None, "context")
    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec))
    slot = np.asarray(run(chosen()[:, places]))
    want = kept(chosen(), config)
    np.testing.assert_array_equal(slot < sizes[0], want[:, places])
    assert 0 < want.sum() < want.size
    for part in np.split(slot, N, axis=1):
        used = part[part < sizes[0]]
        assert len(used) == len(set(used))
    written = written_collectives(run.trace(chosen()[:, places]).jaxpr, {"context": N})
    payloads = [found.payload_bytes for found in written]
    assert payloads == ([4 * B * L * X] if gathers else [])
