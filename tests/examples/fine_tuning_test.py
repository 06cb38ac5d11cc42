"""Fine-tuning examples: under every layout they train as plain loops of optax do."""

import dataclasses
import itertools
import json
import pathlib

import dpo
import jax
import jax.numpy as jnp
import lora
import numpy as np
import optax
import pytest
import supervised
from flax import nnx
from support import plain_optax
from support.marks import slow

import meshpar
from experiments import recipes
from meshpar.runs.config import with_settings
from meshpar.runs.data import Place

ROOT = pathlib.Path(__file__).parents[2]
STEPS, ROWS, SIZES = 4, 8, {"width": 16, "depth": 2, "length": 40}
LAYOUTS = ["data=2,fsdp=2", slow("pipe=2,data=2")]


def run_of(name, *settings):
    """The run of an example, as `--recipe=examples/NAME.py:NAME` has it."""
    config = recipes.get(f"{ROOT}/examples/{name}.py:{name}")
    sizes = (f"{key}={value}" for key, value in SIZES.items() if hasattr(config, key))
    _, run = with_settings(config, [*sizes, *settings]).prepared()
    return dataclasses.replace(run, evaluation=None)


def trained(run, workdir, layout):
    return meshpar.train(
        run,
        workdir=str(workdir),
        layout=layout,
        devices=jax.devices()[:4],
        steps=STEPS,
        batch_size=ROWS,
    )


def losses(done):
    return [row["loss"] for row in done.metrics if "loss" in row]


def batches(run):
    made = run.data.training_batches(Place(ROWS, range(ROWS)))
    return list(itertools.islice(made, STEPS))


def decoder(base="", seed=0):
    return supervised.decoder(base, SIZES["width"], SIZES["depth"], seed)


def token_losses(logits, targets):
    logits = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def chat_loss(model, batch):
    """Summed over the assistant's bytes, and divided by their number."""
    found = token_losses(model(batch["tokens"]), batch["next"])
    return (found * batch["weights"]).sum() / batch["weights"].sum()


def plain(module, filter_, optimizer, run):
    """Losses of a plain loop that trains the variables of a filter."""
    graph, params, rest = nnx.split(module, filter_, ...)

    def loss(params, batch):
        return chat_loss(nnx.merge(graph, params, rest), batch)

    found, params = plain_optax.losses(loss, params, optimizer, batches(run))
    return found, nnx.merge(graph, params, rest)


def flat(module):
    variables = nnx.to_flat_state(nnx.state(module))
    return {"/".join(map(str, path)): np.asarray(x[...]) for path, x in variables}


def assert_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], err_msg=name, **tolerance)


@pytest.mark.slow  # The adapters' test has the same data, losses and decoder.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_supervised_equals_its_plain_loop(layout, tmp_path):
    run = run_of("supervised")
    expected, module = plain(decoder(), nnx.Param, optax.adamw(3e-3), run)
    done = trained(run, tmp_path, layout)
    np.testing.assert_allclose(losses(done), expected, rtol=1e-5)
    # Adam divides by gradients of about 1e-8, which round differently.
    assert_close(done.weights(), flat(module), atol=1e-4)


def test_the_loss_is_on_the_bytes_of_the_assistant_alone():
    chat = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Yo ä."},
        {"role": "user", "content": "Bye."},
        {"role": "assistant", "content": "So long, and thanks."},
    ]
    rows = supervised.encode([{"messages": chat}], 70)
    own = rows["weights"][0] > 0
    assert bytes(rows["next"][0, own].tolist()).decode() == "Yo ä.\nSo lon"
    text = bytes(rows["tokens"][0].tolist()).decode()
    assert text.startswith("system: Short.\nuser: Hi?\nassistant: Yo ä.\nuser: Bye.")
    np.testing.assert_array_equal(rows["next"][:, :-1], rows["tokens"][:, 1:])


@pytest.mark.slow
def test_data_and_weights_come_from_files(tmp_path):
    chats, base = tmp_path / "chats.jsonl", tmp_path / "base.npz"
    lines = [json.dumps(chat) for chat in itertools.islice(supervised.sums(), 64)]
    chats.write_text("\n".join(lines))
    np.savez(base, **flat(decoder(seed=7)))
    files = f"path={chats}", f"base={base}"
    run = run_of("supervised", *files)
    assert run.data.num_samples == float("inf") and "56 samples" in run.data.name
    for name in ("supervised", "lora"):
        found = run_of(name, *files).model.init(jax.random.key(0))
        np.testing.assert_array_equal(
            found["head/kernel"], decoder(str(base)).head.kernel
        )
        np.testing.assert_array_equal(found["head/kernel"], decoder(seed=7).head.kernel)
    pairs = tmp_path / "pairs.jsonl"
    lines = [json.dumps(pair) for pair in itertools.islice(dpo.sums(), 32)]
    pairs.write_text("\n".join(lines))
    run = run_of("dpo", f"path={pairs}", f"base={base}")
    assert "32 samples" in run.data.name
    found = run.model.init(jax.random.key(0))
    for part in ("policy", "reference"):
        kernel = found[f"head/{part}/kernel"]
        np.testing.assert_array_equal(kernel, decoder(seed=7).head.kernel)


def merged(module):
    """A decoder with W + A B alpha / rank in place of adapted matmuls."""
    plain = decoder()
    plain.embed, plain.head = module.embed, module.head
    for own, other in zip(plain.blocks, module.blocks, strict=True):
        own.norms = other.norms
        for name in ("qkv", "out", "up", "down"):
            adapted = getattr(other, name)
            kernel, adapter = adapted.base.kernel[...], adapted.adapter
            if kernel.dtype == jnp.int8:
                kernel = kernel * adapted.base.scale[...]
            kernel += 2 * adapter.lora_a[...] @ adapter.lora_b[...]
            getattr(own, name).kernel[...] = kernel
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("int8", [slow(False), True], ids=["lora", "qlora"])
def test_lora_equals_its_plain_loop_and_leaves_the_base_as_it_was(
    int8, layout, tmp_path
):
    run, module = run_of("lora", f"int8={int8}"), decoder()
    lora.adapt(module, rank=8, alpha=16.0, int8=int8, rngs=nnx.Rngs(0))
    start = flat(module)
    expected, module = plain(module, nnx.LoRAParam, optax.adam(1e-2), run)
    done = trained(run, tmp_path, layout)
    np.testing.assert_allclose(losses(done), expected, rtol=1e-5)
    weights, frozen = done.weights(), 0
    for name, x in weights.items():
        if "adapter" not in name:
            np.testing.assert_array_equal(x, start[name])
            assert x.dtype == start[name].dtype
            frozen += 1
    matmuls = [x for name, x in weights.items() if name.endswith("base/kernel")]
    assert len(matmuls) == 8 and frozen == (22 if int8 else 14)
    assert {x.dtype.name for x in matmuls} == {"int8" if int8 else "float32"}
    batch = batches(run)[0]
    np.testing.assert_allclose(
        chat_loss(merged(module), batch), chat_loss(module, batch), rtol=1e-5
    )


def test_int8_matmuls_are_near_those_in_float32():
    linear = nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (16, 64))
    error = lora.Int8Linear(linear)(x) - linear(x)
    # Weights are rounded by up to half of 1 / 127 of the largest of their column.
    assert (
        0 < abs(error).max() < 64 * abs(x).max() * 0.5 / 127 * abs(linear.kernel).max()
    )


def answers(batch, number):
    return {name: x[:, number] for name, x in batch.items()}


def dpo_losses(run, beta):
    """Equation 7, with the chosen and the rejected answers one after the other."""
    reference = decoder()
    graph, start = nnx.split(decoder())

    def log_probability(model, answer):
        found = token_losses(model(answer["tokens"]), answer["next"])
        return -(found * answer["weights"]).sum(-1)

    def loss(params, batch):
        policy, chosen = nnx.merge(graph, params), answers(batch, 0)
        rejected = answers(batch, 1)
        ratio_w = log_probability(policy, chosen) - log_probability(reference, chosen)
        ratio_l = log_probability(policy, rejected)
        ratio_l -= log_probability(reference, rejected)
        return -jax.nn.log_sigmoid(beta * ratio_w - beta * ratio_l).mean()

    return plain_optax.losses(loss, start, optax.adamw(1e-3), batches(run))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_equals_its_formula_and_leaves_the_reference_as_it_was(layout, tmp_path):
    run = run_of("dpo", "beta=0.5")
    expected, policy = dpo_losses(run, beta=0.5)
    assert expected[0] == pytest.approx(np.log(2)) and expected[-1] != expected[0]
    done = trained(run, tmp_path, layout)
    np.testing.assert_allclose(losses(done), expected, rtol=1e-5)
    specs, start = done.program.plan.specs, flat(decoder())
    weights = done.weights()
    assert len(weights) == 2 * len(start)
    for name, x in start.items():
        *place, last = name.split("/")
        split = 1 if len(place) == 1 else 2  # "head", or "blocks/0".
        own, frozen = (
            "/".join([*place[:split], part, *place[split:], last])
            for part in ("policy", "reference")
        )
        np.testing.assert_array_equal(weights[frozen], x)
        assert (weights[own] != x).any(), own
    paths = [path for path in specs if "policy/" in path]
    assert paths and all(
        specs[path] == specs[path.replace("policy", "reference")] for path in paths
    )
