"""Recipes: a function per run that returns its whole configuration (`--recipe`)."""

import dataclasses
from collections.abc import Callable

from experiments import published
from experiments.config import Config, ConfigError
from experiments.models.decoder import GPT2_KIND, DecoderConfig
from experiments.models.linen_decoder import KIND as LINEN_KIND
from meshpar.errors import nearest


def bytes_llama() -> Config:
    """Byte-level Llama-style decoder on the standard library's text (the default)."""
    return Config("bytes-llama")


def bytes_gpt2() -> Config:
    """Byte-level GPT-2-style decoder: learned positions, LayerNorm, GELU, tied head."""
    model = DecoderConfig(vocab=0, kv_heads=4, mlp=512, **GPT2_KIND)
    return Config("bytes-gpt2", model=model)


def bytes_linen() -> Config:
    """Byte-level decoder in Flax Linen."""
    model = DecoderConfig(vocab=0, kv_heads=4, mlp=512, **LINEN_KIND)
    return Config("bytes-linen", framework="linen", model=model)


def tiny() -> Config:
    """A model for tests: trains in seconds."""
    model = DecoderConfig(
        vocab=0, length=32, depth=2, embed=32, heads=4, kv_heads=2, mlp=64
    )
    return dataclasses.replace(
        Config("tiny", model=model),
        batch_size=16,
        steps=20,
        evaluate_every=10,
        checkpoint_every=5,
        evaluation_batches=2,
        sample_tokens=20,
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "bytes-llama": bytes_llama,
    "bytes-gpt2": bytes_gpt2,
    "bytes-linen": bytes_linen,
    "tiny": tiny,
} | published.RECIPES


def get(name: str) -> Config:
    """Returns the configuration of a recipe.

    Raises:
      ConfigError: there is no such recipe; lists those that exist.
    """
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r} ({nearest(name, RECIPES)})")
    return RECIPES[name]()


def default_layout(num_devices: int) -> str:
    """A layout that mixes tensor, fsdp and data, in this order, over the devices."""
    sizes, left = {"tensor": 1, "fsdp": 1}, num_devices
    for axis in sizes:
        if left % 2 == 0:
            sizes[axis], left = 2, left // 2
    return f"data={left},fsdp={sizes['fsdp']},tensor={sizes['tensor']}"
