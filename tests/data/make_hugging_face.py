"""Makes the small random models beside this file, with transformers and torch.

pip install -e ".[hugging-face]"
PYTHONPATH=tests python tests/data/make_hugging_face.py [NAME ...]
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from support.formula_weights import SHAPES, weight

HERE = pathlib.Path(__file__).parent
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 12))


def randomized(models):
    """The models with weights that are large enough to matter."""
    for model in models.values():
        model.eval()
        for param in model.parameters():
            torch.nn.init.normal_(param, 1.0 if param.ndim == 1 else 0.0, 0.3)
    return models


def dense():
    """{name: model} of those without experts."""
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(
        vocab_size=48, n_positions=16, n_embd=16, n_layer=2, n_head=4, n_inner=40
    )
    llama = transformers.LlamaConfig(
        vocab_size=48,
        max_position_embeddings=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        rms_norm_eps=1e-6,
        rope_theta=1000.0,
    )
    made = {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "llama": transformers.LlamaForCausalLM(llama),
    }
    return randomized(made)


def mixtures():
    """{name: model} of those with experts."""
    torch.manual_seed(0)
    shared = dict(
        vocab_size=48,
        max_position_embeddings=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
    )
    mixtral = transformers.MixtralConfig(
        **shared, head_dim=4, intermediate_size=24, num_local_experts=4
    )
    qwen3 = transformers.Qwen3MoeConfig(
        **shared,
        head_dim=8,
        moe_intermediate_size=12,
        num_experts=6,
        norm_topk_prob=True,
    )
    made = {
        "mixtral": transformers.MixtralForCausalLM(mixtral),
        "qwen3_moe": transformers.Qwen3MoeForCausalLM(qwen3),
    }
    return randomized(made)


_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_GEMMA = {
    "full_attention": dict(rope_type="linear", factor=4.0, rope_theta=500.0),
    "sliding_attention": dict(rope_type="default", rope_theta=50.0),
}
BY_FORMULA = {
    "llama3": ("Llama", dict(head_dim=8, rope_parameters=_LLAMA3)),
    "llama_attention_bias": ("Llama", dict(attention_bias=True)),
    "llama_bias": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=8)),
    "qwen3_bias": ("Qwen3", dict(head_dim=8, attention_bias=True)),
    "phi3": ("Phi3", dict(pad_token_id=0, sliding_window=5)),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "olmo2": ("Olmo2", dict()),
    "gemma3": (
        "Gemma3Text",
        dict(
            num_hidden_layers=4,
            head_dim=8,
            query_pre_attn_scalar=12,
            sliding_window=4,
            sliding_window_pattern=2,
            rope_parameters=_GEMMA,
        ),
    ),
    "gemma3_odd": (
        "Gemma3Text",
        dict(
            num_hidden_layers=3,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=4,
            sliding_window_pattern=2,
            tie_word_embeddings=False,
        ),
    ),
}
"""{name: (family, its own settings)} of models whose weights are a formula."""


def by_formula(family, own):
    """A model whose weights are a formula of their names."""
    sizes = dict(
        vocab_size=24,
        max_position_embeddings=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=20,
        rms_norm_eps=1e-5,
    )
    config = getattr(transformers, f"{family}Config")(**sizes | own)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(torch.tensor(weight(name, list(x.shape))))
    return model


def write_logits(model, folder, tokens):
    """Writes what transformers computes."""
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits
    np.savez(folder / "logits.npz", tokens=tokens, logits=logits.numpy())


def main(wanted):
    """Writes a folder for each."""
    for name, model in (dense() | mixtures()).items():
        if wanted and name not in wanted:
            continue
        folder = HERE / f"hugging_face_{name}"
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        write_logits(model, folder, TOKENS)
    for name, (family, own) in BY_FORMULA.items():
        if wanted and name not in wanted:
            continue
        folder, model = HERE / f"hugging_face_{name}", by_formula(family, own)
        folder.mkdir(exist_ok=True)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        shapes = {name: list(x.shape) for name, x in model.named_parameters()}
        (folder / SHAPES).write_text(json.dumps(shapes))
        write_logits(model, folder, TOKENS[:1] % 24)


if __name__ == "__main__":
    main(sys.argv[1:])
