"""Shape, dtype and dim names of a model's variables."""

import dataclasses
import math
from typing import Any

STACKED_DIM = "layers"
"""Name of the first dim of variables that hold one row for each layer."""

LOAD_DIM = "expert_load"
"""Name of the dim of biases that balance experts: their gradient is a load."""


def follows_load(names: tuple[Any, ...] | None) -> bool:
    """Whether dim names belong to a bias that balances experts (`ops.experts`).

    Its gradient is the load of each expert, and no slope of the loss: it is exact only
    in the parameter's own dtype, and counts for no norm of gradients.
    """
    return names is not None and LOAD_DIM in names


@dataclasses.dataclass(frozen=True)
class Param:
    """One variable of a model.

    Attributes:
      shape: logical shape.
      dtype: dtype.
      names: dim names; None if it has none.
      trained: whether it has a gradient and optimizer state. A frozen parameter has
        neither.
      is_state: whether it is no parameter: running statistics, counters, constants. It
        keeps its dtype inside the loss, is never trained, and may stay unnamed.
      is_stacked: whether its first dim is known to be that of the layers, even if it
        has no names.
    """

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None
    trained: bool = True
    is_state: bool = False
    is_stacked: bool = False

    @property
    def kind(self) -> str:
        """The kind of variable, as plans and reports name it."""
        if self.is_state:
            return "state"
        return "parameter" if self.trained else "frozen"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
