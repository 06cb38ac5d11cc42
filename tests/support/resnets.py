"""Small residual networks with BatchNorm, in both stacks of Flax, and plain loops.

Their activation is smooth: rounding cannot switch a gradient on or off.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar

ROWS, SIDE, CLASSES, WIDTH = 16, 4, 8, 8
SGD = optax.sgd(0.05, momentum=0.9)


def batch(seed=0):
    random = np.random.default_rng(seed)
    return {
        "image": random.normal(size=(ROWS, SIDE, SIDE, 8)).astype(np.float32),
        "label": random.integers(0, CLASSES, ROWS, np.int32),
    }


def cross_entropy(logits_BV, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BV, batch["label"])
    return losses.mean()


def linen_dims(*names):
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        dims = linen_dims(None, None, "embed", None)
        y = nn.Conv(WIDTH, (3, 3), use_bias=False, kernel_init=dims)(x)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        return nn.gelu(x + y)


class LinenResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = LinenBlock()(x, train)
        x = x.mean(axis=(1, 2))
        dense = nn.Dense(CLASSES, use_bias=False, kernel_init=linen_dims("embed", None))
        return dense(x)


def linen_loss(apply, batch):
    logits, _ = apply(batch["image"], mutable=["batch_stats"])
    return cross_entropy(logits, batch)


def linen_evaluation(apply, batch):
    return cross_entropy(apply(batch["image"], train=False), batch)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        dims = {"out_sharding": (None, None, "embed", None)}
        self.conv = nnx.Conv(
            *(WIDTH, WIDTH, (3, 3)), use_bias=False, kernel_metadata=dims, rngs=rngs
        )
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(x + self.norm(self.conv(x)))


class NnxResNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs)])
        dims = {"out_sharding": ("embed", None)}
        self.head = nnx.Linear(
            WIDTH, CLASSES, use_bias=False, kernel_metadata=dims, rngs=rngs
        )

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


@functools.cache
def model(framework):
    if framework == "linen":
        example = jnp.zeros((1, SIDE, SIDE, 8))
        return meshpar.from_linen(LinenResNet(), linen_loss, example, linen_evaluation)
    return meshpar.from_nnx(
        NnxResNet, lambda net, batch: cross_entropy(net(batch["image"]), batch)
    )


def lower(framework, layout, of=None, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    options = {"optimizer": SGD, "devices": devices} | options
    of = of or model(framework)
    return meshpar.lower(of, layout=layout, batch=batch(), **options)


def linen_steps(variables, steps):
    """The usual loop of a Linen model: (losses, variables after the last step)."""
    module = LinenResNet()
    params, stats = variables["params"], variables["batch_stats"]

    @jax.jit
    def step(params, stats, state, batch):
        def loss(params):
            everything = {"params": params, "batch_stats": stats}
            logits, new = module.apply(
                everything, batch["image"], mutable=["batch_stats"]
            )
            return cross_entropy(logits, batch), new["batch_stats"]

        (value, stats_), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = SGD.update(grads, state, params)
        return optax.apply_updates(params, updates), stats_, state, value

    state, losses = SGD.init(params), []
    for number in range(steps):
        params, stats, state, value = step(params, stats, state, batch(number))
        losses.append(float(value))
    return losses, {"params": params, "batch_stats": stats}


def nnx_steps(variables, steps):
    """The usual loop of an NNX model: (losses, its state after the last step)."""
    with nnx.use_eager_sharding(False):
        module = NnxResNet(nnx.Rngs(0))
        nnx.update(module, variables)
        optimizer, losses = nnx.Optimizer(module, SGD, wrt=nnx.Param), []

    @nnx.jit
    def step(module, optimizer, batch):
        def loss(module):
            return cross_entropy(module(batch["image"]), batch)

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    module.train()
    with nnx.use_eager_sharding(False):
        for number in range(steps):
            losses.append(float(step(module, optimizer, batch(number))))
    return losses, nnx.state(module)
