"""Files of transformers: JSON, the index of weights, and safetensors, read strictly."""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.data.steady_file import SteadyFile
from meshpar.errors import ConfigError, shown

WEIGHTS = "model.safetensors"

_BUFFERS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Names of arrays in old files that are not weights."""

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": jnp.bfloat16}
"""{name in safetensors: dtype} of those that become float32 weights."""

_FLOAT32 = np.dtype("<f4")

_METADATA = "__metadata__"
"""Key of a header of safetensors that is no tensor."""

_LONGEST_HEADER = 100_000_000
"""Bytes of the longest header, as in the package safetensors."""

_FILE = re.compile(r"[\w-][\w.-]{0,200}\.safetensors")
"""Names of files in the folder itself."""


def weight_files(folder: pathlib.Path) -> list[str]:
    """The names of the files that hold the weights.

    Raises:
      ConfigError: an index of another form, or one that names a file elsewhere.
    """
    index = folder / f"{WEIGHTS}.index.json"
    if not index.exists():
        return [WEIGHTS]
    content = read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    names = list(files.values()) if isinstance(files, dict) else []
    for name in names:
        # An absolute name or one with ../ would read a file outside of the folder.
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise ConfigError(
                f"{index} names the file {shown(repr(name))}; use names of "
                "*.safetensors files that are beside it"
            )
    if not names:
        raise ConfigError(
            f'{index} is no index of weights, {{"weight_map": {{TENSOR: FILE}}}}; '
            f"mend it, or give one {WEIGHTS}"
        )
    return sorted(set(names))


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file; raises ValueError if it is none, OSError if it is missing."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is a folder, a pipe or a device")
    return _parsed(path.read_bytes(), path)


def _parsed(content: bytes, path: pathlib.Path) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no text in UTF-8: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file of safetensors, which is read when it is needed.

    Attributes:
      file: the file.
      name: of the tensor in the file.
      dtype: of the tensor in the file.
      shape: of its rows that are meant.
      start: the byte of the file at which they begin.
    """

    file: SteadyFile
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def rows(self, first: int, number: int) -> "StoredTensor":
        """A part of the rows, of which nothing is read yet."""
        shape = (number, *self.shape[1:])
        row = math.prod(shape[1:]) * self.dtype.itemsize
        return dataclasses.replace(self, shape=shape, start=self.start + first * row)

    def elements(self, first: int, end: int) -> np.ndarray:
        """The elements from `first` to before `end`, row after row, in their dtype.

        Raises:
          DataError: the file is not what it was when it was opened.
        """
        size, start = self.dtype.itemsize, self.start + first * self.dtype.itemsize
        what = f"the tensor {self.name}"
        return np.frombuffer(
            self.file.read(start, (end - first) * size, what), self.dtype
        )


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A float32 tensor of a file that is being written.

    Attributes:
      path: the file.
      start: the byte of the file at which the tensor begins.
    """

    path: pathlib.Path
    start: int

    @contextlib.contextmanager
    def changed(self, first: int, end: int) -> Iterator[np.ndarray]:
        """A context for the elements from `first` to before `end`, written at its end.

        A memory map would end the process where the disk is full.
        """
        begin = self.start + _FLOAT32.itemsize * first
        elements = np.empty(end - first, _FLOAT32)
        with self.path.open("r+b") as file:
            file.seek(begin)
            file.readinto(elements)
            yield elements
            file.seek(begin)
            file.write(elements.data)


def stored_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """{name: tensor} of a file of safetensors, without buffers.

    The package safetensors would map the file into memory.

    Raises:
      ValueError: the file has another form.
      ConfigError: a dtype that holds no float weights.
    """
    file = SteadyFile(path)
    begin, header = _header(file)
    tensors = {}
    for name, entry in header.items():
        if name == _METADATA or _BUFFERS.fullmatch(name):
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: {shown(name)} is no entry of a tensor")
        if (dtype := str(entry.get("dtype"))) not in _DTYPES:
            raise ConfigError(
                f"{path}: {shown(name)} is {shown(dtype)}; convert the weights to "
                f"one of {', '.join(_DTYPES)}"
            )
        shape, place = entry.get("shape"), entry.get("data_offsets")
        if not (_are_sizes(shape) and _are_sizes(place) and len(place) == 2):
            raise ValueError(f"{path}: {shown(name)} has no shape or no place")
        dtype, (start, end) = np.dtype(_DTYPES[dtype]), place
        if end - start != math.prod(shape) * dtype.itemsize or begin + end > file.size:
            raise ValueError(
                f"{path}: {shown(name)} of {shown(str(shape))} is not within the "
                f"{file.size:,} bytes of the file"
            )
        tensors[name] = StoredTensor(file, name, dtype, tuple(shape), begin + start)
    return tensors


def _header(file: SteadyFile) -> tuple[int, dict[str, Any]]:
    """(the byte after it, content) of the header of a file of safetensors."""
    size = 0
    if file.size >= 8:
        (size,) = struct.unpack("<Q", file.read(0, 8, "its header"))
    if not 0 < size <= min(_LONGEST_HEADER, file.size - 8):
        raise ValueError(f"{file.path} is no whole file of safetensors")
    header = _parsed(file.read(8, size, "its header"), file.path)
    if not isinstance(header, dict):
        raise ValueError(f"{file.path} has a header that is no object")
    return 8 + size, header


def _are_sizes(values: Any) -> bool:
    """Whether a value of JSON is a list of whole numbers from 0."""
    return isinstance(values, list) and all(
        type(value) is int and value >= 0 for value in values
    )


def new_tensors(
    path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, NewTensor]:
    """Makes a file of safetensors for float32 tensors, which are zeros at first.

    Args:
      path: the file.
      shapes: {name: shape}.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    first = 0
    for name, shape in shapes.items():
        end = first + _FLOAT32.itemsize * math.prod(shape)
        header[name] = dict(dtype="F32", shape=shape, data_offsets=[first, end])
        first = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The numbers begin at a multiple of 8.
    begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(begin + first)
    del header[_METADATA]
    return {
        name: NewTensor(path, begin + entry["data_offsets"][0])
        for name, entry in header.items()
    }
