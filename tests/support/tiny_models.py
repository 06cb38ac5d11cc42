"""Tiny models and batches that the tests share."""

import dataclasses
import functools

import jax
import numpy as np
import optax

import meshpar
from experiments import recipes
from experiments.models import linen_decoder
from experiments.recipes.config import Config

LENGTH, BATCH = 16, 16


OLMO2 = dict(
    kv_heads=4,
    attention_bias="qkv",
    qk_norm=True,
    qk_norm_joint=True,
    norm_place="after",
)
"""Norms over all heads and after the layers, as OLMo 2 has, and biases of Qwen2."""

GEMMA3 = dict(
    kv_heads=4,
    tied=True,
    activation="geglu",
    embedding_scale=32**0.5,
    norm_place="both",
    norm_plus_one=True,
    qk_norm=True,
    score_width=12,
    window=3,
    global_every=2,
    window_rope_theta=50.0,
    rope_factor=4.0,
    rope_length=64,
)
"""All that Gemma 3 has, with the rotary positions of Llama 3."""


def config(framework: str = "nnx", **model) -> Config:
    tiny = recipes.tiny()
    sizes = dict(
        vocab=64, length=LENGTH, depth=2, embed=32, heads=8, kv_heads=8, mlp=64
    )
    kind = linen_decoder.KIND if framework == "linen" else {}
    decoder = dataclasses.replace(tiny.model, **(sizes | kind | model))
    return dataclasses.replace(tiny, framework=framework, model=decoder)


def model(framework: str = "nnx", **sizes) -> meshpar.Model:
    return config(framework, **sizes).make_model()


def plain_model(**sizes) -> meshpar.Model:
    """A model without a layered form, which the compiler alone runs."""
    return linen_decoder.language_model(config("linen", **sizes).model, layers="")


@functools.cache
def standard_model() -> meshpar.Model:
    """Eight layers for pipelines, grouped heads that four devices can split."""
    return model(depth=8, kv_heads=4)


def batch(seed: int = 0, size: int = BATCH) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 64, (size, LENGTH + 1), np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def lower(layout, of=None, optimizer=None, **options) -> meshpar.TrainProgram:
    """Lowers the tiny model onto as many devices as the layout fills."""
    if isinstance(layout, str):
        layout = meshpar.layouts.parse(layout)
    return meshpar.lower(
        of or model(),
        optimizer or optax.adamw(1e-2),
        layout,
        batch(),
        devices=jax.devices()[: layout.num_devices],
        **options,
    )


def lower_standard(layout, of=None, **options) -> meshpar.TrainProgram:
    """Lowers with the optimizer that files share, so that they share compiled programs.

    Adam divides by nearly zero where a gradient is rounding alone: hence the epsilon.
    """
    optimizer = optax.adamw(1e-2, eps=1e-2)
    return lower(layout, of or standard_model(), optimizer, clip_norm=1.0, **options)


def host(tree):
    return jax.tree.map(np.asarray, tree)


def relative_error(got: dict, want: dict) -> float:
    """Largest relative error (L2) over the tensors of two dicts."""
    assert got.keys() == want.keys()
    errors = [np.linalg.norm(got[k] - want[k]) / np.linalg.norm(want[k]) for k in want]
    return float(np.max(errors))  # Unlike max, it keeps NaN.
