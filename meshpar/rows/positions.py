"""How numbers depend on the positions of sequences whose length is split.

The analysis of rows, applied to positions: each device sees a part of every sequence.
It also refuses numbers that count positions, as each part would count from 0.
"""

from typing import Any

import numpy as np

from meshpar.rows.analysis import RowAnalysis, is_elementwise
from meshpar.rows.shapes import row_dims
from meshpar.rows.values import Fixed, Mixed

COUNTED = Mixed(
    "positions are counted from 0 (or numbers are given for each), which each part of "
    "a sequence would do by itself"
)

_KEEP = frozenset(
    ("broadcast_in_dim", "reshape", "transpose", "squeeze", "random_bits")
)
"""Primitives that make no differences between positions, beside elementwise ones."""


class PositionAnalysis(RowAnalysis):
    """Evaluates jaxprs of a batch whose sequences have a prime length."""

    def constant(self, value: Any) -> Any:
        """A constant of a jaxpr; its numbers may not depend on the position."""
        result = super().constant(value)
        if not isinstance(getattr(value, "dtype", None), np.dtype):
            return result
        for dim in row_dims(value, self.prime):
            x = np.asarray(value)
            if np.any(x != np.take(x, [0], axis=dim)):
                return COUNTED
        return result

    def _fixed(self, eqn: Any, values: list[Any]) -> list[Any]:
        keeps = eqn.primitive.name in _KEEP or (eqn.invars and is_elementwise(eqn))
        if not keeps and any(row_dims(v.aval, self.prime) for v in eqn.outvars):
            return [COUNTED] * len(eqn.outvars)
        return super()._fixed(eqn, values)

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        results = super()._scan(eqn, values)
        if eqn.params["length"] % self.prime:
            return results
        return [COUNTED if isinstance(value, Fixed) else value for value in results]
