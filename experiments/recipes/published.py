"""Recipes of published dense models at full size: hyperparameters and source.

Papers give batches in millions of tokens; the recipes give them in sequences, rounded
to numbers that divide over many devices. Compute is bfloat16, master weights float32.
"""

import dataclasses
from collections.abc import Callable

from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.recipes.config import Config
from experiments.recipes.optimizers import OptimizerConfig

MILLION, BILLION = 10**6, 10**9

_GPT = DecoderConfig(vocab=50257, init_std=0.02, **GPT2_KIND)
_LLAMA = DecoderConfig(vocab=32000, init_std=0.02)
LOSS_BLOCK = 256
"""Tokens of a sequence whose logits are in memory at once; no effect on the values."""


def make_config(
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
    """A recipe from a paper's figures; the warm-up is in steps or in tokens."""
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
    return make_config(
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
    return make_config(
        name,
        model,
        learning_rate=rate,
        batch_size=1024,
        total_tokens=2000 * BILLION,
        warmup_steps=2000,
        eps=1e-5,
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
    return make_config(
        "llama-1b",
        model,
        learning_rate=4e-4,
        batch_size=1024,
        total_tokens=3000 * BILLION,
        warmup_steps=2000,
        eps=1e-8,
    )


def llama3_2_3b() -> Config:
    """Llama 3.2 with 3 billion parameters, without the scaling of rotary wavelengths.

    Its learning rate was not published; this is that of the smallest Llama 2.

    Source: Meta, model card of Llama 3.2 (2024), for shape and number of tokens.
    """
    model = dataclasses.replace(
        _LLAMA,
        vocab=128_256,
        depth=28,
        embed=3072,
        heads=24,
        kv_heads=8,
        mlp=8192,
        length=8192,
        tied=True,
        rope_theta=500_000.0,
    )
    return make_config(
        "llama3.2-3b",
        model,
        learning_rate=3e-4,
        batch_size=512,
        total_tokens=9000 * BILLION,
        warmup_steps=2000,
        eps=1e-5,
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
    "llama3.2-3b": llama3_2_3b,
    "llama2-7b": llama2_7b,
    "llama2-13b": llama2_13b,
    "llama2-70b": llama2_70b,
}
