"""Weights under the names of Hugging Face's transformers, and back.

In this file `param` and `path` belong to this repository, `tensor` and `name` to
transformers; `hugging_face_tensors.py` says how the ones are made of the others.
"""

import json
import math
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors
from safetensors.numpy import save_file

from experiments.interchange.hugging_face_config import config_json, decoder_config
from experiments.interchange.hugging_face_files import (
    WEIGHTS,
    read_json,
    read_weights,
    weight_files,
)
from experiments.interchange.hugging_face_kinds import PHI3
from experiments.interchange.hugging_face_tensors import (
    Tensor,
    parts_of,
    prefix_of,
    tensors_of,
)
from experiments.interchange.hugging_face_values import CONFIG
from experiments.models.decoder_config import DecoderConfig
from meshpar.errors import ConfigError, shown


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

    def export(tensor: Tensor, index: tuple[int, ...]) -> np.ndarray:
        parts = []
        for path in tensor.paths:
            x = np.asarray(params[path])[index]
            parts.append(x.reshape(*x.shape[: tensor.inputs], -1))
        joined = np.concatenate(parts, axis=-1)
        matrix = joined.reshape(-1, joined.shape[-1]) if tensor.inputs else joined
        return np.ascontiguousarray(matrix.T if tensor.transposed else matrix)

    return {
        name: export(tensor, index)
        for name, (tensor, index) in tensors_of(config).items()
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
    tensors = tensors_of(config)
    missing, unknown = tensors.keys() - arrays.keys(), arrays.keys() - tensors.keys()
    for verb, names in (("lacks", missing), ("also has", unknown)):
        if names:
            raise ConfigError(
                f"the model {verb} {shown(', '.join(sorted(names)[:5]))}; {CONFIG} "
                "belongs to other weights"
            )
    for name, (tensor, index) in tensors.items():
        _check_shape(name, tensor, index, shapes, arrays[name].shape)
    params = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for name, (tensor, index) in tensors.items():
        matrix = np.asarray(arrays[name], np.float32)
        matrix = matrix.T if tensor.transposed else matrix
        views = [params[path][index] for path in tensor.paths]
        widths = [math.prod(view.shape[tensor.inputs :]) for view in views]
        parts = np.split(matrix, np.cumsum(widths)[:-1], axis=-1)
        for view, part in zip(views, parts, strict=True):
            view[...] = part.reshape(view.shape)
    return params


def _check_shape(
    name: str,
    tensor: Tensor,
    index: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
    found: tuple[int, ...],
) -> None:
    """Raises ConfigError unless a tensor has the shape that its parameters need."""
    own = [shapes[path][len(index) :] for path in tensor.paths]
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
    prefix, full = prefix_of(config), {}
    for name, array in arrays.items():
        if name == "lm_head.weight" and config.tied:
            continue
        complete = name.startswith((prefix, "lm_head."))
        full[name if complete else prefix + name] = array
    if description["model_type"] == PHI3:
        full = _separated(full, config)
    return config, full


def _separated(
    arrays: Mapping[str, np.ndarray], config: DecoderConfig
) -> dict[str, np.ndarray]:
    """The tensors of a Llama, from those of Phi-3, which joins some along the outputs.

    Raises:
      ConfigError: a matrix with another number of outputs.
    """
    separated = {}
    for name, array in arrays.items():
        parts = parts_of(name, config)
        if len(array) != sum(parts.values()) and len(parts) > 1:
            raise ConfigError(
                f"{name} has {len(array)} outputs, not {sum(parts.values())}; {CONFIG} "
                "belongs to other weights"
            )
        ends = np.cumsum(list(parts.values()))[:-1]
        separated |= zip(parts, np.split(array, ends), strict=True)
    return separated
