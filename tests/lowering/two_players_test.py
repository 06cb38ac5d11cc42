"""Two losses with two optimizers on one set of variables: a small GAN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow
from support.tiny_models import host

import meshpar

ROWS, NOISE, WIDTH, STEPS = 16, 8, 16, 5
PLAYERS = ("generator", "discriminator")
NAMES = "allow=scale|bias"


def linear(rngs, *sizes):
    dims = {"out_sharding": ("embed", None)}
    return nnx.Linear(*sizes, use_bias=False, kernel_metadata=dims, rngs=rngs)


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = linear(rngs, NOISE, WIDTH), linear(rngs, WIDTH, 8)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)

    def __call__(self, z_BD):
        return self.down(nnx.gelu(self.norm(self.up(z_BD))))


class Discriminator(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = linear(rngs, 8, WIDTH), linear(rngs, WIDTH, 1)

    def __call__(self, x_BD):
        return self.down(nnx.gelu(self.up(x_BD)))


class Gan(nnx.Module):
    def __init__(self, rngs):
        self.generator, self.discriminator = Generator(rngs), Discriminator(rngs)


def generator_loss(gan, batch):
    return nnx.softplus(-gan.discriminator(gan.generator(batch["z"]))).mean()


def discriminator_loss(gan, batch):
    fake = jax.lax.stop_gradient(gan.generator(batch["z"]))
    real = nnx.softplus(-gan.discriminator(batch["x"])).mean()
    return real + nnx.softplus(gan.discriminator(fake)).mean()


LOSSES = dict(zip(PLAYERS, (generator_loss, discriminator_loss), strict=True))
OPTIMIZERS = {
    "generator": optax.adam(2e-3, b1=0.5, eps=1e-4),
    "discriminator": optax.sgd(1e-2, momentum=0.9),
}


def rows(number=0):
    random = np.random.default_rng(number)
    x, z = (random.normal(size=(ROWS, 8)).astype(np.float32) for _ in range(2))
    return {"x": 2 * x + 1, "z": z}


@functools.cache
def model(player):
    return meshpar.from_nnx(Gan, LOSSES[player], trained=f"^{player}/")


@functools.cache
def plain_loop():
    """(losses of both players, variables) of the usual loop of NNX."""
    params = model("generator").init(jax.random.key(0))
    gan, optimizers, steps = model("generator").bind(params), {}, {}
    gan.train()
    for player in PLAYERS:
        wrt = nnx.All(nnx.Param, nnx.PathContains(player))
        optimizers[player] = nnx.Optimizer(gan, OPTIMIZERS[player], wrt=wrt)

        @nnx.jit
        def step(gan, optimizer, batch, player=player, wrt=wrt):
            loss = nnx.value_and_grad(LOSSES[player], argnums=nnx.DiffState(0, wrt))
            value, grads = loss(gan, batch)
            optimizer.update(gan, grads)
            return value

        steps[player] = step
    losses = []
    for number in range(STEPS):
        for player in reversed(PLAYERS):
            losses.append(float(steps[player](gan, optimizers[player], rows(number))))
    leaves = nnx.to_flat_state(nnx.state(gan))
    return losses, {"/".join(keys): np.asarray(leaf[...]) for keys, leaf in leaves}


@pytest.mark.parametrize("layout", [slow("data=8"), f"fsdp=8,{NAMES}"])
def test_two_players_train_as_in_a_plain_loop(layout):
    first, second = (
        meshpar.lower(model(player), OPTIMIZERS[player], layout, rows())
        for player in PLAYERS
    )
    generator, discriminator = first.init(0), second.init(0)
    begin, losses = host(generator.params), []
    for number in range(STEPS):
        discriminator, metrics = second.step(discriminator, rows(number))
        losses.append(float(metrics["loss"]))
        generator = generator.with_params(discriminator.params)
        generator, metrics = first.step(generator, rows(number))
        losses.append(float(metrics["loss"]))
        discriminator = discriminator.with_params(generator.params)
    want_losses, want = plain_loop()
    assert losses == pytest.approx(want_losses, rel=1e-5)
    for path, x in host(generator.params).items():
        error = np.linalg.norm(x - want[path])
        assert error < 3e-4 * np.linalg.norm(want[path] - begin[path]), path
    assert int(generator.step) == int(discriminator.step) == STEPS
    assert first.violations() == second.violations() == []


def test_variables_of_another_model_are_refused():
    programs = [
        meshpar.lower(m, optax.sgd(0.1), "data=8", rows())
        for m in (
            model("generator"),
            meshpar.from_nnx(
                Discriminator, lambda module, batch: module(batch["x"]).mean()
            ),
        )
    ]
    gan, other = (program.init(0) for program in programs)
    with pytest.raises(ValueError, match="is missing in the given variables"):
        gan.with_params(other.params)
    wrong = gan.params | {"generator/up/kernel": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"generator/up/kernel.*\[3\].*\[8, 16\]"):
        gan.with_params(wrong)
