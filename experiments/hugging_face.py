"""Weights under the names of Hugging Face's GPT-2 and Llama, and back.

Ours are stacked over layers, with heads as a dim of their own. GPT-2 keeps its matrices
[in, out] and q, k, v as one; Llama keeps them [out, in], as torch.nn.Linear does.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import safetensors
from safetensors.numpy import save_file

from experiments.config import ConfigError
from experiments.hugging_face_config import (
    CONFIG,
    config_json,
    decoder_config,
    kind_of,
)
from experiments.models.decoder import DecoderConfig

WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of theirs, per layer if its name has {}.

    Attributes:
      paths: ours that it holds, side by side along the outputs.
      inputs: leading dims of ours, without layers, that are inputs.
      transposed: whether it is [out, in].
    """

    paths: tuple[str, ...]
    inputs: int = 0
    transposed: bool = False


def _gpt2(_: DecoderConfig) -> dict[str, _Tensor]:
    found = {
        "transformer.wte.weight": _Tensor(("embedding",), 1),
        "transformer.wpe.weight": _Tensor(("positions",), 1),
        "transformer.ln_f.weight": _Tensor(("norm/scale",)),
        "transformer.ln_f.bias": _Tensor(("norm/bias",)),
    }
    norms = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
    for theirs, ours in norms.items():
        for part, path in (("weight", "scale"), ("bias", "bias")):
            name = f"transformer.h.{{}}.{theirs}.{part}"
            found[name] = _Tensor((f"blocks/{ours}/{path}",))
    layers = {
        "attn.c_attn": (("attention/q", "attention/k", "attention/v"), 1),
        "attn.c_proj": (("attention/o",), 2),
        "mlp.c_fc": (("mlp/up",), 1),
        "mlp.c_proj": (("mlp/down",), 1),
    }
    for theirs, (ours, inputs) in layers.items():
        paths = [f"blocks/{path}" for path in ours]
        name = f"transformer.h.{{}}.{theirs}"
        found[f"{name}.weight"] = _Tensor(tuple(paths), inputs)
        found[f"{name}.bias"] = _Tensor(tuple(f"{path}_bias" for path in paths))
    return found


def _llama(config: DecoderConfig) -> dict[str, _Tensor]:
    found = {
        "model.embed_tokens.weight": _Tensor(("embedding",), 1),
        "model.norm.weight": _Tensor(("norm/scale",)),
        "model.layers.{}.input_layernorm.weight": _Tensor(
            ("blocks/attention_norm/scale",)
        ),
        "model.layers.{}.post_attention_layernorm.weight": _Tensor(
            ("blocks/mlp_norm/scale",)
        ),
    }
    if not config.tied:
        found["lm_head.weight"] = _Tensor(("head",), 1, True)
    layers = {f"self_attn.{x}_proj": (f"attention/{x}", 1) for x in "qkv"}
    layers["self_attn.o_proj"] = "attention/o", 2
    layers |= {f"mlp.{x}_proj": (f"mlp/{x}", 1) for x in ("gate", "up", "down")}
    for theirs, (ours, inputs) in layers.items():
        name = f"model.layers.{{}}.{theirs}"
        found[f"{name}.weight"] = _Tensor((f"blocks/{ours}",), inputs, True)
    return found


_TENSORS = {"gpt2": _gpt2, "llama": _llama}


def _names(config: DecoderConfig) -> dict[str, tuple[_Tensor, int | None]]:
    """{their name: (what it holds, its layer)}."""
    found = {}
    for name, tensor in _TENSORS[kind_of(config)](config).items():
        layers = range(config.depth) if "{}" in name else [None]
        found |= {name.format(layer): (tensor, layer) for layer in layers}
    return found


def exported(
    config: DecoderConfig, params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """{their name: array} of a decoder's weights {path: array}.

    Raises:
      ConfigError: they have no such decoder.
    """

    def one(tensor: _Tensor, layer: int | None) -> np.ndarray:
        parts = []
        for path in tensor.paths:
            x = np.asarray(params[path])
            x = x if layer is None else x[layer]
            parts.append(x.reshape(*x.shape[: tensor.inputs], -1))
        joined = np.concatenate(parts, axis=-1)
        matrix = joined.reshape(-1, joined.shape[-1]) if tensor.inputs else joined
        return np.ascontiguousarray(matrix.T if tensor.transposed else matrix)

    return {name: one(*place) for name, place in _names(config).items()}


def imported(
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """The inverse of `exported`, as float32.

    Args:
      config: the decoder.
      shapes: {path: shape} of its weights.
      tensors: {their name: array}.

    Raises:
      ConfigError: a tensor that is missing, of another shape, or not known.
    """
    names = _names(config)
    lacking, unknown = names.keys() - tensors.keys(), tensors.keys() - names.keys()
    for what, which in (("lacks", lacking), ("also has", unknown)):
        if which:
            raise ConfigError(f"the model {what} {', '.join(sorted(which)[:5])}")
    params = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for name, (tensor, layer) in names.items():
        matrix = np.asarray(tensors[name], np.float32)
        matrix = matrix.T if tensor.transposed else matrix
        places = [
            params[p] if layer is None else params[p][layer] for p in tensor.paths
        ]
        widths = [math.prod(place.shape[tensor.inputs :]) for place in places]
        rows = [math.prod(places[0].shape[: tensor.inputs])] if tensor.inputs else []
        if matrix.shape != (*rows, sum(widths)):
            wanted = (*rows, sum(widths))[:: -1 if tensor.transposed else 1]
            raise ConfigError(f"{name} is {tensors[name].shape}, not {wanted}")
        parts = np.split(matrix, np.cumsum(widths)[:-1], axis=-1)
        for place, part in zip(places, parts, strict=True):
            place[...] = part.reshape(place.shape)
    return params


def write(
    folder: pathlib.Path, config: DecoderConfig, params: Mapping[str, np.ndarray]
) -> list[str]:
    """Writes a folder that `transformers` loads; returns the names of its tensors.

    Raises:
      ConfigError: they have no such decoder.
    """
    said, tensors = config_json(config), exported(config, params)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
    return list(tensors)


_BUFFERS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""What old files hold beside weights."""


def read(folder: pathlib.Path) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """The decoder in a folder of theirs, and its tensors under full names.

    Raises:
      ConfigError: no such folder, or a decoder that ours cannot be.
    """
    try:
        said = json.loads((folder / CONFIG).read_text())
        index = folder / f"{WEIGHTS}.index.json"
        files = [WEIGHTS]
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        config, tensors = decoder_config(said), {}
        for file in files:
            with safetensors.safe_open(folder / file, framework="numpy") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    except (OSError, json.JSONDecodeError, safetensors.SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be read: {error}; give a folder with {CONFIG} and "
            f"{WEIGHTS}"
        ) from error
    prefix = {"gpt2": "transformer.", "llama": "model."}[said["model_type"]]
    full = {}
    for name, tensor in tensors.items():
        if _BUFFERS.fullmatch(name) or (name == "lm_head.weight" and config.tied):
            continue
        whole = name.startswith((prefix, "lm_head."))
        full[name if whole else prefix + name] = tensor
    return config, full
