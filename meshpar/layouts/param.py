"""A parameter's shape, dtype and dim names."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Param:
    """Shape, dtype and dim names of one parameter; names is None if it has none."""

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
