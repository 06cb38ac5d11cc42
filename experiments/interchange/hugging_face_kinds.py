"""The models of Hugging Face's transformers that the decoder can be."""

from typing import Any

from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from meshpar.errors import ConfigError

PHI3 = "phi3"
"""A Llama or Mistral with joined matrices, which is read and written as those."""

WRITTEN = (
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "olmo2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
)
KINDS = (*WRITTEN, PHI3)
"""Values of `model_type` in config.json."""

_MIXTURES = ("mixtral", "qwen3_moe")


def _required(kind: str, config: DecoderConfig) -> dict[str, Any]:
    """{field or property of a decoder: its value} if it is of a kind."""
    if kind == "gpt2":
        same = {"kv_heads": config.heads, "head_dim": config.embed // config.heads}
        return GPT2_KIND | same | {"num_experts": 0, "window": 0}
    defaults = DecoderConfig()
    names = *GPT2_KIND, "window", "global_every", "qk_norm_joint"
    plain = {name: getattr(defaults, name) for name in names if name != "tied"}
    if kind not in _MIXTURES:
        return plain | {"num_experts": 0} | _own(kind, config)
    # Transformers drops no tokens, and shares no experts.
    names = "shared_experts", "router_score", "weight_scale", "router_nodes"
    mixture = {name: getattr(defaults, name) for name in (*names, "router_bias")}
    mixture |= {"num_experts": max(1, config.num_experts), "routing": "dropless"}
    return plain | mixture | _own(kind, config)


def _own(kind: str, config: DecoderConfig) -> dict[str, Any]:
    """The fields in which a kind differs from a Llama without biases."""
    biases = "none" if config.attention_bias == "qkv" else config.attention_bias
    normed = {"qk_norm": True, "attention_bias": biases}
    own: dict[str, dict[str, Any]] = {
        "llama": {"bias": config.bias, "attention_bias": biases},
        "qwen2": {"attention_bias": "qkv"},
        "qwen3": normed,
        "mistral": {"window": config.window, "window_rope_theta": 0},
        "olmo2": normed | {"qk_norm_joint": True, "norm_place": "after"},
        "gemma3_text": normed
        | dict(
            norm_place="both",
            norm_plus_one=True,
            activation="geglu",
            embedding_scale=config.embed**0.5,
            score_width=config.score_width,
            window=max(1, config.window),
            global_every=config.global_every,
            window_rope_theta=config.window_rope_theta or config.rope_theta,
        ),
        "mixtral": {"normalize_weights": True},
        "qwen3_moe": normed,
    }
    return own[kind]


def kind_of(config: DecoderConfig) -> str:
    """The model of transformers that a decoder is: one of `WRITTEN`.

    Raises:
      ConfigError: a decoder that is none of them, with the fields that differ.
    """
    differences = []
    for kind in WRITTEN:
        required = _required(kind, config)
        fields = [k for k, value in required.items() if getattr(config, k) != value]
        if not fields:
            return kind
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)
        differences.append(f"{kind} has no {values}")
    raise ConfigError(f"Hugging Face has no such decoder: {'; '.join(differences)}")
