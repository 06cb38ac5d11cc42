r"""LoRA: small matrices are trained beside frozen weights; QLoRA: those in int8.

    meshpar run examples/lora.py:lora --layout="pipe=2,fsdp=4" \
        --set=int8=true --set=rank=4 --set=path=chats.jsonl --set=base=weights.npz

Sources: Hu et al., LoRA, arXiv:2106.09685; Dettmers et al., QLoRA, arXiv:2305.14314,
  here with int8 and a scale for every column in place of 4 bits and one for 64 weights.
"""

import dataclasses

import jax.numpy as jnp
import optax
from flax import nnx
from supervised import decoder, supervised


class Int8Linear(nnx.Module):
    """A matmul by int8 weights, which are dequantized where they are used."""

    def __init__(self, linear):
        kernel = linear.kernel[...]
        scale = abs(kernel).max(0, keepdims=True) / 127
        self.scale = nnx.Param(scale)
        self.kernel = nnx.Param(jnp.round(kernel / scale).astype(jnp.int8))

    def __call__(self, x):
        return x @ (self.kernel[...].astype(x.dtype) * self.scale[...])


class Adapted(nnx.Module):
    """x W + x A B alpha / rank, where A and B are trained."""

    def __init__(self, linear, rank, alpha, int8, rngs):
        sizes = linear.in_features, rank, linear.out_features
        self.base = Int8Linear(linear) if int8 else linear
        self.adapter, self.scale = nnx.LoRA(*sizes, rngs=rngs), alpha / rank

    def __call__(self, x):
        return self.base(x) + self.scale * self.adapter(x)


def adapt(model, rank, alpha, int8, rngs):
    """Puts adapters beside every matmul in the blocks of a decoder."""
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            linear = getattr(block, name)
            setattr(block, name, Adapted(linear, rank, alpha, int8, rngs))


def lora(
    path="",
    base="",
    rank=8,
    alpha=16.0,
    int8=False,
    width=64,
    depth=4,
    length=64,
    rate=1e-2,
    seed=0,
):
    """Trains adapters of the decoder of supervised.py.

    Args:
      path: a file of chats; empty for sums to learn.
      base: npz file of the frozen weights; empty for random ones.
      rank: of the adapters.
      alpha: what the adapters add is multiplied by alpha / rank.
      int8: whether the frozen matmuls are stored in int8.
      width: of the decoder.
      depth: number of its blocks.
      length: bytes of a chat.
      rate: learning rate.
      seed: of random weights.
    """
    model = decoder(base, width, depth, seed)
    adapt(model, rank, alpha, int8, nnx.Rngs(seed))
    return dataclasses.replace(
        supervised(path, length=length),
        model=model,
        trained=nnx.LoRAParam,
        optimizer=optax.adam(rate),
    )
