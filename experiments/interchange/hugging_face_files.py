"""Files of transformers: JSON, the index of weights, and safetensors, read strictly."""

import dataclasses
import json
import math
import pathlib
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import safetensors

from meshpar.errors import ConfigError, shown

WEIGHTS = "model.safetensors"

_BUFFERS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Names of arrays in old files that are not weights."""

_DTYPES = ("F64", "F32", "F16", "BF16")
"""Names of the dtypes of safetensors that become float32 weights."""

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
    """A tensor in a file, which is read when it is needed.

    Attributes:
      path: the file.
      name: of the tensor in the file.
      shape: of `rows`.
      rows: (the first, the one after the last) of those that are meant; None for all.
    """

    path: pathlib.Path
    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None

    def read(self) -> np.ndarray:
        """The rows, in the dtype of the file."""
        with safetensors.safe_open(self.path, framework="numpy") as opened:
            if self.rows is None:
                return opened.get_tensor(self.name)
            return opened.get_slice(self.name)[slice(*self.rows)]


def stored_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """{name: tensor} of a file, without buffers.

    Raises:
      ConfigError: a dtype that holds no float weights.
    """
    tensors = {}
    with safetensors.safe_open(path, framework="numpy") as opened:
        for name in filter(lambda name: not _BUFFERS.fullmatch(name), opened.keys()):
            header = opened.get_slice(name)
            if (dtype := str(header.get_dtype())) not in _DTYPES:
                raise ConfigError(
                    f"{path}: {shown(name)} is {dtype}; convert the weights to one of "
                    f"{', '.join(_DTYPES)}"
                )
            tensors[name] = StoredTensor(path, name, tuple(header.get_shape()))
    return tensors


def write_weights(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Writes a file of safetensors, of which one tensor is in memory at a time.

    Args:
      path: the file.
      shapes: {name: shape}.
      arrays: the tensors in this order, float32.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, shape in shapes.items():
        end = first + 4 * math.prod(shape)
        header[name] = dict(dtype="F32", shape=shape, data_offsets=[first, end])
        first = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The numbers begin at a multiple of 8.
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays:
            file.write(array.astype("<f4", copy=False).data)
