"""Hugging Face's config.json, to and from `DecoderConfig`.

For GPT-2, Llama, Mixtral and Qwen3-MoE.
"""

import functools
from collections.abc import Mapping
from typing import Any

from experiments.interchange.hugging_face_kinds import KINDS, kind_of
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.recipes.config import Config
from meshpar.errors import ConfigError, nearest, shown
from meshpar.runs.config import check_setting

CONFIG = "config.json"
_MIXTURES = ("mixtral", "qwen3_moe")


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder.

    Raises:
      ConfigError: transformers has no such decoder.
    """
    kind = kind_of(config)
    shared = dict(
        model_type=kind,
        vocab_size=config.vocab,
        tie_word_embeddings=config.tied,
        dtype="float32",
    )
    if kind == "gpt2":
        return shared | dict(
            architectures=["GPT2LMHeadModel"],
            n_positions=config.length,
            n_embd=config.embed,
            n_layer=config.depth,
            n_head=config.heads,
            n_inner=config.mlp,
            activation_function="gelu_new",
            layer_norm_epsilon=config.norm_eps,
        )
    return shared | dict(
        max_position_embeddings=config.length,
        hidden_size=config.embed,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        hidden_act="silu",
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        **_own_json(kind, config),
    )


def _own_json(kind: str, config: DecoderConfig) -> dict[str, Any]:
    """The fields in which Llama and its kin differ."""
    if kind == "llama":
        return dict(
            architectures=["LlamaForCausalLM"],
            intermediate_size=config.mlp,
            attention_bias=False,
            mlp_bias=False,
        )
    if kind == "mixtral":
        return dict(
            architectures=["MixtralForCausalLM"],
            intermediate_size=config.mlp,
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
            sliding_window=None,
        )
    return dict(
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=config.mlp,
        num_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        norm_topk_prob=config.normalize_weights,
        attention_bias=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


_SUPPORTED: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
    },
    "llama": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    "mixtral": {"hidden_act": ("silu",), "sliding_window": (None,)},
    "qwen3_moe": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
}
"""{kind: {name in config.json: the values that the decoder supports}}."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": dict(
        vocab_size=32000,
        max_position_embeddings=2048,
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
    ),
    "mixtral": dict(
        vocab_size=32000,
        max_position_embeddings=131_072,
        num_hidden_layers=32,
        hidden_size=4096,
        num_key_value_heads=8,
        intermediate_size=14336,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": dict(
        vocab_size=151_936,
        max_position_embeddings=32_768,
        num_hidden_layers=24,
        hidden_size=2048,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        experts=128,
        num_experts_per_tok=8,
    ),
}
"""{kind: {name in config.json: the default of transformers}}."""


def _check_values(
    description: Mapping[str, Any], supported: Mapping[str, tuple]
) -> None:
    """Raises ConfigError for a value that the decoder does not support."""
    for name, values in supported.items():
        if name in description and description[name] not in values:
            raise ConfigError(
                f"{name}={shown(repr(description[name]))}: only {values[0]!r} is "
                "supported"
            )


def _number(description: Mapping[str, Any], name: str, default: Any) -> Any:
    """A number of a config.json; null stands for the default.

    Raises:
      ConfigError: another kind of value, or a size below 1.
    """
    value = description.get(name)
    if value is None:
        return default
    whole = isinstance(default, int)
    is_number = isinstance(value, int if whole else (int, float))
    if not is_number or isinstance(value, bool) or (whole and value < 1):
        kind = "a whole number of at least 1" if whole else "a number"
        raise ConfigError(f"{CONFIG}: {name}={shown(repr(value))}: use {kind}")
    return value if whole else float(value)


def _gpt2_fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DecoderConfig`; the defaults are those of transformers."""
    get = functools.partial(_number, description)
    embed = get("n_embd", 768)
    return dict(
        vocab=get("vocab_size", 50257),
        length=get("n_positions", 1024),
        depth=get("n_layer", 12),
        embed=embed,
        heads=get("n_head", 12),
        kv_heads=get("n_head", 12),
        mlp=get("n_inner", 4 * embed),
        norm_eps=get("layer_norm_epsilon", 1e-5),
        **GPT2_KIND,
    )


def _llama_fields(kind: str, description: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DecoderConfig` of Llama and its kin."""
    defaults = _DEFAULTS[kind]

    def get(name: str, default: Any = None) -> Any:
        return _number(description, name, defaults.get(name, default))

    heads, embed = get("num_attention_heads", 32), get("hidden_size")
    head_dim = get("head_dim", max(1, embed // heads))
    rope = description.get("rope_parameters") or description.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{CONFIG}: rope_parameters={shown(repr(rope))}: use a table")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(
            f"rotary positions of another kind than the default are not supported: "
            f"{shown(repr(rope))}"
        )
    width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    fields = dict(
        vocab=get("vocab_size"),
        length=get("max_position_embeddings"),
        depth=get("num_hidden_layers"),
        embed=embed,
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        head_width=0 if head_dim * heads == embed else head_dim,
        mlp=get(width),
        tied=description.get("tie_word_embeddings") or False,
        norm_eps=get("rms_norm_eps"),
        rope_theta=_number(rope, "rope_theta", get("rope_theta")),
    )
    if kind not in _MIXTURES:
        return fields
    written = [x for x in ("num_experts", "num_local_experts") if x in description]
    normalize = description.get("norm_topk_prob") or False
    return fields | dict(
        qk_norm=kind == "qwen3_moe",
        num_experts=_number(description, "".join(written[:1]), defaults["experts"]),
        experts_per_token=get("num_experts_per_tok"),
        normalize_weights=normalize if kind == "qwen3_moe" else True,
        routing="dropless",
    )


def decoder_config(description: Any) -> DecoderConfig:
    """The decoder that a config.json describes.

    Args:
      description: its content, any JSON value.

    Raises:
      ConfigError: a decoder that this repository does not have, with the values.
    """
    if not isinstance(description, Mapping):
        raise ConfigError(
            f"{CONFIG} is {shown(repr(description))}; use the table that transformers "
            "writes"
        )
    kind = description.get("model_type")
    if kind not in KINDS:
        raise ConfigError(
            f"model_type={shown(repr(kind))} ({nearest(shown(str(kind)), KINDS)})"
        )
    _check_values(description, _SUPPORTED[kind])
    is_gpt2 = kind == "gpt2"
    fields = _gpt2_fields(description) if is_gpt2 else _llama_fields(kind, description)
    for name, value in fields.items():
        check_setting(f"model.{name}", value, kind=Config)
    try:
        return DecoderConfig(**fields)
    except ValueError as error:
        raise ConfigError(f"{CONFIG}: {error}") from error
