"""How bytes move between devices: in one shot, or step by step around rings."""

import dataclasses
import types
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Rings:
    """What is passed around rings, step by step; over other axes at once.

    Attributes:
      shapes: {axis: the torus that it is}.
      loop: whether the steps of a reduce_scatter are a loop, which is soon compiled,
        for what no compute could hide.
    """

    shapes: Mapping[str, tuple[int, ...]]
    loop: bool = False

    def has(self, axes: tuple[str, ...]) -> bool:
        """Whether what is split over these axes goes around rings."""
        return len(axes) == 1 and axes[0] in self.shapes


NO_RINGS = Rings(types.MappingProxyType({}))
