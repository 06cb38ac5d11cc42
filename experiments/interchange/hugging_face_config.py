"""Hugging Face's config.json, to and from `DecoderConfig`."""

import functools
from collections.abc import Mapping
from typing import Any

from experiments.interchange.hugging_face_kinds import KINDS, PHI3, kind_of
from experiments.interchange.hugging_face_rope import rope_fields, rope_json
from experiments.interchange.hugging_face_values import (
    CONFIG,
    check_values,
    number,
    switch,
)
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.recipes.config import Config
from meshpar.errors import ConfigError, nearest, shown
from meshpar.runs.config import check_setting

GEMMA3 = "gemma3_text"
_MIXTURES = ("mixtral", "qwen3_moe")
_BIASED = ("llama", "qwen3", "qwen3_moe", "olmo2", GEMMA3)
"""Kinds with a switch for biases of attention."""

_WINDOWS = {"mistral": 4096, PHI3: 0, GEMMA3: 4096}
"""{kind: its default of sliding_window, 0 for none}."""

_WINDOW_THETAS = {GEMMA3: 10_000.0}
"""{kind: its default base of rotary positions in layers with a window}."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    GEMMA3: "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


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
        rms_norm_eps=config.norm_eps,
        **rope_json(config),
        **_own_json(kind, config),
    )


def _own_json(kind: str, config: DecoderConfig) -> dict[str, Any]:
    """The fields in which Llama and its kin differ."""
    own = {"architectures": [_ARCHITECTURES[kind]], "hidden_act": "silu"}
    if kind == "qwen3_moe":
        own |= dict(
            moe_intermediate_size=config.mlp,
            num_experts=config.num_experts,
            norm_topk_prob=config.normalize_weights,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    else:
        own["intermediate_size"] = config.mlp
    if kind == "mixtral":
        own["num_local_experts"] = config.num_experts
    if kind in _MIXTURES:
        own["num_experts_per_tok"] = config.experts_per_token
    if kind in _WINDOWS:
        own["sliding_window"] = config.window or None
    if kind in _BIASED:
        own["attention_bias"] = config.bias or config.attention_bias != "none"
    if kind == "llama":
        own["mlp_bias"] = config.bias
    if kind.startswith("qwen"):
        own["use_sliding_window"] = False
    if kind == GEMMA3:
        own["hidden_activation"] = own.pop("hidden_act") and "gelu_pytorch_tanh"
        own["query_pre_attn_scalar"] = config.score_width or config.head_dim
        own["layer_types"] = _layer_types(config)
    return own


def _layer_types(config: DecoderConfig) -> list[str]:
    """The kind of attention of every layer, in the words of transformers."""
    windows = config.windows * (config.depth // len(config.windows))
    return ["sliding_attention" if size else "full_attention" for size in windows]


_SILU = {"hidden_act": ("silu",), "partial_rotary_factor": (1, None)}

_SUPPORTED: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
    },
    "llama": _SILU,
    "qwen2": _SILU | {"use_sliding_window": (False,)},
    "qwen3": _SILU | {"use_sliding_window": (False,)},
    "mistral": _SILU,
    PHI3: _SILU | {"attention_bias": (False,)},
    "olmo2": _SILU,
    GEMMA3: {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
        "partial_rotary_factor": (1, None),
    },
    "mixtral": _SILU | {"sliding_window": (None,)},
    "qwen3_moe": _SILU
    | {
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
}
"""{kind: {name in config.json: the values that the decoder supports}}."""

_QWEN = dict(
    vocab_size=151_936,
    max_position_embeddings=32_768,
    num_hidden_layers=32,
    hidden_size=4096,
    num_key_value_heads=32,
    intermediate_size=22016,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
)

_LLAMA = dict(
    vocab_size=32000,
    max_position_embeddings=2048,
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
)

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN,
    "qwen3": _QWEN | dict(head_dim=128),
    "mistral": _LLAMA
    | dict(
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        intermediate_size=14336,
    ),
    PHI3: dict(
        vocab_size=32064,
        max_position_embeddings=4096,
        num_hidden_layers=32,
        hidden_size=3072,
        intermediate_size=8192,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
    ),
    "olmo2": _LLAMA | dict(vocab_size=50304, rms_norm_eps=1e-5),
    GEMMA3: dict(
        vocab_size=262_208,
        max_position_embeddings=131_072,
        num_hidden_layers=26,
        hidden_size=2304,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
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


def _gpt2_fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DecoderConfig`; the defaults are those of transformers."""
    get = functools.partial(number, description)
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
        return number(description, name, defaults.get(name, default))

    heads, embed = get("num_attention_heads", 32), get("hidden_size")
    head_dim = get("head_dim", max(1, embed // heads))
    width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    tied = description.get("tie_word_embeddings", defaults.get("tie_word_embeddings"))
    fields = dict(
        vocab=get("vocab_size"),
        length=get("max_position_embeddings"),
        depth=get("num_hidden_layers"),
        embed=embed,
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        head_width=0 if head_dim * heads == embed else head_dim,
        mlp=get(width),
        tied=tied or False,
        norm_eps=get("rms_norm_eps"),
        **rope_fields(
            description, defaults["rope_theta"], _WINDOW_THETAS.get(kind, 0.0)
        ),
    )
    if kind in _BIASED and switch(description, "attention_bias"):
        fields["attention_bias"] = "qkvo"
    if kind in _WINDOWS and description.get("sliding_window", 0) is not None:
        fields["window"] = get("sliding_window", _WINDOWS[kind])
    if kind == "llama" and switch(description, "mlp_bias"):
        if not fields.pop("attention_bias", None):
            raise ConfigError(
                f"{CONFIG}: mlp_bias=True is supported beside attention_bias=True alone"
            )
        fields["bias"] = True
    if kind == "qwen2":
        fields["attention_bias"] = "qkv"
    if kind in ("qwen3", "qwen3_moe"):
        fields["qk_norm"] = True
    if kind == "olmo2":
        fields |= {"qk_norm": True, "qk_norm_joint": True, "norm_place": "after"}
    if kind == GEMMA3:
        fields |= _gemma3_fields(description, embed, head_dim)
    if kind not in _MIXTURES:
        return fields
    written = [x for x in ("num_experts", "num_local_experts") if x in description]
    normalize = description.get("norm_topk_prob") or False
    return fields | dict(
        num_experts=number(description, "".join(written[:1]), defaults["experts"]),
        experts_per_token=get("num_experts_per_tok"),
        normalize_weights=normalize if kind == "qwen3_moe" else True,
        routing="dropless",
    )


def _gemma3_fields(
    description: Mapping[str, Any], embed: int, head_dim: int
) -> dict[str, Any]:
    """The fields in which Gemma 3 differs from Llama."""
    every = number(description, "sliding_window_pattern", 6)
    layers = description.get("layer_types")
    if isinstance(layers, list):
        is_global = "full_attention" in layers
        every = layers.index("full_attention") + 1 if is_global else 0
    width = number(description, "query_pre_attn_scalar", 256)
    return dict(
        global_every=every,
        qk_norm=True,
        norm_place="both",
        norm_plus_one=True,
        activation="geglu",
        embedding_scale=embed**0.5,
        score_width=0 if width == head_dim else width,
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
    check_values(description, _SUPPORTED[kind])
    is_gpt2 = kind == "gpt2"
    fields = _gpt2_fields(description) if is_gpt2 else _llama_fields(kind, description)
    for name, value in fields.items():
        check_setting(f"model.{name}", value, kind=Config)
    try:
        config = DecoderConfig(**fields)
    except ValueError as error:
        raise ConfigError(f"{CONFIG}: {error}") from error
    if description.get("layer_types"):
        check_values(description, {"layer_types": (_layer_types(config),)})
    return config
