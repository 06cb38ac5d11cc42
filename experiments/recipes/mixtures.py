"""Recipes of published mixtures of experts, at full size."""

import dataclasses
from collections.abc import Callable

from experiments.models.decoder_config import DecoderConfig
from experiments.recipes.config import Config
from experiments.recipes.published import BILLION, make_config


def _mixture(
    name: str,
    model: DecoderConfig,
    *,
    learning_rate: float,
    batch_size: int,
    total_tokens: int,
    warmup_steps: int = 2000,
    eps: float = 1e-8,
) -> Config:
    """A decoder with mixtures of experts, without dropped tokens."""
    model = dataclasses.replace(model, routing="dropless", init_std=0.02, z_loss=0.0)
    return make_config(
        name,
        model,
        learning_rate=learning_rate,
        batch_size=batch_size,
        total_tokens=total_tokens,
        warmup_steps=warmup_steps,
        eps=eps,
    )


def mixtral_8x7b() -> Config:
    """Mixtral 8x7B: 46.7 billion parameters, 12.9 billion for each token.

    How it was trained was not published: batch, rate and tokens are those of Llama 2.

    Source: Jiang et al., Mixtral of Experts, arXiv:2401.04088, table 1; base of the
      rotary wavelengths and weight of the auxiliary loss: config.json of the release.
    """
    model = DecoderConfig(
        vocab=32000,
        length=32768,
        depth=32,
        embed=4096,
        heads=32,
        kv_heads=8,
        mlp=14336,
        rope_theta=1e6,
        num_experts=8,
        experts_per_token=2,
        balance_loss=0.02,
    )
    return _mixture(
        "mixtral-8x7b",
        model,
        learning_rate=3e-4,
        batch_size=128,
        total_tokens=2000 * BILLION,
        eps=1e-5,
    )


def qwen3_30b_a3b() -> Config:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 billion for each token.

    Batch and rate were not published: they are those of Llama 2.

    Source: Yang et al., Qwen3, arXiv:2505.09388, sections 2, 3.2 and table 2; other
      numbers: config.json of the release.
    """
    model = DecoderConfig(
        vocab=151_936,
        length=4096,
        depth=48,
        embed=2048,
        heads=32,
        kv_heads=4,
        head_width=128,
        qk_norm=True,
        mlp=768,
        rope_theta=1e6,
        norm_eps=1e-6,
        num_experts=128,
        experts_per_token=8,
        balance_loss=0.001,
    )
    return _mixture(
        "qwen3-30b-a3b",
        model,
        learning_rate=3e-4,
        batch_size=1024,
        total_tokens=36_000 * BILLION,
    )


def deepseek_v3_like() -> Config:
    """The mixtures of DeepSeek-V3, in all layers, with grouped-query attention.

    DeepSeek-V3 has multi-head latent attention, which needs less memory, and no experts
    in its first three layers. A bias balances the experts, beside a small loss.

    Source: DeepSeek-V3, arXiv:2412.19437, sections 2.1.2 and 4.2.
    """
    model = DecoderConfig(
        vocab=129_280,
        length=4096,
        depth=61,
        embed=7168,
        heads=128,
        kv_heads=8,
        head_width=128,
        mlp=2048,
        norm_eps=1e-6,
        num_experts=256,
        experts_per_token=8,
        shared_experts=1,
        router_score="sigmoid",
        weight_scale=2.5,
        router_nodes=8,
        nodes_per_token=4,
        router_bias=True,
        balance_loss=0.0001,
    )
    return _mixture(
        "deepseek-v3-like",
        model,
        learning_rate=2.2e-4,
        batch_size=15360,
        total_tokens=14_800 * BILLION,
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "deepseek-v3-like": deepseek_v3_like,
}
