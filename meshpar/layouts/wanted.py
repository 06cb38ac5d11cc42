"""Requests of a user to a search over layouts: items to have, names to leave out."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.errors import LayoutError
from meshpar.layouts.grammar import REGEXES, RULES, read_items
from meshpar.layouts.layout import DEFAULTS, Layout
from meshpar.layouts.pipeline_options import UNUSED


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A user's requirements on layouts: `require` and `forbid`.

    Attributes:
      required: items that a layout must have, such as {"zero": 3}.
      forbidden: names of axes that must have size 1, and of options that must have
        their default.
    """

    required: Mapping[str, Any]
    forbidden: frozenset[str]

    @classmethod
    def of(cls, require: str, forbid: str) -> "Wanted":
        """Reads items such as "zero=3,remat=full" and names such as "tensor,pipe".

        Raises:
          LayoutError: a name that no layout has, or one that is required as well.
        """
        required = read_items(require, DEFAULTS) if require else {}
        forbidden = frozenset(name for name in forbid.split(",") if name)
        for name in forbidden:
            if name not in DEFAULTS:
                known = ", ".join(DEFAULTS)
                raise LayoutError(f"forbid={name}: layouts have {known}")
            if name in required:
                raise LayoutError(f"{name} is required and forbidden: drop one of them")
        return cls(required, forbidden)

    def keeps(self, layout: Layout) -> bool:
        """Whether a layout is as wanted."""
        as_required = all(
            (layout.zero_level if name == "zero" else getattr(layout, name)) == value
            for name, value in self.required.items()
            if name not in (*RULES, *REGEXES)
        )
        return as_required and all(
            getattr(layout, name) in (DEFAULTS[name], UNUSED.get(name))
            for name in self.forbidden
        )
