"""Models as public scripts write them train as in a plain loop, under every layout.

The loop shares no code with meshpar: jax, optax and Flax alone, on one device.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from outside_models import (
    linen_gpt2,
    linen_lm1b,
    linen_mixer,
    linen_wmt,
    nnx_gemma,
    nnx_stacked,
    nnx_vit,
)
from outside_models.plain_loop import train

import meshpar

STEPS, BATCH = 5, 16
LOSS_ERROR, UPDATE_ERROR = 1e-5, 3e-4

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2, eps=1e-3),
}
"""Adam divides by nearly zero where a gradient is rounding alone: hence the epsilon.

The gradient of a bias that the next LayerNorm removes is one (Mixer's token mixing).
"""


def scalar(result):
    return result[0] if isinstance(result, tuple) else result


@dataclasses.dataclass(frozen=True)
class Outside:
    """A public model, for meshpar and for the plain loop.

    Attributes:
      model: the model for meshpar.
      start: {path: array} -> (plain loss of (parameters, batch), plain parameters).
      flat: plain parameters -> {path: array}.
      make_batch: (seed, rows) -> a batch.
    """

    model: meshpar.Model
    start: Callable[[dict[str, Any]], tuple[Callable, Any]]
    flat: Callable[[Any], dict[str, Any]]
    make_batch: Callable[[int, int], dict[str, np.ndarray]]


def linen(module, file, *inputs):
    batch = file.make_batch(0, 2)

    def start(params):
        def loss(params, batch):
            apply = functools.partial(module.apply, {"params": params})
            return scalar(file.loss_fn(apply, batch))

        return loss, traverse_util.unflatten_dict(params, sep="/")

    return Outside(
        meshpar.from_linen(module, file.loss_fn, tuple(batch[name] for name in inputs)),
        start,
        functools.partial(traverse_util.flatten_dict, sep="/"),
        file.make_batch,
    )


def nnx_model(make, file, layers=None):
    def path(keys):
        return "/".join(map(str, keys))

    def start(params):
        with nnx.use_eager_sharding(False):
            module = make(nnx.Rngs(0))
        graphdef, state, rest = nnx.split(module, nnx.Param, ...)
        filled = [(k, v.replace(params[path(k)])) for k, v in nnx.to_flat_state(state)]

        def loss(state, batch):
            return scalar(file.loss_fn(nnx.merge(graphdef, state, rest), batch))

        return loss, nnx.from_flat_state(filled)

    def flat(state):
        return {path(k): v.get_value() for k, v in nnx.to_flat_state(state)}

    model = meshpar.from_nnx(make, layers or file.loss_fn)
    return Outside(model, start, flat, file.make_batch)


LM1B = ("inputs", "inputs_position", "inputs_segmentation")
STACK = meshpar.LayerStack(
    stack="layers",
    embed=lambda model, batch: model.embed(batch["tokens"]),
    layer=lambda layer, x: layer(x),
    head_loss=lambda model, x, batch: nnx_stacked.masked_loss(model.logits(x), batch),
)
MODELS = {
    "lm1b": lambda: linen(
        linen_lm1b.TransformerLM(linen_lm1b.TransformerConfig()), linen_lm1b, *LM1B
    ),
    "lm1b_tied": lambda: linen(
        linen_lm1b.TransformerLM(
            linen_lm1b.TransformerConfig(logits_via_embedding=True)
        ),
        linen_lm1b,
        *LM1B,
    ),
    "wmt": lambda: linen(linen_wmt.Transformer(), linen_wmt, "inputs", "targets"),
    "gpt2": lambda: linen(
        linen_gpt2.FlaxGPT2LMHeadModule(),
        linen_gpt2,
        *("input_ids", "attention_mask", "position_ids"),
    ),
    "mixer": lambda: linen(linen_mixer.MlpMixer(), linen_mixer, "image"),
    "vit": lambda: nnx_model(
        lambda rngs: nnx_vit.VisionTransformer(rngs=rngs), nnx_vit
    ),
    "gemma": lambda: nnx_model(
        lambda rngs: nnx_gemma.Transformer(
            nnx_gemma.ShardingConfig.fsdp_tp_sharding(), rngs=rngs
        ),
        nnx_gemma,
    ),
    "stacked": lambda: nnx_model(
        lambda rngs: nnx_stacked.StackedLM(rngs=rngs), nnx_stacked, STACK
    ),
    "stacked_jit": lambda: nnx_model(
        lambda rngs: nnx_stacked.StackedLM(rngs=rngs), nnx_stacked
    ),
}
"""{name: makes the model}."""

EVERYWHERE = ["data=8", "data=2,microbatches=4"]
NAMED = [
    *("fsdp=8,zero=1", "fsdp=8,zero=2", "fsdp=8,zero=3", "tensor=2"),
    *("data=2,fsdp=2,tensor=2", "fsdp=2,tensor=2,microbatches=2"),
]
STAGED = [
    *("pipe=2,microbatches=4", "pipe=4,data=2,microbatches=4,schedule=gpipe"),
    *("pipe=2,fsdp=2,tensor=2,microbatches=2", "fsdp=4,remat=full"),
    *(
        "pipe=2,data=2,microbatches=4,virtual_stages=2,save=residuals",
        "data=2,remat=dots",
    ),
]
GPT2_PATHS = ",".join(
    [
        'paths."c_(attn|fc)/kernel"=mlp/embed',
        "paths.c_proj/kernel=embed/mlp",
        "paths.wte/embedding=vocab/embed",
        'allow="bias|scale|wpe"',
    ]
)
LAYOUTS = {
    "wmt": EVERYWHERE,
    "mixer": EVERYWHERE,
    "vit": EVERYWHERE,
    "gpt2": [*EVERYWHERE, *(f"{layout},{GPT2_PATHS}" for layout in NAMED)],
    "stacked": [*EVERYWHERE, *NAMED, *STAGED],
}
"""{model: layouts}; models that name their dims have `EVERYWHERE` and `NAMED`."""

DEFAULT = {
    ("lm1b", "data=2,fsdp=2,tensor=2", "adam"),
    ("lm1b_tied", "fsdp=8,zero=1", "sgd"),
    ("wmt", "data=2,microbatches=4", "adam"),
    ("gpt2", f"tensor=2,{GPT2_PATHS}", "sgd"),
    ("mixer", "data=8", "sgd"),
    ("vit", "data=2,microbatches=4", "sgd"),
    ("gemma", "data=2,fsdp=2,tensor=2", "adam"),
    ("stacked", "fsdp=8,zero=3", "adam"),
    ("stacked", "pipe=2,fsdp=2,tensor=2,microbatches=2", "adam"),
    ("stacked", "fsdp=4,remat=full", "sgd"),
    ("stacked_jit", "fsdp=8,zero=3", "adam"),
}
"""Rows that run by default; `-m slow` runs all others."""


def rows():
    product = [
        (name, layout, optimizer)
        for name in MODELS
        for layout in LAYOUTS.get(name, [*EVERYWHERE, *NAMED])
        for optimizer in OPTIMIZERS
    ]
    assert DEFAULT <= set(product)
    for row in product:
        marks = () if row in DEFAULT else pytest.mark.slow
        yield pytest.param(*row, marks=marks, id="-".join(row).split(",paths")[0])


@pytest.fixture(autouse=True)
def scripts_broadcast_as_they_like():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def outside(name):
    return MODELS[name]()


@functools.cache
def batches(name):
    return [outside(name).make_batch(seed, BATCH) for seed in range(STEPS)]


@functools.cache
def plain(name, optimizer):
    """Initial parameters, losses and updates of the plain loop."""
    public = outside(name)
    initial = jax.device_get(jax.jit(public.model.init)(jax.random.key(0)))
    loss, params = public.start(initial)
    losses, params = train(loss, params, OPTIMIZERS[optimizer](), batches(name))
    return initial, losses, updates(initial, public.flat(params))


def updates(initial, params):
    return {path: np.asarray(x) - initial[path] for path, x in params.items()}


@pytest.mark.parametrize("name, layout, optimizer", list(rows()))
def test_public_models_train_as_in_a_plain_loop(name, layout, optimizer):
    initial, want_losses, want = plain(name, optimizer)
    layout = meshpar.layouts.parse(layout)
    program = meshpar.lower(
        outside(name).model,
        OPTIMIZERS[optimizer](),
        layout,
        batches(name)[0],
        devices=jax.devices()[: layout.num_devices],
    )
    state, losses = program.init(0), []
    for batch in batches(name):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, want_losses, rtol=LOSS_ERROR)
    got = updates(initial, jax.device_get(program.in_model_order(state).params))
    assert got.keys() == want.keys()
    norms = {path: np.linalg.norm(x) for path, x in want.items()}
    floor = 1e-2 * np.linalg.norm(list(norms.values()))
    errors = {
        path: np.linalg.norm(got[path] - x) / max(norms[path], floor)
        for path, x in want.items()
    }
    assert max(errors.values()) < UPDATE_ERROR, errors
    assert program.violations() == []


def test_the_loops_learn_and_models_differ():
    """The comparison is of training that moves every model."""
    for name, _, optimizer in itertools.islice(sorted(DEFAULT), 3):
        _, losses, moved = plain(name, optimizer)
        assert losses[-1] < losses[0]
        assert sum(np.linalg.norm(x) for x in moved.values()) > 0.1
