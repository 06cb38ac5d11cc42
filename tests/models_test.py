"""The decoders: causal, of the published sizes, and what they are made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import LENGTH, batch, config, lower, model

from experiments import building, sampling
from experiments.models.decoder import DecoderConfig, rotate
from experiments.models.loss import cross_entropy

GPT2 = dict(
    length=1024,
    position="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tied=True,
)


def count(decoder):
    made = building.make_model(dataclasses.replace(config(), model=decoder))
    return sum(p.size for p in made.params.values())


def test_published_sizes():
    small = DecoderConfig(
        vocab=50257, depth=12, embed=768, heads=12, kv_heads=12, mlp=3072, **GPT2
    )
    assert count(small) == 124_439_808
    llama = DecoderConfig(
        vocab=32000,
        length=4096,
        depth=32,
        embed=4096,
        heads=32,
        kv_heads=32,
        mlp=11008,
    )
    assert count(llama) == 6_738_415_616
    grouped = dataclasses.replace(
        llama, depth=80, embed=8192, heads=64, kv_heads=8, mlp=28672
    )
    assert count(grouped) == 68_976_648_192
    # 6 FLOPs per weight but the embedding's, and the attention matrix.
    weights = 6_738_415_616 - 32000 * 4096
    attention = 12 * 32 * 4096 * 4096
    assert llama.flops_per_token() == pytest.approx(6 * weights + attention, rel=1e-3)


@pytest.mark.parametrize("sizes", [{}, GPT2 | {"length": LENGTH}])
def test_causal(framework, sizes):
    made = model(framework, **(sizes if framework == "nnx" else {}))
    params = jax.jit(made.init)(jax.random.key(0))
    logits = jax.jit(lambda params, tokens: made.bind(params)(tokens))
    tokens = batch()["tokens"][:1]
    changed = tokens.copy()
    changed[0, 9] = (tokens[0, 9] + 1) % 64
    difference = np.abs(logits(params, tokens) - logits(params, changed)).max(-1)[0]
    assert (difference[:9] == 0).all()
    assert (difference[9:] > 1e-6).all()


def test_rope_sees_only_distances():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 8)).astype(np.float32)
    q_BLNH, k_BLNH = (
        rotate(jnp.broadcast_to(x, (1, 12, 1, 8)), 100.0)[0, :, 0] for x in (q, k)
    )
    scores = q_BLNH @ k_BLNH.T
    np.testing.assert_allclose(scores[5, 3], scores[9, 7], rtol=1e-5)
    assert abs(scores[5, 3] - scores[5, 4]) > 1e-3
    np.testing.assert_allclose(q_BLNH[0], q, rtol=1e-6)


def test_grouped_heads_share_keys_and_values():
    """Grouped-query attention is attention with repeated keys and values."""
    grouped, full = model(kv_heads=2), model(kv_heads=8)
    params = jax.jit(grouped.init)(jax.random.key(0))
    repeated = {
        path: jnp.repeat(x, 4, axis=2) if path[-2:] in ("/k", "/v") else x
        for path, x in params.items()
    }
    tokens = batch()["tokens"]
    got, want = full.bind(repeated)(tokens), grouped.bind(params)(tokens)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_cross_entropy_is_optax_s():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 7)).astype(np.float32)
    targets = rng.integers(0, 7, (2, 3))
    want = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    np.testing.assert_allclose(cross_entropy(logits, targets), want, rtol=1e-6)


def test_sampling_equals_a_plain_loop_beyond_the_window():
    program = lower("data=1")
    params = program.init(0).params
    prompt, num = [1, 2, 3], 2 * LENGTH
    ids = sampling.sample(program, params, prompt, num, length=LENGTH, temperature=1e-6)
    logits = jax.jit(lambda tokens: program.model.bind(params)(tokens))
    text = list(prompt)
    for _ in range(num):
        window = np.zeros((1, LENGTH), np.int32)
        recent = text[-LENGTH:]
        window[0, : len(recent)] = recent
        text.append(int(logits(window)[0, len(recent) - 1].argmax()))
    assert ids == text[len(prompt) :]


def test_vocabulary_must_be_known():
    with pytest.raises(ValueError, match="vocab=0"):
        model(vocab=0)
