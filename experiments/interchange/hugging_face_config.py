"""Hugging Face's config.json of GPT-2 and Llama, to and from `DecoderConfig`."""

import functools
from collections.abc import Mapping
from typing import Any

from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.recipes import allowed
from experiments.recipes.errors import ConfigError
from meshpar.errors import nearest, shown

CONFIG = "config.json"
KINDS = ("gpt2", "llama")


def kind_of(config: DecoderConfig) -> str:
    """The model of transformers that a decoder is: gpt2 or llama.

    Raises:
      ConfigError: a decoder that is neither, with the fields that differ.
    """
    gpt2 = GPT2_KIND | {"kv_heads": config.heads}
    defaults = DecoderConfig()
    llama = {name: getattr(defaults, name) for name in GPT2_KIND if name != "tied"}
    differences = []
    for kind, required in (("gpt2", gpt2), ("llama", llama)):
        fields = [k for k, value in required.items() if getattr(config, k) != value]
        if not fields:
            return kind
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)
        differences.append(f"{kind} has no {values}")
    raise ConfigError(f"Hugging Face has no such decoder: {'; '.join(differences)}")


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder.

    Raises:
      ConfigError: transformers has no such decoder.
    """
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
    _check_values(
        description,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "tie_word_embeddings": (True,),
        },
    )
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


def _llama_fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DecoderConfig`; the defaults are those of transformers."""
    get = functools.partial(_number, description)
    heads, embed = get("num_attention_heads", 32), get("hidden_size", 4096)
    rope = description.get("rope_parameters") or description.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{CONFIG}: rope_parameters={shown(repr(rope))}: use a table")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(
            f"rotary positions of another kind than the default are not supported: "
            f"{shown(repr(rope))}"
        )
    _check_values(
        description,
        {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "head_dim": (embed // heads, None),
        },
    )
    return dict(
        vocab=get("vocab_size", 32000),
        length=get("max_position_embeddings", 2048),
        depth=get("num_hidden_layers", 32),
        embed=embed,
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        mlp=get("intermediate_size", 11008),
        tied=description.get("tie_word_embeddings") or False,
        norm_eps=get("rms_norm_eps", 1e-6),
        rope_theta=_number(rope, "rope_theta", get("rope_theta", 10_000.0)),
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
    fields_of = {"gpt2": _gpt2_fields, "llama": _llama_fields}[kind]
    fields = fields_of(description)
    for name, value in fields.items():
        allowed.check(f"model.{name}", value)
    try:
        return DecoderConfig(**fields)
    except ValueError as error:
        raise ConfigError(f"{CONFIG}: {error}") from error
