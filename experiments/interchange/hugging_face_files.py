"""Files of transformers: JSON, the index of weights, and safetensors, read strictly."""

import dataclasses
import json
import math
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from meshpar.errors import ConfigError, shown

WEIGHTS = "model.safetensors"

_BUFFERS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Names of arrays in old files that are not weights."""

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": jnp.bfloat16}
"""{dtype of safetensors that becomes float32 weights: that of numpy}."""

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
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, of which a part is read when it is needed.

    Attributes:
      path: the file.
      name: of the tensor in the file.
      dtype: of its numbers.
      shape: its shape, row after row in the file.
      offset: of its first byte in the file.
    """

    path: pathlib.Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def rows(self, first: int, end: int) -> "StoredTensor":
        """The rows from `first` to before `end`."""
        width = self.dtype.itemsize * math.prod(self.shape[1:])
        shape, offset = (end - first, *self.shape[1:]), self.offset + first * width
        return dataclasses.replace(self, shape=shape, offset=offset)

    def mapped(self, mode: str = "r") -> np.ndarray:
        """The tensor as a map of its file; what is not touched takes no memory."""
        return np.memmap(self.path, self.dtype, mode, self.offset, self.shape)


def stored_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """{name: tensor} of a file, without buffers.

    Raises:
      ConfigError: a dtype that holds no float weights.
    """
    with safetensors.safe_open(path, framework="numpy"):
        pass  # It checks the header and all offsets.
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, tensors = json.loads(file.read(size)), {}
    for name, about in header.items():
        if name == "__metadata__" or _BUFFERS.fullmatch(name):
            continue
        if (dtype := about["dtype"]) not in _DTYPES:
            raise ConfigError(
                f"{path}: {shown(name)} is {dtype}; convert the weights to one of "
                f"{', '.join(_DTYPES)}"
            )
        offset = 8 + size + about["data_offsets"][0]
        kind, shape = np.dtype(_DTYPES[dtype]), tuple(about["shape"])
        tensors[name] = StoredTensor(path, name, kind, shape, offset)
    return tensors


def new_tensors(
    path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor]:
    """Makes a file of safetensors for float32 tensors, which are zeros at first.

    Args:
      path: the file.
      shapes: {name: shape}.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first, kind = 0, np.dtype("<f4")
    for name, shape in shapes.items():
        end = first + kind.itemsize * math.prod(shape)
        header[name] = dict(dtype="F32", shape=shape, data_offsets=[first, end])
        first = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The numbers begin at a multiple of 8.
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + first)
    return stored_tensors(path)
