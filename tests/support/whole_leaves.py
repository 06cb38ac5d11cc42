"""A tagger whose batches hold leaves without rows, in NNX and in Linen.

The number of classes is that of the rows, and the features are as many as the tokens of
a sequence: shapes do not tell which leaves have rows.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar

ROWS, LENGTH = CLASSES, WIDTH = 16, 8


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class NnxTagger(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(CLASSES, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=rngs)

    def __call__(self, tokens, scale):
        x = self.table(tokens) * scale[None, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = nn.gelu(nn.Dense(2 * WIDTH, use_bias=False, name="up")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(up)


class LinenTagger(nn.Module):
    @nn.compact
    def __call__(self, tokens, scale):
        x = nn.Embed(CLASSES, WIDTH, name="table")(tokens) * scale[None, None]
        for i in range(2):
            x = LinenBlock(name=f"block_{i}")(x)
        return nn.Dense(CLASSES, use_bias=False, name="head")(x)


def loss(model, batch):
    """The mean over tokens weighted by class, of softened logits."""
    logits = model(batch["tokens"], batch["scale"])
    labels = batch["labels"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits / batch["temperature"], labels
    )
    weights = batch["class_weights"][labels]
    right = (logits.argmax(-1) == labels).astype(jnp.float32)
    of_class = jax.nn.one_hot(labels, CLASSES)
    return meshpar.metrics.Mean((losses * weights).sum(), weights.sum()), {
        "right": meshpar.metrics.Sum(jnp.einsum("bl,blc->c", right, of_class)),
        "step": meshpar.metrics.Max(batch["step"] * jnp.ones_like(losses).max()),
    }


def plain_batch(number, rows=ROWS):
    """A batch as a plain loop has it."""
    random = np.random.default_rng(number)
    return {
        "class_weights": random.uniform(0.1, 9, CLASSES).astype(np.float32),
        "labels": random.integers(0, CLASSES, (rows, LENGTH)),
        "scale": random.uniform(0.5, 2, WIDTH).astype(np.float32),
        "step": np.int32(number),
        "temperature": np.float32(1 + number),
        "tokens": random.integers(0, CLASSES, (rows, LENGTH)),
    }


def marked(batch):
    """The batch as meshpar takes it."""
    names = ("class_weights", "scale")
    return batch | {name: meshpar.Replicated(batch[name]) for name in names}


def nnx_model(**options):
    return meshpar.from_nnx(NnxTagger, loss, **options)


def linen_model(**options):
    example = jnp.zeros((1, LENGTH), jnp.int32), jnp.ones(WIDTH)
    return meshpar.from_linen(LinenTagger(), loss, example, **options)


def nnx_start():
    """(graph, parameters) of a fresh NNX module."""
    return nnx.split(NnxTagger(nnx.Rngs(5)))


def linen_start():
    """Parameters of a fresh Linen module."""
    example = jnp.zeros((1, LENGTH), jnp.int32), jnp.ones(WIDTH)
    return jax.jit(LinenTagger().init)(jax.random.key(5), *example)["params"]
