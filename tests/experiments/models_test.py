"""The decoders: causal, of the published sizes, and what they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import equality
from support.equality import first_step
from support.marks import slow
from support.tiny_models import (
    GEMMA3,
    LENGTH,
    OLMO2,
    batch,
    lower,
    lower_standard,
    model,
    relative_error,
)

import meshpar
from experiments import data, recipes
from experiments.models.decoder_config import GPT2_KIND
from experiments.models.loss import cross_entropy
from experiments.models.rope import Rope, rotate
from experiments.recipes import sampling


@pytest.mark.parametrize(
    "name, size",
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.5b", 1_557_611_200),
        ("gpt3-175b", 174_604_259_328),
        ("llama-1b", 1_100_048_384),
        ("llama3.2-3b", 3_212_749_824),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
    ],
)
def test_published_sizes(name, size):
    made = recipes.get(name).make_model()
    assert sum(p.size for p in made.params.values()) == size


@pytest.mark.parametrize(
    "name, size, active_billions",
    [("mixtral-8x7b", 46_702_792_704, 12.9), ("qwen3-30b-a3b", 30_532_122_624, 3.35)],
)
def test_published_sizes_of_mixtures(name, size, active_billions):
    config = recipes.get(name)
    made = config.make_model()
    assert sum(p.size for p in made.params.values()) == size
    share = config.model.experts_per_token / config.model.num_experts
    active = sum(
        p.size * (share if "expert" in p.names else 1) for p in made.params.values()
    )
    assert active / 1e9 == pytest.approx(active_billions, abs=0.05)


def test_flops_are_six_per_weight_and_the_attention_matrix():
    decoder = recipes.get("llama2-7b").model
    weights = 6_738_415_616 - 32000 * 4096  # The embedding is a lookup.
    attention = 12 * 32 * 4096 * 4096
    want = pytest.approx(6 * weights + attention, rel=1e-3)
    assert decoder.flops_per_token() == want


@pytest.mark.parametrize("sizes", [slow({}), GPT2_KIND])
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


@pytest.mark.slow
def test_rope_sees_only_distances():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 8)).astype(np.float32)
    q_BLNH, k_BLNH = (
        rotate(jnp.broadcast_to(x, (1, 12, 1, 8)), jnp.arange(12)[None], Rope(100.0))[
            0, :, 0
        ]
        for x in (q, k)
    )
    scores = q_BLNH @ k_BLNH.T
    np.testing.assert_allclose(scores[5, 3], scores[9, 7], rtol=1e-5)
    assert abs(scores[5, 3] - scores[5, 4]) > 1e-3
    np.testing.assert_allclose(q_BLNH[0], q, rtol=1e-6)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "framework, block", [slow("nnx", 0), ("nnx", 4), slow("linen", 0)]
)
def test_tokens_without_weight_do_not_count(framework, block):
    """Targets of padding change nothing; the weight is the number of tokens."""
    made = model(framework, loss_block=block)
    params = jax.jit(made.init)(jax.random.key(0))
    evaluate = jax.jit(made.evaluation_loss)
    padded = data.padded_unevenly(batch())
    other = padded | {"targets": np.where(padded["weights"] > 0, padded["targets"], 7)}
    loss, aux = evaluate(params, padded)
    assert aux["weight"] == padded["weights"].sum()
    assert loss == evaluate(params, other)[0] != evaluate(params, batch())[0]
    whole = padded | {"weights": np.ones_like(padded["weights"])}
    plain, _ = evaluate(params, batch())
    np.testing.assert_allclose(evaluate(params, whole)[0], plain, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [slow("data=2,fsdp=2"), "data=2,fsdp=2,tensor=2"])
def test_a_chunked_loss_is_the_loss_in_less_memory(layout):
    found, memory = {}, {}
    for chunk in (0, 2):
        made = model(vocab=4096, loss_block=chunk)
        program = lower(layout, made)
        found[chunk] = first_step(program, batch())
        memory[chunk] = program.compiled.memory_analysis().temp_size_in_bytes
    (loss, gradients), (want_loss, want) = found[2], found[0]
    assert loss["loss"] == pytest.approx(want_loss["loss"], rel=1e-6)
    assert relative_error(gradients, want) < 1e-5
    # 4 sequences of 16 tokens, and their 4096 logits in float32 on each device. Over
    # `tensor` the backward pass computes the half of a device again in any case.
    logits = 4 * 16 * 4096 * 4
    assert memory[0] - memory[2] > (logits // 8 if "tensor" in layout else logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, layout",
    [
        (OLMO2, "fsdp=2,tensor=2"),
        slow(GEMMA3 | dict(depth=4), "pipe=2,fsdp=2,microbatches=2,remat=full"),
        slow(GEMMA3 | dict(depth=4), "data=2,context=2,tensor=2"),
        slow(GEMMA3 | dict(depth=3), "fsdp=2,tensor=2,remat=full"),
        slow(OLMO2, "pipe=2,data=2,tensor=2,microbatches=2"),
        slow(OLMO2, "context=2,fsdp=2,tensor=2"),
        slow(dict(bias=True), "fsdp=2,tensor=2"),
    ],
)
def test_other_kinds_train_alike(kind, layout):
    of, num = model(**kind), meshpar.layouts.parse(layout).microbatches
    program = lower_standard(layout, of)
    batches = [batch(0), batch(1)]
    one = lower_standard(f"data=1,microbatches={num}", of)
    report = equality.compare(program, one, batches)
    assert report.ok, report.problem
    assert program.violations() == []


@pytest.mark.slow
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
