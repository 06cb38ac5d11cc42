"""Small recipes: byte-level models that train in seconds or minutes on a CPU."""

import dataclasses
from collections.abc import Callable

from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.linen_decoder import KIND as LINEN_KIND
from experiments.recipes.config import Config


def bytes_llama() -> Config:
    """Byte-level Llama-style decoder on the standard library's text (the default)."""
    return Config("bytes-llama")


def bytes_gpt2() -> Config:
    """Byte-level GPT-2-style decoder: learned positions, LayerNorm, GELU, tied head."""
    model = DecoderConfig(vocab=0, kv_heads=4, mlp=512, **GPT2_KIND)
    return Config("bytes-gpt2", model=model)


def bytes_linen() -> Config:
    """Byte-level GPT-2-style decoder without biases, in Flax Linen."""
    model = DecoderConfig(vocab=0, kv_heads=4, mlp=512, **LINEN_KIND)
    return Config("bytes-linen", framework="linen", model=model)


def bytes_moe() -> Config:
    """Byte-level mixture of 8 experts, 2 for each token: FLOPs as in bytes-llama."""
    model = DecoderConfig(vocab=0, mlp=192, num_experts=8, routing="dropless")
    return Config("bytes-moe", model=model)


def tiny() -> Config:
    """A model for tests; it trains in seconds."""
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
    "bytes-moe": bytes_moe,
    "tiny": tiny,
}
