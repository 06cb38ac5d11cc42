"""Weights under the names of Hugging Face's transformers, and back.

In this file `param` and `path` belong to this repository, `tensor` and `name` to
transformers; `hugging_face_tensors.py` says how the ones are made of the others.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.interchange.hugging_face_config import config_json, decoder_config
from experiments.interchange.hugging_face_files import (
    WEIGHTS,
    StoredTensor,
    read_json,
    stored_tensors,
    weight_files,
    write_weights,
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
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of transformers (name, array) of a decoder, one by one.

    Args:
      config: the decoder.
      params: {path: array}, its weights.

    Raises:
      ConfigError: transformers has no such decoder.
    """

    def export(tensor: Tensor, index: tuple[int, ...]) -> np.ndarray:
        parts = []
        for path in tensor.paths:
            x = np.asarray(params[path], np.float32)[index]
            parts.append(x.reshape(*x.shape[: tensor.inputs], -1))
        joined = np.concatenate(parts, axis=-1)
        matrix = joined.reshape(-1, joined.shape[-1]) if tensor.inputs else joined
        return np.ascontiguousarray(matrix.T if tensor.transposed else matrix)

    tensors = tensors_of(config).items()
    return ((name, export(tensor, index)) for name, (tensor, index) in tensors)


def imported(
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights (path, float32 array) of a decoder one by one; inverts `exported`.

    Only the one that is given, and a tensor of which it is made, are in memory.

    Args:
      config: the decoder.
      shapes: {path: shape} of its weights.
      stored: {name: tensor} as transformers stores them.

    Raises:
      ConfigError: a tensor that is missing, of another shape, or not known.
    """
    tensors = tensors_of(config)
    missing, unknown = tensors.keys() - stored.keys(), stored.keys() - tensors.keys()
    for verb, names in (("lacks", missing), ("also has", unknown)):
        if names:
            raise ConfigError(
                f"the model {verb} {shown(', '.join(sorted(names)[:5]))}; {CONFIG} "
                "belongs to other weights"
            )
    names_of: dict[str, list[str]] = {path: [] for path in shapes}
    for name, (tensor, index) in tensors.items():
        found, shape = stored[name].shape, _shape_of(tensor, index, shapes)
        if found != shape:
            raise ConfigError(
                f"{name} is {found}, not {shape}; {CONFIG} belongs to other weights"
            )
        for path in tensor.paths:
            names_of[path].append(name)

    def weight(path: str) -> np.ndarray:
        param = np.empty(shapes[path], np.float32)
        for name in names_of[path]:
            tensor, index = tensors[name]
            matrix = stored[name].read()
            matrix = matrix.T if tensor.transposed else matrix
            own = [shapes[other][len(index) :] for other in tensor.paths]
            widths = [math.prod(shape[tensor.inputs :]) for shape in own]
            parts = np.split(matrix, np.cumsum(widths)[:-1], axis=-1)
            view = param[index]
            view[...] = parts[tensor.paths.index(path)].reshape(view.shape)
        return param

    return ((path, weight(path)) for path in shapes)


def _shape_of(
    tensor: Tensor, index: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of a tensor that is made of parameters of some shapes."""
    own = [shapes[path][len(index) :] for path in tensor.paths]
    rows = [math.prod(own[0][: tensor.inputs])] if tensor.inputs else []
    shape = (*rows, sum(math.prod(each[tensor.inputs :]) for each in own))
    return shape[::-1] if tensor.transposed else shape


def write(
    folder: pathlib.Path,
    config: DecoderConfig,
    params: Mapping[str, np.ndarray],
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
    own = {path: x.shape for path, x in params.items()}
    tensors = tensors_of(config).items()
    shapes = {name: _shape_of(*made, own) for name, made in tensors}
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / WEIGHTS, shapes, (array for _, array in arrays))
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
    return list(shapes)


def read(folder: pathlib.Path) -> tuple[DecoderConfig, dict[str, StoredTensor]]:
    """Opens a folder of transformers: the decoder, and {full name: tensor}.

    Raises:
      ConfigError: no such folder, or a decoder that this repository does not have.
    """
    try:
        description = read_json(folder / CONFIG)
        config, tensors = decoder_config(description), {}
        for file in weight_files(folder):
            tensors |= stored_tensors(folder / file)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} cannot be read: {shown(str(error))}; give a folder with "
            f"{CONFIG} and {WEIGHTS}"
        ) from error
    prefix, full = prefix_of(config), {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tied:
            continue
        complete = name.startswith((prefix, "lm_head."))
        full[name if complete else prefix + name] = tensor
    if description["model_type"] == PHI3:
        full = _separated(full, config)
    return config, full


def _separated(
    tensors: Mapping[str, StoredTensor], config: DecoderConfig
) -> dict[str, StoredTensor]:
    """The tensors of a Llama, from those of Phi-3, which joins some along the outputs.

    Raises:
      ConfigError: a matrix with another number of outputs.
    """
    separated = {}
    for name, tensor in tensors.items():
        parts = parts_of(name, config)
        if not parts:
            separated[name] = tensor
        elif (total := sum(parts.values())) != tensor.shape[0]:
            raise ConfigError(
                f"{name} has {tensor.shape[0]} outputs, not {total}; {CONFIG} belongs "
                "to other weights"
            )
        first = 0
        for part, size in parts.items():
            separated[part] = tensor.rows(first, size)
            first += size
    return separated
