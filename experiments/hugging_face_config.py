"""Hugging Face's description of GPT-2 and Llama models (config.json), and ours."""

from collections.abc import Mapping
from typing import Any

from experiments.config import ConfigError
from experiments.models.decoder import GPT2_KIND, DecoderConfig
from meshpar.errors import nearest

CONFIG = "config.json"
KINDS = ("gpt2", "llama")


def kind_of(config: DecoderConfig) -> str:
    """Which of their models a decoder is, gpt2 or llama.

    Raises:
      ConfigError: a decoder that is neither, with what is in the way.
    """
    gpt2 = GPT2_KIND | {"kv_heads": config.heads}
    plain = DecoderConfig()
    llama = {name: getattr(plain, name) for name in GPT2_KIND if name != "tied"}
    apart = []
    for kind, wanted in (("gpt2", gpt2), ("llama", llama)):
        odd = [name for name, value in wanted.items() if getattr(config, name) != value]
        if not odd:
            return kind
        said = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
        apart.append(f"{kind} has no {said}")
    raise ConfigError(f"Hugging Face has no such decoder: {'; '.join(apart)}")


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """Their description of a decoder (config.json)."""
    shared = dict(
        vocab_size=config.vocab, tie_word_embeddings=config.tied, dtype="float32"
    )
    if kind_of(config) == "gpt2":
        return shared | dict(
            architectures=["GPT2LMHeadModel"],
            model_type="gpt2",
            n_positions=config.length,
            n_embd=config.embed,
            n_layer=config.depth,
            n_head=config.heads,
            n_inner=config.mlp,
            activation_function="gelu_new",
            layer_norm_epsilon=config.norm_eps,
        )
    return shared | dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        max_position_embeddings=config.length,
        hidden_size=config.embed,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.mlp,
        hidden_act="silu",
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        attention_bias=False,
        mlp_bias=False,
    )


def decoder_config(said: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises:
      ConfigError: one that our decoder cannot be, with the values.
    """
    kind = said.get("model_type")
    if kind not in KINDS:
        raise ConfigError(f"model_type={kind!r} ({nearest(str(kind), KINDS)})")
    get = said.get
    if kind == "gpt2":
        wanted = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "tie_word_embeddings": (True,),
        }
        embed = get("n_embd", 768)
        sizes = dict(
            vocab=get("vocab_size", 50257),
            length=get("n_positions", 1024),
            depth=get("n_layer", 12),
            embed=embed,
            heads=get("n_head", 12),
            kv_heads=get("n_head", 12),
            mlp=get("n_inner") or 4 * embed,
            norm_eps=get("layer_norm_epsilon", 1e-5),
            **GPT2_KIND,
        )
    else:
        heads, embed = get("num_attention_heads", 32), get("hidden_size", 4096)
        rope = get("rope_parameters") or get("rope_scaling") or {}
        wanted = {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "head_dim": (embed // heads, None),
        }
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ConfigError(f"rotary positions of another kind: {rope}")
        sizes = dict(
            vocab=get("vocab_size", 32000),
            length=get("max_position_embeddings", 2048),
            depth=get("num_hidden_layers", 32),
            embed=embed,
            heads=heads,
            kv_heads=get("num_key_value_heads") or heads,
            mlp=get("intermediate_size", 11008),
            tied=get("tie_word_embeddings", False),
            norm_eps=get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or get("rope_theta") or 10_000),
        )
    for name, known in wanted.items():
        if name in said and said[name] not in known:
            raise ConfigError(f"{name}={said[name]!r}: ours has {known[0]!r}")
    try:
        return DecoderConfig(**sizes)
    except ValueError as error:
        raise ConfigError(f"{CONFIG}: {error}") from error
