"""How numbers depend on the positions of sequences whose length is split.

The analysis of rows, applied to positions: each device sees a part of every sequence,
and would count its positions from 0.
"""

import dataclasses

from meshpar.rows.analysis import RowAnalysis


@dataclasses.dataclass(frozen=True)
class PositionAnalysis(RowAnalysis):
    """Evaluates jaxprs of a batch whose sequences have a prime length.

    Draws have positions in their second dim.
    """

    dim: int = 1
