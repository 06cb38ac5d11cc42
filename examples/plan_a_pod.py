"""Layouts for a model of one's own on 32 chips of TPU v5p that are not there.

    python examples/plan_a_pod.py v5p:4x4x2

Nothing is allocated and no chip is needed: memory and time are predicted.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshpar
from meshpar.ops import context

WIDTH, HEADS, DEPTH, LENGTH, ROWS = 4096, 32, 32, 2048, 64


class Block(nnx.Module):
    def __init__(self, rngs):
        def linear(dims, *sizes):
            metadata, split = {"out_sharding": dims}, isinstance(sizes[1], tuple)
            make = nnx.LinearGeneral if split else nnx.Linear
            return make(*sizes, use_bias=False, kernel_metadata=metadata, rngs=rngs)

        heads = HEADS, WIDTH // HEADS
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.List(
            [linear(("embed", "heads", None), WIDTH, heads) for _ in range(3)]
        )
        self.out = linear(("heads", "embed"), WIDTH, WIDTH)
        self.up = linear(("embed", "mlp"), WIDTH, 4 * WIDTH)
        self.down = linear(("mlp", "embed"), 4 * WIDTH, WIDTH)

    def __call__(self, x_BLD):
        h_BLD = self.norms[0](x_BLD)
        y_BLHK = context.attention(*(project(h_BLD) for project in self.qkv))
        x_BLD += self.out(y_BLHK.reshape(x_BLD.shape))
        return x_BLD + self.down(nnx.gelu(self.up(self.norms[1](x_BLD))))


class Net(nnx.Module):
    def __init__(self, rngs):
        dims = {"out_sharding": ("vocab", "embed")}
        self.embed = nnx.Embed(32768, WIDTH, embedding_metadata=dims, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])

    def __call__(self, tokens_BL):
        x_BLD = self.embed(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.embed.attend(x_BLD)


def loss(net, batch):
    logits, labels = net(batch["tokens"]), batch["next"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def plan(topology, rows=ROWS):
    """The plans for a topology, fastest first."""
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
    batch = {"tokens": tokens, "next": tokens}
    model = meshpar.from_nnx(Net, loss, layers="blocks")
    dtype = jnp.bfloat16
    return meshpar.plan(model, optax.adam(1e-4), batch, topology, compute_dtype=dtype)


if __name__ == "__main__":
    print(plan(sys.argv[1]))
