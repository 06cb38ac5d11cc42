"""The forms in which a user gives the data of a run."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshpar.errors import DataError, shown
from meshpar.replicated import Replicated, is_replicated
from meshpar.runs.data import Data, PartData
from meshpar.runs.samples import IndexedData, StreamData


class _Columns(Sequence):
    """Arrays as samples: the i-th rows of all of them, and what has no rows."""

    def __init__(self, arrays: Mapping[str, Any]):
        self._whole = {
            name: x if is_replicated(x) else Replicated(np.asarray(x))
            for name, x in arrays.items()
            if is_replicated(x) or np.ndim(x) == 0
        }
        self._arrays = {
            name: np.asarray(x) for name, x in arrays.items() if name not in self._whole
        }
        sizes = {name: x.shape[:1] for name, x in self._arrays.items()}
        if len(set(sizes.values())) != 1 or () in sizes.values():
            raise DataError(
                f"data: arrays with {shown(str(sizes))} rows; give arrays with the "
                "same number of rows"
            )

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, i: Any) -> dict[str, Any]:
        return self._whole | {name: x[i] for name, x in self._arrays.items()}


def as_data(source: Any, what: str = "data") -> Data:
    """The data of a run.

    Args:
      source: samples as {name: array [samples, ...]}, beside scalars and `Replicated`
        arrays, or as a sequence, which are shuffled anew in every epoch; a
        grain.MapDataset of samples, taken in its order; a grain.IterDataset of samples;
        or a function, as `PartData` has it.
      what: name of the argument, for errors.

    Raises:
      DataError: something else, or no sample.
    """
    if isinstance(source, Data):
        return source
    if grain := sys.modules.get("grain"):
        if isinstance(source, grain.MapDataset):
            return IndexedData(source, in_order=True)
        if isinstance(source, grain.IterDataset):
            return StreamData(source)
    if isinstance(source, Mapping):
        return IndexedData(_Columns(source), in_order=False)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return IndexedData(source, in_order=False)
    if callable(source):
        return PartData(source)
    raise DataError(
        f"{what}={shown(repr(source))}: give {{name: array}}, a sequence of samples, a "
        "grain.MapDataset or grain.IterDataset, or a function (part, number of parts, "
        "position) -> iterator of batches"
    )
