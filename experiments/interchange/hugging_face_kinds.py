"""The models of Hugging Face's transformers that the decoder can be."""

from typing import Any

from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from meshpar.errors import ConfigError

KINDS = ("gpt2", "llama", "mixtral", "qwen3_moe")


def _required(kind: str, config: DecoderConfig) -> dict[str, Any]:
    """{field or property of a decoder: its value} if it is of a kind."""
    if kind == "gpt2":
        same = {"kv_heads": config.heads, "head_dim": config.embed // config.heads}
        return GPT2_KIND | same | {"num_experts": 0, "window": 0}
    defaults = DecoderConfig()
    names = *(name for name in GPT2_KIND if name != "tied"), "window"
    llama = {name: getattr(defaults, name) for name in names}
    if kind == "llama":
        return llama | {"num_experts": 0}
    # Transformers drops no tokens, and shares no experts.
    names = "shared_experts", "router_score", "weight_scale", "router_nodes"
    mixture = {name: getattr(defaults, name) for name in (*names, "router_bias")}
    mixture |= {"num_experts": max(1, config.num_experts), "routing": "dropless"}
    if kind == "mixtral":
        return llama | mixture | {"normalize_weights": True}
    return llama | mixture | {"qk_norm": True}


def kind_of(config: DecoderConfig) -> str:
    """The model of transformers that a decoder is: one of `KINDS`.

    Raises:
      ConfigError: a decoder that is none of them, with the fields that differ.
    """
    differences = []
    for kind in KINDS:
        required = _required(kind, config)
        fields = [k for k, value in required.items() if getattr(config, k) != value]
        if not fields:
            return kind
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)
        differences.append(f"{kind} has no {values}")
    raise ConfigError(f"Hugging Face has no such decoder: {'; '.join(differences)}")
