"""Evaluation of batches of any number of rows, such as the last one of a data set.

The loss of such a batch is that of its own rows, whatever it makes of them: no row is
added that counts.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.layouts.layout import Layout
from meshpar.lowering.base import Lowering
from meshpar.lowering.batches import dividing_axes
from meshpar.lowering.totals import Totals
from meshpar.models.model_scope import model_scope
from meshpar.replicated import map_rows

_BATCH = "batch"
"""Name of the dim of activations that holds the rows of a batch."""


class Evaluation(NamedTuple):
    """How batches with some number of rows are evaluated.

    Attributes:
      lowering: the pure functions of the model under its layout.
      layout: the layout, whose axes split activations as far as the rows divide.
      copies: copies of the rows that are evaluated together. Where parts of a batch are
        evaluated apart, the loss has been proved to be a mean over rows, or to come
        with a weight. So copies fill the parts, and the sums over all of them are
        divided by their number.
    """

    lowering: Lowering
    layout: Layout
    copies: int = 1

    @classmethod
    def of(cls, lowering: Lowering, num_rows: int, whole: int) -> "Evaluation":
        """The evaluation of batches with `num_rows`; `whole` is training's number."""
        layout = lowering.layout
        if num_rows == whole:
            return cls(lowering, layout)
        if layout.pipe > 1 or layout.replica > 1:
            unit = layout.batch_unit
            return cls(lowering, layout, unit // math.gcd(num_rows, unit))
        rules, sizes = layout.activation_rules, layout.sizes
        axes = dividing_axes(rules[_BATCH], num_rows, sizes)
        rules = dict(layout.activations) | {_BATCH: axes or None}
        return cls(lowering, dataclasses.replace(layout, activations=rules))

    def filled(self, batch: Any) -> Any:
        """The batch with all copies of its rows."""

        def repeated(x: Array) -> Array:
            return jnp.concatenate([x] * self.copies)

        return batch if self.copies == 1 else map_rows(repeated, batch)

    def totals(self, params: Params, batch: Any) -> Totals:
        """Totals of the rows.

        Args:
          params: {path: array}.
          batch: what `filled` returns.
        """
        return self.lowering.evaluate(params, batch).divided(self.copies)

    def __call__(self, params: Params, batch: Any) -> Totals:
        """Totals of the rows of a batch."""
        with model_scope(self.layout, self.lowering.mesh):
            return self.totals(params, self.filled(batch))
