"""Weights under the names of Hugging Face's transformers, and back.

In this file `param` and `path` belong to this repository, `tensor` and `name` to
transformers; `hugging_face_tensors.py` says how the ones are made of the others.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.interchange.hugging_face_config import config_json, decoder_config
from experiments.interchange.hugging_face_files import (
    WEIGHTS,
    StoredTensor,
    new_tensors,
    read_json,
    stored_tensors,
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
from meshpar.checkpoint.blocks import Blocks, Index, block_shape
from meshpar.checkpoint.weights import is_finite
from meshpar.errors import ConfigError, shown


def imported(
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
) -> dict[str, Blocks]:
    """The weights {path: float32 array} of a decoder, read where they are used.

    Args:
      config: the decoder.
      shapes: {path: shape} of its weights.
      stored: {name: tensor} as transformers stores them.

    Raises:
      ConfigError: a tensor that is missing, of another shape, or not known; or, in
        reading, one that is not finite.
    """
    tensors = tensors_of(config)
    missing, unknown = tensors.keys() - stored.keys(), stored.keys() - tensors.keys()
    for verb, names in (("lacks", missing), ("also has", unknown)):
        if names:
            raise ConfigError(
                f"the model {verb} {shown(', '.join(sorted(names)[:5]))}; {CONFIG} "
                "belongs to other weights"
            )
    for name, (tensor, index) in tensors.items():
        found, shape = stored[name].shape, _shape_of(tensor, index, shapes)
        if found != shape:
            raise ConfigError(
                f"{name} is {found}, not {shape}; {CONFIG} belongs to other weights"
            )
    places = _places(config, shapes)
    return {path: _weight(shapes[path], places[path], stored) for path in shapes}


class _Place(NamedTuple):
    """The place of a parameter, or of one layer or expert of it, in a tensor.

    Attributes:
      name: of the tensor.
      shape: of the parameter, without layers and experts.
      first: number of the element of the tensor with which it begins.
      strides: how many elements of the tensor a step along each dim is.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]

    def extent(self, index: Index) -> tuple[int, int]:
        """(first element, end) of the piece of the tensor that holds a part."""
        pairs = list(zip(index, self.strides, strict=True))
        first = self.first + sum(dim.start * stride for dim, stride in pairs)
        steps = ((dim.stop - dim.start - 1) * stride for dim, stride in pairs)
        return first, first + sum(steps) + 1

    def view(self, piece: np.ndarray, index: Index) -> np.ndarray:
        """The part itself, as a view of this piece."""
        shape = [dim.stop - dim.start for dim in index]
        strides = [piece.itemsize * stride for stride in self.strides]
        return np.ndarray(shape, piece.dtype, piece, 0, strides)

    @property
    def order(self) -> list[int]:
        """The dims, from the outermost in the file to the innermost."""
        return sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])


def _places(
    config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[tuple[int, ...], _Place]]:
    """{path: {(layer, expert), (layer,) or (): its place}} of a decoder."""
    places: dict[str, dict[tuple[int, ...], _Place]] = {path: {} for path in shapes}
    for name, (tensor, index) in tensors_of(config).items():
        own = [shapes[path][len(index) :] for path in tensor.paths]
        widths = [math.prod(shape[tensor.inputs :]) for shape in own]
        rows, first = math.prod(own[0][: tensor.inputs]), 0
        step_in, step_out = (1, rows) if tensor.transposed else (sum(widths), 1)
        for path, shape, width in zip(tensor.paths, own, widths, strict=True):
            inputs, outputs = shape[: tensor.inputs], shape[tensor.inputs :]
            strides = (*_strides(inputs, step_in), *_strides(outputs, step_out))
            places[path][index] = _Place(name, shape, first * step_out, strides)
            first += width
    return places


def _strides(shape: Sequence[int], step: int) -> list[int]:
    """The elements between neighbours along each dim, row after row."""
    return [step * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _weight(
    shape: tuple[int, ...],
    places: Mapping[tuple[int, ...], _Place],
    stored: Mapping[str, StoredTensor],
) -> Blocks:
    """A parameter that is read from the tensors that hold it."""

    def read(index: Index) -> np.ndarray:
        part = np.empty([dim.stop - dim.start for dim in index], np.float32)
        for row, place, own in _inside(places, index):
            tensor = stored[place.name]
            view = place.view(tensor.elements(*place.extent(own)), own)
            if not is_finite(view):
                raise ConfigError(
                    f"{tensor.file.path}: {tensor.name} holds NaN or infinite numbers, "
                    "which are no weights; download or convert the model again"
                )
            part[row] = view
        return part

    lead, place = next(iter(places.items()))
    block = block_shape(place.shape, np.float32, place.order)
    return Blocks(shape, np.dtype(np.float32), (*(1 for _ in lead), *block), read)


def _inside(
    places: Mapping[tuple[int, ...], _Place], index: Index
) -> Iterator[tuple[tuple[int, ...], _Place, Index]]:
    """The layers and experts of a part of a parameter.

    Yields:
      The row of the part, its place, and the index of the part in one row.
    """
    num_leading = len(next(iter(places)))
    leading, own = index[:num_leading], index[num_leading:]
    for found in itertools.product(*(range(dim.start, dim.stop) for dim in leading)):
        row = (i - dim.start for i, dim in zip(found, leading, strict=True))
        yield tuple(row), places[found], own


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
    shapes: Mapping[str, tuple[int, ...]],
    parts: Iterable[tuple[str, Index, np.ndarray]],
) -> list[str]:
    """Writes a folder that `transformers` loads; returns the names of its tensors.

    Args:
      folder: where to write.
      config: the decoder.
      shapes: {path: shape} of its weights.
      parts: (path, place, part) of the weights, which together are all of them.

    Raises:
      ConfigError: transformers has no such decoder.
    """
    description = config_json(config)
    tensors, places = tensors_of(config), _places(config, shapes)
    names = {name: _shape_of(*made, shapes) for name, made in tensors.items()}
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{WEIGHTS}.partial"
    try:
        files = new_tensors(partial, names)
        for path, index, part in parts:
            for row, place, own in _inside(places[path], index):
                with files[place.name].changed(*place.extent(own)) as piece:
                    place.view(piece, own)[...] = part[row]
        partial.replace(folder / WEIGHTS)
    except BaseException:
        partial.unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
    return list(names)


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
