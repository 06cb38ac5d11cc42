"""Recipes of published models at full size, with their hyperparameters and source.

Papers give batches in millions of tokens; the recipes give them in sequences, rounded
to numbers that divide over many devices. Compute is bfloat16, master weights float32.
"""

import dataclasses
from collections.abc import Callable

from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.recipes.config import Config, OptimizerConfig

MILLION, BILLION = 10**6, 10**9

_GPT = DecoderConfig(vocab=50257, init_std=0.02, **GPT2_KIND)
_LLAMA = DecoderConfig(vocab=32000, init_std=0.02)
LOSS_BLOCK = 256
"""Tokens of a sequence whose logits are in memory at once; no effect on the values."""


def _config(
    name: str,
    model: DecoderConfig,
    *,
    learning_rate: float,
    batch_size: int,
    total_tokens: int,
    warmup_steps: int = 0,
    warmup_tokens: int = 0,
    eps: float,
) -> Config:
    step_tokens = batch_size * model.length
    model = dataclasses.replace(model, loss_block=LOSS_BLOCK)
    optimizer = OptimizerConfig(
        learning_rate=learning_rate,
        warmup_steps=warmup_steps or round(warmup_tokens / step_tokens),
        eps=eps,
    )
    return Config(
        name,
        model=model,
        optimizer=optimizer,
        compute_dtype="bfloat16",
        batch_size=batch_size,
        steps=round(total_tokens / step_tokens),
        evaluate_every=1000,
        checkpoint_every=1000,
    )


def _gpt(
    name: str,
    depth: int,
    embed: int,
    heads: int,
    length: int,
    learning_rate: float,
    batch_size: int,
) -> Config:
    """A GPT model with the hyperparameters of the GPT-3 model of that size.

    The learning rates of GPT-2 were never published.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019),
      table 2; Brown et al., GPT-3, arXiv:2005.14165, table 2.1 and appendix B.
    """
    model = dataclasses.replace(
        _GPT,
        depth=depth,
        embed=embed,
        heads=heads,
        kv_heads=heads,
        mlp=4 * embed,
        length=length,
    )
    return _config(
        name,
        model,
        learning_rate=learning_rate,
        batch_size=batch_size,
        total_tokens=300 * BILLION,
        warmup_tokens=375 * MILLION,
        eps=1e-8,
    )


def _llama2(
    name: str, depth: int, embed: int, heads: int, kv_heads: int, mlp: int, rate: float
) -> Config:
    """A Llama 2 model.

    Source: Touvron et al., Llama 2, arXiv:2307.09288, section 2.2 and table 1.
    """
    model = dataclasses.replace(
        _LLAMA,
        depth=depth,
        embed=embed,
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        length=4096,
    )
    return _config(
        name,
        model,
        learning_rate=rate,
        batch_size=1024,
        total_tokens=2000 * BILLION,
        warmup_steps=2000,
        eps=1e-5,
    )


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
    return _config(
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


def gpt2_124m() -> Config:
    """GPT-2 small, with the hyperparameters of GPT-3 125M."""
    return _gpt("gpt2-124m", 12, 768, 12, 1024, 6e-4, 512)


def gpt2_1_5b() -> Config:
    """GPT-2 XL, with the hyperparameters of GPT-3 1.3B."""
    return _gpt("gpt2-1.5b", 48, 1600, 25, 1024, 2e-4, 1024)


def gpt3_175b() -> Config:
    """GPT-3 with dense attention in all layers; the original alternates with sparse."""
    return _gpt("gpt3-175b", 96, 12288, 96, 2048, 0.6e-4, 1536)


def llama_1b() -> Config:
    """TinyLlama, a 1.1B Llama (Zhang et al., arXiv:2401.02385, section 2)."""
    model = dataclasses.replace(
        _LLAMA, depth=22, embed=2048, heads=32, kv_heads=4, mlp=5632, length=2048
    )
    return _config(
        "llama-1b",
        model,
        learning_rate=4e-4,
        batch_size=1024,
        total_tokens=3000 * BILLION,
        warmup_steps=2000,
        eps=1e-8,
    )


def llama2_7b() -> Config:
    """Llama 2 with 7 billion parameters."""
    return _llama2("llama2-7b", 32, 4096, 32, 32, 11008, 3e-4)


def llama2_13b() -> Config:
    """Llama 2 with 13 billion parameters."""
    return _llama2("llama2-13b", 40, 5120, 40, 40, 13824, 3e-4)


def llama2_70b() -> Config:
    """Llama 2 with 70 billion parameters and grouped-query attention."""
    return _llama2("llama2-70b", 80, 8192, 64, 8, 28672, 1.5e-4)


RECIPES: dict[str, Callable[[], Config]] = {
    "gpt2-124m": gpt2_124m,
    "gpt2-1.5b": gpt2_1_5b,
    "gpt3-175b": gpt3_175b,
    "llama-1b": llama_1b,
    "llama2-7b": llama2_7b,
    "llama2-13b": llama2_13b,
    "llama2-70b": llama2_70b,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "deepseek-v3-like": deepseek_v3_like,
}
