"""Rotary positions in Hugging Face's config.json, to and from `DecoderConfig`."""

from collections.abc import Mapping
from typing import Any

from experiments.interchange.hugging_face_values import CONFIG, number
from experiments.models.decoder_config import DecoderConfig
from meshpar.errors import ConfigError, shown

_NAMES = {
    "rope_factor": "factor",
    "rope_length": "original_max_position_embeddings",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
}
"""{field of `DecoderConfig`: its name in a config.json}."""

_FIELDS = {
    "default": (),
    "linear": ("rope_factor",),
    "llama3": tuple(_NAMES),
}
"""{kind of rotary positions: the fields that it has}."""

_OTHERS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def rope_json(config: DecoderConfig) -> dict[str, Any]:
    """The entries of config.json for rotary positions."""
    entries: dict[str, Any] = {"rope_theta": config.rope_theta}
    if config.window_rope_theta:
        entries["rope_local_base_freq"] = config.window_rope_theta
    if config.rope_factor != 1:
        kind = "llama3" if config.rope_length else "linear"
        values = {_NAMES[field]: getattr(config, field) for field in _FIELDS[kind]}
        entries["rope_scaling"] = {"rope_type": kind} | values
    return entries


def rope_fields(
    description: Mapping[str, Any], theta: float, local_theta: float = 0.0
) -> dict[str, Any]:
    """Fields of `DecoderConfig` for rotary positions.

    Args:
      description: the config.json.
      theta: the default of the model's base.
      local_theta: the default of the base in layers with a window; 0 for models in
        which all layers have the same.

    Raises:
      ConfigError: positions that the decoder does not have.
    """
    table = _table(description, "rope_parameters")
    table = table or _table(description, "rope_scaling")
    whole, local = table, {}
    if local_theta and table.keys() & {"full_attention", "sliding_attention"}:
        whole, local = (
            _table(table, f"{layers}_attention") for layers in ("full", "sliding")
        )
    fields = _scaled(description, whole)
    fields["rope_theta"] = number(
        whole, "rope_theta", number(description, "rope_theta", theta)
    )
    if local_theta:
        if _scaled(description, local):
            raise ConfigError(
                f"{CONFIG}: {shown(repr(local))}: layers with a window support only "
                "rope_type='default'"
            )
        default = number(description, "rope_local_base_freq", local_theta)
        fields["window_rope_theta"] = number(local, "rope_theta", default)
    return fields


def _table(description: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a config.json; empty if there is none."""
    table = description.get(name) or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{CONFIG}: {name}={shown(repr(table))}: use a table")
    return table


def _scaled(
    description: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, float]:
    """The fields by which wavelengths are changed; none for the default kind."""
    kind = table.get("rope_type", table.get("type", "default"))
    known = _FIELDS.get(kind) if isinstance(kind, str) else None
    part = table.get("partial_rotary_factor", 1)
    if known is None or table.keys() - {*_OTHERS, *_NAMES.values()} or part != 1:
        raise ConfigError(
            f"rotary positions of another kind than {', '.join(_FIELDS)} are not "
            f"supported: {shown(repr(table))}"
        )
    fields = {}
    for field in known:
        default = None
        if field == "rope_length":  # Transformers takes them in this order.
            default = number(description, "max_position_embeddings", 2048)
        fields[field] = number(table, _NAMES[field], default)
        if fields[field] is None:
            raise ConfigError(
                f"{CONFIG}: {shown(repr(table))} lacks {_NAMES[field]!r}; write it"
            )
    return fields
