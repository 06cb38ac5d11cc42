"""Transports move tensors as a single collective does, and declare what they move."""

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar import layouts, mesh
from meshpar.collectives import transport
from meshpar.collectives.transport import ONE_SHOT, Rings
from meshpar.contracts import hlo
from meshpar.layouts.axes import DATA, FSDP, TENSOR
from meshpar.mesh import platform
from meshpar.models.model_scope import model_scope

N = 8
ROWS, COLUMNS = 16, 32
tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='the TPU compiler comes with pip install -e ".[aot-tpu]"',
)
TRANSPORTS = {
    "one shot": ONE_SHOT,
    "ring": Rings({FSDP: (8,)}),
    "torus of 2 dims": Rings({FSDP: (2, 4)}),
    "torus of 3 dims": Rings({FSDP: (2, 2, 2)}),
    "ring in a loop": Rings({FSDP: (8,)}, loop=True),
    "rings of another axis": Rings({DATA: (8,)}),
}


def compiled(move, x):
    """The program that applies `move` to the shards of x [N, ...] inside shard_map."""
    devices = jax.make_mesh((N,), (FSDP,), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(FSDP)
    mapped = jax.shard_map(
        lambda x: move(x[0])[None], mesh=devices, in_specs=spec, out_specs=spec
    )
    return jax.jit(mapped).lower(x).compile()


def moved_by(program):
    """(kinds, number of executed collectives, their payload bytes) of a program."""
    collectives = hlo.parse_hlo(program.as_text(), {FSDP: N})
    assert all(c.axes == (FSDP,) for c in collectives)
    return (
        {c.kind for c in collectives},
        sum(c.executions for c in collectives),
        sum(c.payload_bytes * c.executions for c in collectives),
    )


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_equals_its_definition_and_declaration(name, dim):
    moving = TRANSPORTS[name]
    x = np.random.default_rng(0).normal(size=(N, ROWS, COLUMNS)).astype(np.float32)
    program = compiled(lambda x: moving.all_gather(x, (FSDP,), dim), x)
    whole = np.concatenate(list(x), axis=dim)
    np.testing.assert_array_equal(program(x), np.stack([whole] * N))
    declared = moving.declare("all_gather", (FSDP,), N, whole.nbytes)
    kinds, count, payload = moved_by(program)
    assert kinds == {declared.kind}
    assert (count, payload) == (declared.count, declared.payload_bytes)


def scattered(moving, x, dim, by_parts):
    """The reduce_scatter of x, which may be cut into parts where they are added."""
    if not by_parts:
        return moving.reduce_scatter(x, (FSDP,), dim)

    def part(number, size, total):
        length = x.shape[dim] // size
        own = jax.lax.dynamic_slice_in_dim(x, number * length, length, dim)
        return own if total is None else total + own

    return moving.reduce_scatter_of(part, FSDP, dim)


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("by_parts", [False, True])
def test_reduce_scatter_equals_its_definition_and_declaration(name, dim, by_parts):
    moving = TRANSPORTS[name]
    x = np.random.default_rng(0).integers(-9, 9, (N, ROWS, COLUMNS)).astype(np.float32)
    program = compiled(lambda x: scattered(moving, x, dim, by_parts), x)
    want = np.stack(np.split(x.sum(0), N, axis=dim))
    np.testing.assert_array_equal(program(x), want)
    declared = moving.declare("reduce_scatter", (FSDP,), N, x[0].nbytes)
    kinds, count, payload = moved_by(program)
    assert kinds == {declared.kind}
    assert (count, payload) == (declared.count, declared.payload_bytes)


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_rings_declare_the_steps_of_each_ring_and_their_bytes(shape):
    declared = Rings({FSDP: shape}).declare("all_gather", (FSDP,), N, 800)
    assert declared.kind == "permute" and declared.note == "around rings"
    assert declared.count == sum(size - 1 for size in shape)
    assert declared.payload_bytes == 700


def test_rings_cover_their_own_axes_alone():
    rings = Rings({FSDP: (8,)})
    assert rings.covers((FSDP,))
    assert not rings.covers((DATA,)) and not rings.covers((DATA, FSDP))
    assert rings.declare("all_gather", (DATA,), 8, 800) == ("all_gather", 1, 800, "")
    assert not ONE_SHOT.covers((FSDP,))


def test_small_tensors_are_gathered_by_one_collective():
    rings = Rings({FSDP: (8,)})
    assert rings.for_gathers(transport.LARGE_BYTES) is rings
    assert rings.for_gathers(transport.LARGE_BYTES - 1) is ONE_SHOT
    assert ONE_SHOT.for_gathers(2 * transport.LARGE_BYTES) is ONE_SHOT


def chosen(devices=None):
    layout = layouts.parse(f"{FSDP}=8")
    return transport.transports_for(mesh.make_mesh(layout, devices), (DATA, FSDP))


def test_cpus_move_small_floats_as_float32_in_one_collective():
    transports = chosen()
    assert transports == transport.Transports(widens=True, mixes=True)
    assert transports.wire_dtype(jnp.bfloat16) == jnp.float32
    assert transports.wire_dtype(jnp.int8) == jnp.int8
    assert not transport.Transports().widens
    assert transport.Transports().wire_dtype(jnp.bfloat16) == jnp.bfloat16


@tpu
@pytest.mark.parametrize(
    "topology, torus, gathers_around_rings",
    [("v5e:2x4", (4, 2), False), ("v5p:2x2x2", (2, 2, 2), True)],
)
def test_tpus_move_gradients_around_rings(topology, torus, gathers_around_rings):
    """v5e runs an all_gather beside compute; v5p does not, and gathers by rings."""
    transports = chosen(mesh.topology(topology))
    rings = transports.gradients
    assert isinstance(rings, Rings) and not rings.loop
    assert rings.shapes == {DATA: (), FSDP: torus}
    assert transports.prefetched is rings
    assert transports.weights is (rings if gathers_around_rings else ONE_SHOT)
    assert transports.once == Rings(rings.shapes, loop=True)
    assert transports.wire_dtype(jnp.bfloat16) == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_compiler_would_pad_is_scattered_in_halves(rows, monkeypatch):
    """In halves or not, the numbers are the same; several rows are never padded."""
    padding = dataclasses.replace(platform.CPU, pads_scattered_bytes=64)
    monkeypatch.setattr(transport, "traced_platform", lambda: padding)
    shape = N, rows, ROWS, COLUMNS
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    program = compiled(lambda x: ONE_SHOT.reduce_scatter(x, (FSDP,), 1), x)
    want = np.stack(np.split(x.sum(0), N, axis=1))
    np.testing.assert_array_equal(program(x), want)
    stacked = f"f32[2,1,{ROWS},{COLUMNS // 2}]" in program.as_text()
    assert stacked == (rows == 1)


def sent_by_a_scatter(topology, ways, moving, x):
    """(kinds, payload bytes) of the reduce_scatter of x over some of a TPU's chips."""
    layout = layouts.parse(f"data={N // ways},tensor={ways}")
    devices = mesh.make_mesh(layout, mesh.topology(topology))

    def move(x):
        with model_scope(layout, devices):
            return moving(devices).reduce_scatter(jnp.sin(x), (TENSOR,), 1)

    spec = PartitionSpec(DATA)
    mapped = jax.shard_map(
        move, mesh=devices, in_specs=spec, out_specs=PartitionSpec(DATA, TENSOR)
    )
    sharding = NamedSharding(devices, spec)
    x = jax.ShapeDtypeStruct((N // ways, *x.shape[1:]), x.dtype, sharding=sharding)
    text = jax.jit(mapped).lower(x).compile().as_text()
    found = hlo.parse_hlo(text, dict(devices.shape))
    return {c.kind for c in found}, sum(c.payload_bytes * c.executions for c in found)


@tpu
def test_a_large_scatter_of_one_row_moves_no_padding_on_tpus():
    x = jax.ShapeDtypeStruct((1, 2048, 4096), jnp.bfloat16)
    sent = sent_by_a_scatter("v5e:2x4", 2, lambda _: ONE_SHOT, x)
    assert sent == ({"reduce_scatter"}, 2 * math.prod(x.shape))


@tpu
def test_a_scatter_among_all_chips_of_a_torus_is_no_all_reduce():
    def moving(devices):
        return transport.transport_alone(devices, (TENSOR,))

    x = jax.ShapeDtypeStruct((1, 256, 128), jnp.bfloat16)
    size = 2 * math.prod(x.shape)
    sent = sent_by_a_scatter("v5p:2x2x2", N, moving, x)
    assert sent == ({"permute"}, size * (N - 1) // N)
    flat = mesh.make_mesh(layouts.parse(f"tensor={N}"), mesh.topology("v5e:2x4"))
    assert transport.transport_alone(flat, (TENSOR,)) is ONE_SHOT
