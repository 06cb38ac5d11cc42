"""Weights under the names of Hugging Face's GPT-2 and Llama, and back.

Parameters of this repository are stacked over layers, and heads have a dim of their
own. Files of transformers hold one matrix per layer: GPT-2 as [in, out] with q, k and v
joined, Llama as [out, in] like torch.nn.Linear. In this file `param` and `path` belong
to this repository, `tensor` and `name` to transformers.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors
from safetensors.numpy import save_file

from experiments.interchange.hugging_face_config import (
    CONFIG,
    config_json,
    decoder_config,
    kind_of,
)
from experiments.interchange.hugging_face_files import (
    WEIGHTS,
    read_json,
    read_weights,
    weight_files,
)
from experiments.models.decoder_config import DecoderConfig
from experiments.recipes.errors import ConfigError
from meshpar.errors import shown


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """How one tensor of transformers is made of parameters.

    Attributes:
      paths: the parameters that it joins along the output dim.
      inputs: number of leading dims of a parameter, without layers, that are inputs.
      transposed: whether it is [out, in].
    """

    paths: tuple[str, ...]
    inputs: int = 0
    transposed: bool = False


def _gpt2(_: DecoderConfig) -> dict[str, _Tensor]:
    """{name: tensor}; a name with {} stands for one tensor per layer."""
    tensors = {
        "transformer.wte.weight": _Tensor(("embedding",), 1),
        "transformer.wpe.weight": _Tensor(("positions",), 1),
        "transformer.ln_f.weight": _Tensor(("norm/scale",)),
        "transformer.ln_f.bias": _Tensor(("norm/bias",)),
    }
    norms = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
    for module, path in norms.items():
        for suffix, param in (("weight", "scale"), ("bias", "bias")):
            name = f"transformer.h.{{}}.{module}.{suffix}"
            tensors[name] = _Tensor((f"blocks/{path}/{param}",))
    modules = {
        "attn.c_attn": (("attention/q", "attention/k", "attention/v"), 1),
        "attn.c_proj": (("attention/o",), 2),
        "mlp.c_fc": (("mlp/up",), 1),
        "mlp.c_proj": (("mlp/down",), 1),
    }
    for module, (params, inputs) in modules.items():
        paths = [f"blocks/{param}" for param in params]
        name = f"transformer.h.{{}}.{module}"
        tensors[f"{name}.weight"] = _Tensor(tuple(paths), inputs)
        tensors[f"{name}.bias"] = _Tensor(tuple(f"{path}_bias" for path in paths))
    return tensors


def _llama(config: DecoderConfig) -> dict[str, _Tensor]:
    """{name: tensor}; a name with {} stands for one tensor per layer."""
    tensors = {
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
        tensors["lm_head.weight"] = _Tensor(("head",), 1, True)
    modules = {f"self_attn.{x}_proj": (f"attention/{x}", 1) for x in "qkv"}
    modules["self_attn.o_proj"] = "attention/o", 2
    modules |= {f"mlp.{x}_proj": (f"mlp/{x}", 1) for x in ("gate", "up", "down")}
    for module, (param, inputs) in modules.items():
        name = f"model.layers.{{}}.{module}.weight"
        tensors[name] = _Tensor((f"blocks/{param}",), inputs, True)
    return tensors


_TENSORS = {"gpt2": _gpt2, "llama": _llama}


def _tensors(config: DecoderConfig) -> dict[str, tuple[_Tensor, int | None]]:
    """{name: (tensor, its layer)} of all tensors of a decoder."""
    tensors = {}
    for name, tensor in _TENSORS[kind_of(config)](config).items():
        layers = range(config.depth) if "{}" in name else [None]
        tensors |= {name.format(layer): (tensor, layer) for layer in layers}
    return tensors


def exported(
    config: DecoderConfig, params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors of transformers {name: array} of a decoder.

    Args:
      config: the decoder.
      params: {path: array}, its weights.

    Raises:
      ConfigError: transformers has no such decoder.
    """

    def export(tensor: _Tensor, layer: int | None) -> np.ndarray:
        parts = []
        for path in tensor.paths:
            x = np.asarray(params[path])
            x = x if layer is None else x[layer]
            parts.append(x.reshape(*x.shape[: tensor.inputs], -1))
        joined = np.concatenate(parts, axis=-1)
        matrix = joined.reshape(-1, joined.shape[-1]) if tensor.inputs else joined
        return np.ascontiguousarray(matrix.T if tensor.transposed else matrix)

    return {
        name: export(tensor, layer)
        for name, (tensor, layer) in _tensors(config).items()
    }


def imported(
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """The weights {path: float32 array} of a decoder; inverts `exported`.

    Args:
      config: the decoder.
      shapes: {path: shape} of its weights.
      arrays: {name: array} as transformers stores them.

    Raises:
      ConfigError: a tensor that is missing, of another shape, or not known.
    """
    tensors = _tensors(config)
    missing, unknown = tensors.keys() - arrays.keys(), arrays.keys() - tensors.keys()
    for verb, names in (("lacks", missing), ("also has", unknown)):
        if names:
            raise ConfigError(
                f"the model {verb} {shown(', '.join(sorted(names)[:5]))}; {CONFIG} "
                "belongs to other weights"
            )
    for name, (tensor, layer) in tensors.items():
        _check_shape(name, tensor, layer, shapes, arrays[name].shape)
    params = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for name, (tensor, layer) in tensors.items():
        matrix = np.asarray(arrays[name], np.float32)
        matrix = matrix.T if tensor.transposed else matrix
        views = [
            params[path] if layer is None else params[path][layer]
            for path in tensor.paths
        ]
        widths = [math.prod(view.shape[tensor.inputs :]) for view in views]
        parts = np.split(matrix, np.cumsum(widths)[:-1], axis=-1)
        for view, part in zip(views, parts, strict=True):
            view[...] = part.reshape(view.shape)
    return params


def _check_shape(
    name: str,
    tensor: _Tensor,
    layer: int | None,
    shapes: Mapping[str, tuple[int, ...]],
    found: tuple[int, ...],
) -> None:
    """Raises ConfigError unless a tensor has the shape that its parameters need."""
    own = [shapes[path][layer is not None :] for path in tensor.paths]
    rows = [math.prod(own[0][: tensor.inputs])] if tensor.inputs else []
    shape = (*rows, sum(math.prod(each[tensor.inputs :]) for each in own))
    expected = shape[::-1] if tensor.transposed else shape
    if found != expected:
        raise ConfigError(
            f"{name} is {found}, not {expected}; {CONFIG} belongs to other weights"
        )


def write(
    folder: pathlib.Path, config: DecoderConfig, params: Mapping[str, np.ndarray]
) -> list[str]:
    """Writes a folder that `transformers` loads; returns the names of its tensors.

    Args:
      folder: where to write.
      config: the decoder.
      params: {path: array}, its weights.

    Raises:
      ConfigError: transformers has no such decoder.
    """
    description, arrays = config_json(config), exported(config, params)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
    return list(arrays)


def read(folder: pathlib.Path) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """Reads a folder of transformers: the decoder, and {full name: array}.

    Raises:
      ConfigError: no such folder, or a decoder that this repository does not have.
    """
    try:
        description = read_json(folder / CONFIG)
        config, arrays = decoder_config(description), {}
        for file in weight_files(folder):
            arrays |= read_weights(folder / file)
    except ConfigError:
        raise
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be read: {shown(str(error))}; give a folder with "
            f"{CONFIG} and {WEIGHTS}"
        ) from error
    prefix = {"gpt2": "transformer.", "llama": "model."}[description["model_type"]]
    full = {}
    for name, array in arrays.items():
        if name == "lm_head.weight" and config.tied:
            continue
        complete = name.startswith((prefix, "lm_head."))
        full[name if complete else prefix + name] = array
    return config, full
