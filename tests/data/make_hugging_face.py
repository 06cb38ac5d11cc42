"""Makes the small random models beside this file, with transformers and torch.

pip install -e ".[hugging-face]" && python tests/data/make_hugging_face.py
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 12))


def models():
    """{name: model} with weights that are large enough to matter."""
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
    for model in made.values():
        model.eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
    return made


def main():
    """Writes a folder for each."""
    for name, model in models().items():
        folder = HERE / f"hugging_face_{name}"
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits
        np.savez(folder / "logits.npz", tokens=TOKENS, logits=logits.numpy())


if __name__ == "__main__":
    main()
