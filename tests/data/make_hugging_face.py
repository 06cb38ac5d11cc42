"""Makes the small random models beside this file, with transformers and torch.

pip install -e ".[hugging-face]" && python tests/data/make_hugging_face.py
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 12))


def randomized(models):
    """The models with weights that are large enough to matter."""
    for model in models.values():
        model.eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
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


def main():
    """Writes a folder for each."""
    for name, model in (dense() | mixtures()).items():
        folder = HERE / f"hugging_face_{name}"
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits
        np.savez(folder / "logits.npz", tokens=TOKENS, logits=logits.numpy())


if __name__ == "__main__":
    main()
