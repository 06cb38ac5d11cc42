"""The trained weights of a program as one float32 vector on the host."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshpar.arrays import Params
from meshpar.errors import MeshparError
from meshpar.islands.key_range import Slice, split
from meshpar.lowering.train_program import TrainProgram


@dataclasses.dataclass(frozen=True)
class WeightsVector:
    """Between {path: sharded array} and one vector [N].

    Attributes:
      like: {path: ShapeDtypeStruct with sharding} of the trained weights, in order.
    """

    like: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def size(self) -> int:
        """N."""
        return sum(math.prod(leaf.shape) for leaf in self.like.values())

    def slices(self, parts: int) -> list[Slice]:
        """The vector cut into key ranges."""
        return split("weights", self.size, min(parts, self.size))

    def pack(self, arrays: Params) -> np.ndarray:
        """The vector of arrays {path: array}; others than the trained are left out."""
        found = jax.device_get([arrays[path] for path in self.like])
        return np.concatenate([np.asarray(x, np.float32).reshape(-1) for x in found])

    def cut(self, vector_N: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a vector, on the host."""
        arrays, start = {}, 0
        for path, leaf in self.like.items():
            stop = start + math.prod(leaf.shape)
            part = vector_N[start:stop].reshape(leaf.shape)
            arrays[path], start = part.astype(leaf.dtype), stop
        return arrays

    def unpack(self, vector_N: np.ndarray) -> Params:
        """The arrays of a vector, on their devices."""
        return {
            path: jax.device_put(part, self.like[path].sharding)
            for path, part in self.cut(vector_N).items()
        }

    def without_devices(self) -> "WeightsVector":
        """The vector for processes that have other devices."""
        return WeightsVector(
            {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                for path, leaf in self.like.items()
            }
        )


def weights_vector(program: TrainProgram) -> WeightsVector:
    """Makes the vector of a program's trained weights.

    Raises:
      MeshparError: weights that are not floating point.
    """
    like: dict[str, Any] = program.plan.trained(program.abstract_params)
    for path, leaf in like.items():
        if not np.issubdtype(leaf.dtype, np.floating) and leaf.dtype != "bfloat16":
            raise MeshparError(f"{path} is {leaf.dtype}: islands push floating point")
    return WeightsVector(like)
