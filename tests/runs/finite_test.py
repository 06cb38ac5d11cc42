"""Numbers that are none in what a mode holds beside weights and optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow

import meshpar
from meshpar.islands import program as islands_program
from meshpar.runs.finite import FiniteCheck


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


def lowered(layout, mode):
    model = meshpar.from_nnx(lambda rngs: nnx.Linear(4, 2, rngs=rngs), loss)
    batch = {"x": np.ones((4, 4), np.float32)}
    devices = jax.devices()[:2]
    return meshpar.lower(
        model, optax.sgd(0.1), layout, batch, mode=mode, devices=devices
    )


@pytest.mark.parametrize("field", [slow("anchor"), "snapshot"])
def test_weights_that_travel_between_replicas(field):
    mode = meshpar.LocalSGD(period=4, staleness=1)
    program = lowered("replica=2", mode)
    state = program.init()
    check, portable = FiniteCheck(program), program.in_model_order(state)
    sync, *rest = program.extra_state(state)
    assert check.problem(portable, (sync, *rest)) == ""
    bad = jax.tree.map(lambda x: x.at[..., -1].set(jnp.nan), getattr(sync, field))
    found = check.problem(portable, (sync._replace(**{field: bad}), *rest))
    assert found.startswith(f"state of the mode [0].{field}")


def test_the_store_of_islands():
    program = lowered("data=1", meshpar.Islands(workers=2))
    state = program.init()
    state, _ = program.step(state, {"x": np.ones((8, 4), np.float32)})
    check, portable = FiniteCheck(program), program.in_model_order(state)
    extra = program.extra_state(state)
    assert check.problem(portable, extra) == ""
    arrays = program.extra_numbers(extra)
    name = next(name for name in arrays if name.endswith("|values"))
    arrays[name][-1] = np.inf
    blob = islands_program.packed(arrays, extra["islands"].size)
    bad = {"islands": blob.reshape(extra["islands"].shape)}
    assert check.problem(portable, bad) == f"state of the mode [{name!r}]"
    program.close()
