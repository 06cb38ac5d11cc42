"""Networks of random models: blocks of parts, put together in many ways."""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from models.random_parts import PARTS, WIDTH

LENGTH, VOCAB, DEPTH = 6, 12, 4


class NnxBlock(nnx.Module):
    def __init__(self, names, images, rngs):
        parts = PARTS["nnx", images]
        self.names = names
        self.parts = nnx.Dict(
            {name: parts.modules[name](rngs) for name in names if name in parts.modules}
        )
        self.functions = {n: parts.functions[n] for n in names if n in parts.functions}

    def __call__(self, x):
        for name in self.names:
            run = self.parts[name] if name in self.parts else self.functions[name]
            x = x + 0.5 * run(x)
        return x


class NnxNet(nnx.Module):
    def __init__(self, of, rngs):
        images = of.data == "images"
        block = functools.partial(NnxBlock, of.parts, images)
        self.arrangement = of.arrangement
        self.tokens = of.data == "tokens"
        if self.tokens:
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.places = nnx.Param(0.1 * jnp.ones((LENGTH, WIDTH)))
        else:
            self.stem = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        if of.arrangement in ("one", "twice", "remat"):
            self.block = block(rngs)
        elif of.arrangement == "attributes":
            for i in range(DEPTH):
                setattr(self, f"block_{i}", block(rngs))
        elif of.arrangement == "scanned":
            self.blocks = nnx.split_rngs(splits=DEPTH)(nnx.vmap(block))(rngs)
        else:
            self.blocks = nnx.List([block(rngs) for _ in range(DEPTH)])
        if not self.tokens:
            self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, x):
        if self.tokens:
            x = self.embed(x) + self.places[...]
        else:
            x = self.stem(x)
        x = self.run(x)
        if self.tokens:
            return self.embed.attend(x)
        return self.head(x.reshape(x.shape[0], -1, WIDTH))

    def run(self, x):
        if self.arrangement == "one":
            return self.block(x)
        if self.arrangement == "twice":
            return self.block(jnp.tanh(self.block(x)))
        if self.arrangement == "remat":
            return nnx.remat(lambda block, x: block(x))(self.block, x)
        if self.arrangement == "scanned":
            run = nnx.scan(
                lambda block, x: block(x),
                in_axes=(0, nnx.Carry),
                out_axes=nnx.Carry,
            )
            return run(self.blocks, x)
        if self.arrangement == "attributes":
            blocks = [getattr(self, f"block_{i}") for i in range(DEPTH)]
        else:
            blocks = self.blocks
        for block in blocks:
            x = block(x)
        return x


class LinenBlock(nn.Module):
    names: tuple[str, ...]
    images: bool
    train: bool

    @nn.compact
    def __call__(self, x):
        parts = PARTS["linen", self.images]
        for name in self.names:
            if name in parts.modules:
                x = x + 0.5 * parts.modules[name](x, self.train)
            else:
                x = x + 0.5 * parts.functions[name](x)
        return x


class LinenStep(nn.Module):
    names: tuple[str, ...]
    images: bool
    train: bool

    @nn.compact
    def __call__(self, x, _):
        return LinenBlock(self.names, self.images, self.train)(x), None


_SCANNED = {
    "variable_axes": {
        "params": 0,
        **dict.fromkeys(("batch_stats", "counts", "means", "intermediates"), 0),
    },
    "split_rngs": {"params": True, "dropout": True},
    "length": DEPTH,
    "metadata_params": {nn.PARTITION_NAME: "layers"},
}


class LinenNet(nn.Module):
    of: Any  # A `random_models.Draw`.
    train: bool

    @nn.compact
    def __call__(self, x):
        tokens = self.of.data == "tokens"
        if tokens:
            embed = nn.Embed(VOCAB, WIDTH, name="embed")
            shape = LENGTH, WIDTH
            x = embed(x) + self.param("places", nn.initializers.normal(0.1), shape)
        else:
            x = nn.Dense(WIDTH, name="stem")(x)
        x = self.run(x)
        if tokens:
            return embed.attend(x)
        return nn.Dense(VOCAB, name="head")(x.reshape(x.shape[0], -1, WIDTH))

    def run(self, x):
        arrangement = self.of.arrangement
        arguments = self.of.parts, self.of.data == "images", self.train
        if arrangement == "scanned":
            steps = nn.scan(LinenStep, **_SCANNED)
            return steps(*arguments, name="blocks")(x, None)[0]
        if arrangement == "one":
            return LinenBlock(*arguments, name="block")(x)
        if arrangement == "twice":
            block = LinenBlock(*arguments, name="block")
            return block(jnp.tanh(block(x)))
        kind = {"remat": nn.remat, "jit": nn.jit}.get(arrangement, lambda kind: kind)
        blocks = [kind(LinenBlock)(*arguments, name=f"block_{i}") for i in range(DEPTH)]
        for block in blocks:
            x = block(x)
        return x
