"""Names that nothing binds are errors with a remedy, before anything is compiled."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar
from meshpar.errors import MeshparError

BATCH = {"x": np.ones((8, 4), np.float32)}


class Net(nn.Module):
    change: callable

    @nn.compact
    def __call__(self, x):
        return self.change(self, nn.Dense(4)(x))


def lowered(change, **options):
    def loss(apply, batch):
        return jnp.square(apply(batch["x"])).mean()

    model = meshpar.from_linen(Net(change), loss, jnp.ones((1, 4)), **options)
    return meshpar.lower(model, optax.sgd(0.1), "data=8", BATCH)


def test_an_axis_name_of_pmap_is_named():
    def synchronized(net, x):
        norm = nn.BatchNorm(use_running_average=False, axis_name="batch")
        return norm(x)

    with pytest.raises(MeshparError, match="axis name 'batch'.*pmap.*leave it out"):
        lowered(synchronized)
    assert lowered(lambda net, x: nn.BatchNorm(use_running_average=False)(x))


def test_a_random_stream_of_evaluation_is_named():
    def noisy(net, x):
        return x + jax.random.normal(net.make_rng("noise"), x.shape)

    program = lowered(noisy, rngs=("noise",))
    state, _ = program.step(program.init(0), BATCH)
    with pytest.raises(MeshparError, match="stream 'noise'.*evaluation_loss_fn"):
        program.evaluate(state, BATCH)

    def evaluation(apply, batch):
        noise = jax.random.key(1)
        return jnp.square(apply(batch["x"], rngs={"noise": noise})).mean()

    program = lowered(noisy, rngs=("noise",), evaluation_loss_fn=evaluation)
    assert program.evaluate(program.init(0), BATCH)["loss"] > 0


def test_other_errors_of_a_name_pass_unchanged():
    def broken(net, x):
        return x + unknown  # noqa: F821, the error of a user's own

    with pytest.raises(NameError, match="unknown"):
        lowered(broken)


def test_example_inputs_may_be_random_keys():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            return nn.Dense(4)(x) + jax.random.normal(key, (1, 4))

    model = meshpar.from_linen(
        Noisy(),
        lambda apply, batch: jnp.square(apply(batch["x"], jax.random.key(1))).mean(),
        (jnp.ones((1, 4)), jax.random.key(0)),
    )
    assert model.params["Dense_0/kernel"].shape == (4, 4)
