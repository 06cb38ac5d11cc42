"""A table whose rows are pulled trains as if all of it were on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import tiny_models
from support.marks import slow

import meshpar
from meshpar.methods.row_table import RowTable

ROWS, SLOTS, DIM, BATCH = 50, 16, 8, 16


class Net(nnx.Module):
    def __init__(self, rngs, rows):
        self.table = nnx.Param(jnp.zeros((rows, DIM)), out_sharding=("vocab", "embed"))
        head = rngs.params.normal((DIM, 1))
        self.head = nnx.Param(head, out_sharding=("embed", None))


def loss(net, batch):
    x_BD = net.table[...][batch["ids"]].sum(1)
    y_B = jnp.tanh(x_BD) @ net.head[...]
    return jnp.square(y_B[:, 0] - batch["y"]).mean()


def lower(rows, layout, optimizer=None, **options):
    layout = meshpar.layouts.parse(layout)
    model = meshpar.from_nnx(lambda rngs: Net(rngs, rows), loss)
    devices = jax.devices()[: layout.num_devices]
    optimizer = optimizer or optax.adagrad(0.5)
    return meshpar.lower(
        model, optimizer, layout, batches(0)[0], devices=devices, **options
    )


def batches(num, seed=3):
    """Most ids are small, so that many rows stay in their slots."""
    rng = np.random.default_rng(seed)
    return [
        {
            "ids": np.minimum(rng.zipf(1.7, (BATCH, 2)), SLOTS + step % 30).astype(
                np.int32
            ),
            "y": rng.normal(size=BATCH).astype(np.float32),
        }
        for step in range(num + 1)
    ]


def initial():
    return np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


def train(program, table, state, some):
    losses = []
    for batch in some:
        state, slots = table.swap(state, batch["ids"])
        state, metrics = program.step(state, {**batch, "ids": slots})
        losses.append(float(metrics["loss"]))
    table.flush(state)
    return state, losses


def dense(layout, num):
    program = lower(ROWS, layout)
    fresh = program.init(0)
    head = jax.device_get(fresh.params["head"])
    state, losses = program.init(0, {"table": initial(), "head": head}), []
    for batch in batches(num)[:num]:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return jax.device_get(state.params["table"]), losses


@pytest.mark.parametrize("layout", [slow("data=1"), "fsdp=2,tensor=2"])
def test_a_table_trains_as_the_whole_parameter_does(layout):
    want, losses = dense(layout, 12)
    program = lower(SLOTS, layout)
    state = program.init(0)
    table = RowTable(program, state, "table", initial())
    state, found = train(program, table, state, batches(12)[:12])
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    np.testing.assert_allclose(table.arrays["values"], want, rtol=1e-6, atol=1e-7)
    needed = sum(len(np.unique(batch["ids"])) for batch in batches(12)[:12])
    assert 0 < table.returned and table.fetched < needed / 2


def test_a_table_goes_on_from_its_arrays():
    _, losses = dense("data=1", 8)
    program = lower(SLOTS, "data=1")
    state = program.init(0)
    table = RowTable(program, state, "table", initial())
    state, _ = train(program, table, state, batches(8)[:5])
    again = RowTable(program, state, "table", table.arrays)
    _, found = train(program, again, state, batches(8)[5:8])
    np.testing.assert_allclose(found, losses[5:], rtol=1e-6)


def test_what_cannot_be_is_an_error():
    program = lower(SLOTS, "data=1")
    state = program.init(0)
    table = RowTable(program, state, "table", initial())
    wide = np.arange(SLOTS + 1)
    for ids, words in [
        ([ROWS], "table has rows 0 to 49"),
        ([-1], "ids from -1"),
        (wide, "needs 17 rows, and table has 16 slots"),
    ]:
        with pytest.raises(meshpar.MeshparError, match=words):
            table.swap(state, ids)
    for values, words in [
        (initial()[:, 1:], r"float32\[50, 7\] does not go with table"),
        (initial().astype(np.float64), "float64"),
        ({"values": initial(), "other": initial()}, "other float32"),
    ]:
        with pytest.raises(meshpar.MeshparError, match=words):
            RowTable(program, state, "table", values)
    with pytest.raises(meshpar.MeshparError, match="no trained parameter.*use head"):
        RowTable(program, state, "tables", initial())
    lamb = lower(SLOTS, "data=1", optax.lamb(0.1))
    with pytest.raises(meshpar.MeshparError, match="depends on other rows"):
        RowTable(lamb, lamb.init(0), "table", initial())
    offloaded = tiny_models.lower("fsdp=2,offload=optimizer")
    with pytest.raises(meshpar.MeshparError, match="leave replica and offload out"):
        RowTable(offloaded, offloaded.init(0), "embedding", initial())
    slots = np.arange(2 * BATCH, dtype=np.int32).reshape(BATCH, 2) % SLOTS
    after, _ = program.step(program.init(0), batches(0)[0] | {"ids": slots})
    with pytest.raises(meshpar.MeshparError, match="does not start with one number"):
        RowTable(program, after, "table", initial())
