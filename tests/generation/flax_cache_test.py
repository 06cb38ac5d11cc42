"""A user's own Flax models generate with the caches of Flax's attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.marks import slow

import meshpar
from meshpar.generation import GREEDY

VOCAB, EMBED, HEADS, LENGTH = 32, 16, 4, 12
LAYOUT = "data=2,fsdp=2,tensor=2"


def partitioned(*names):
    return nn.with_logical_partitioning(nn.initializers.normal(0.3), names)


class LinenBlock(nn.Module):
    decode: bool

    @nn.compact
    def __call__(self, x_BLD):
        length = x_BLD.shape[1]
        mask = None if self.decode else jnp.tril(jnp.ones((1, 1, length, length)))
        attention = nn.MultiHeadDotProductAttention(
            num_heads=HEADS,
            use_bias=False,
            decode=self.decode,
            kernel_init=partitioned("embed", "heads", "kv"),
            out_kernel_init=partitioned("heads", "kv", "embed"),
        )
        x_BLD += attention(
            nn.LayerNorm(use_scale=False, use_bias=False)(x_BLD), mask=mask
        )
        hidden = partitioned("embed", "mlp")
        h_BLF = nn.Dense(32, use_bias=False, kernel_init=hidden)(x_BLD)
        out = partitioned("mlp", "embed")
        return x_BLD + nn.Dense(EMBED, use_bias=False, kernel_init=out)(nn.gelu(h_BLF))


class LinenLM(nn.Module):
    """After Flax's lm1b example: positions are counted in the cache."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens_BL):
        init = partitioned("vocab", "embed")
        embed = nn.Embed(VOCAB, EMBED, embedding_init=init)
        positions = self.param("positions", partitioned(None, "embed"), (LENGTH, EMBED))
        first = 0
        if self.decode:
            index = self.variable("cache", "index", lambda: jnp.zeros((), jnp.int32))
            first = index.value
            if not self.is_initializing():
                index.value = first + 1
        length = tokens_BL.shape[1]
        rows = jax.lax.dynamic_slice_in_dim(positions, first, length)
        x_BLD = embed(tokens_BL) + rows[None]
        for _ in range(2):
            x_BLD = LinenBlock(self.decode)(x_BLD)
        return embed.attend(x_BLD)


def loss(model, batch):
    logits = model(batch["tokens"])
    return -nn.log_softmax(logits)[..., 0].mean()


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        def dims(*names):
            return {"out_sharding": names}

        self.attention = nnx.MultiHeadAttention(
            HEADS,
            EMBED,
            use_bias=False,
            decode=False,
            kernel_metadata=dims("embed", "heads", "kv"),
            out_kernel_metadata=dims("heads", "kv", "embed"),
            rngs=rngs,
        )
        up, down = dims("embed", "mlp"), dims("mlp", "embed")
        self.up = nnx.Linear(EMBED, 32, use_bias=False, kernel_metadata=up, rngs=rngs)
        self.down = nnx.Linear(
            32, EMBED, use_bias=False, kernel_metadata=down, rngs=rngs
        )

    def __call__(self, x_BLD, mask):
        x_BLD = x_BLD + self.attention(x_BLD, mask=mask)
        return x_BLD + self.down(nnx.gelu(self.up(x_BLD)))


class NnxLM(nnx.Module):
    def __init__(self, rngs):
        names = {"out_sharding": ("vocab", "embed")}
        self.embed = nnx.Embed(VOCAB, EMBED, embedding_metadata=names, rngs=rngs)
        noise = jax.random.normal(rngs.params(), (LENGTH, EMBED))
        self.positions = nnx.Param(noise, out_sharding=(None, "embed"))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, tokens_BL, positions_BL=None):
        length = tokens_BL.shape[1]
        if positions_BL is None:
            positions_BL = jnp.arange(length)[None]
        mask = jnp.tril(jnp.ones((1, 1, length, length)))
        x_BLD = self.embed(tokens_BL) + self.positions[...][positions_BL]
        for block in self.blocks:
            decodes = block.attention.decode
            x_BLD = block(x_BLD, None if decodes else mask)
        return self.embed.attend(x_BLD)


def init_cache(module, batch_size, length):
    for block in module.blocks:
        block.attention.decode = True
        block.attention.init_cache((batch_size, length, EMBED))


def linen_model(**options):
    example = jnp.zeros((1, LENGTH), jnp.int32)
    model = meshpar.from_linen(LinenLM(), loss, example, **options)
    return model, meshpar.generation.linen_cache(
        model, LinenLM(decode=True), max_length=LENGTH
    )


def nnx_model(**options):
    model = meshpar.from_nnx(NnxLM, loss, **options)
    call = lambda module, tokens, positions: module(tokens, positions)  # noqa: E731
    return model, meshpar.generation.nnx_cache(
        model, init_cache, call, max_length=LENGTH
    )


@pytest.mark.parametrize(
    "make, layers", [(linen_model, "LinenBlock_*"), slow(nnx_model, "blocks")]
)
def test_cached_logits_are_those_of_the_whole_sequence(make, layers):
    """Also of a model whose layers are stacked in training, for ragged prompts."""
    model, cached = make(layers=layers)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(1)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 1, 6, 4)]
    generator = meshpar.generator(
        model, LAYOUT, max_length=LENGTH, batch_size=4, cached=cached
    )
    placed, programs = generator.place(params), generator.programs
    key = next(path for path in programs.abstract_cache if "cached_key" in path)
    shard = programs.abstract_cache[key].sharding.shard_shape
    assert shard(programs.abstract_cache[key].shape) == (1, LENGTH, 2, 4)
    state = generator.prefill(placed, prompts, LENGTH)
    sampling, found = generator.sampling_arrays(GREEDY), []
    for _ in range(LENGTH - 1):
        state, logits = generator.decode(placed, state, sampling)
        found.append(np.asarray(logits))
    tokens = np.asarray(state.tokens)
    assert [row[: len(p)].tolist() for row, p in zip(tokens, prompts, strict=True)] == (
        prompts
    )
    whole = model.bind(params)(tokens)
    np.testing.assert_allclose(np.stack(found, 1), whole[:, :-1], atol=1e-5)
