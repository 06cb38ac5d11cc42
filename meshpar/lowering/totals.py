"""Running totals of a step's loss and metrics, over microbatches, shards and replicas.

Every part of a batch gives `Totals`. They are added, reduced over mesh axes, and become
the metrics of the whole batch at the end. `Gradients` holds them beside the gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.contracts.purposes import purpose
from meshpar.lowering.state import Metrics
from meshpar.metrics import (
    KINDS,
    WEIGHT,
    Last,
    LossResult,
    Max,
    Mean,
    divided,
    masked,
    nonzero,
    weight_name,
)


class Weighted(NamedTuple):
    """A mean over the batch, weighted by the weight of the loss.

    Attributes:
      total: the mean times that weight.
    """

    total: Any


class Totals(NamedTuple):
    """Loss and metrics of one or more parts of a batch, float32; most are scalars.

    Attributes:
      parts: number of parts; None if the loss gives a weight.
      weight: summed weight of the parts; None if all parts count the same.
      metrics: {name: Weighted, Mean, Sum, Max or Last}; the loss is among them. A Last
        is 0 on all parts but the last one.
    """

    parts: Array | None
    weight: Array | None
    metrics: dict[str, Any]

    @classmethod
    def of(cls, result: LossResult) -> "Totals":
        """The totals of one part."""
        weight, parts = result.weight, jnp.float32(1)
        if weight is not None:
            weight, parts = lax.stop_gradient(jnp.float32(weight)), None
        values = {"loss": result.loss, **result.metrics}
        metrics = {name: _of_part(x, weight) for name, x in values.items()}
        return cls(parts, weight, metrics)

    @property
    def divisor(self) -> Array:
        """The weight of all parts."""
        return self.parts if self.weight is None else self.weight

    @property
    def nonzero_divisor(self) -> Array:
        """The weight of all parts, or 1 where it is 0: all totals are 0 then."""
        return self.parts if self.weight is None else nonzero(self.weight)

    @property
    def loss(self) -> Array:
        """The loss times its weight."""
        return self.metrics["loss"].total

    def with_mean(self, name: str, value: Array) -> "Totals":
        """The totals with one more mean over the batch."""
        kind = Weighted(jnp.float32(value) * self.divisor)
        return self._replace(metrics=self.metrics | {name: kind})

    def last_where(self, is_last: Any) -> "Totals":
        """The totals of a part with its `Last` metrics kept only if it is the last."""
        kinds = {
            name: Last(jnp.where(is_last, *x, 0.0)) if isinstance(x, Last) else x
            for name, x in self.metrics.items()
        }
        return self._replace(metrics=kinds)

    def empty(self) -> "Totals":
        """The totals of no part, to which others can be added; shapes are enough."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self)
        return _by_leaf(lambda x: x, lambda x: x - jnp.inf, zeros)

    def added(self, other: "Totals") -> "Totals":
        """The totals of the parts of both."""
        return _by_leaf(jnp.add, jnp.maximum, self, other)

    def divided(self, copies: int) -> "Totals":
        """The totals of a batch from the totals of several copies of it."""
        if copies == 1:
            return self
        once = functools.partial(jax.tree.map, lambda x: x / copies)
        parts, weight = once((self.parts, self.weight))
        metrics = {
            name: x if isinstance(x, Max | Last) else once(x)
            for name, x in self.metrics.items()
        }
        return Totals(parts, weight, metrics)

    def over_rows(self) -> "Totals":
        """The totals of all rows [R, ...] of each number."""
        of_sums, of_maxima = (
            functools.partial(reduce, axis=0) for reduce in (jnp.sum, jnp.max)
        )
        return _by_leaf(of_sums, of_maxima, self)

    def over(self, axes: Sequence[str]) -> "Totals":
        """The totals of all devices along mesh axes; call inside shard_map.

        Communication: one all_reduce of all sums, and one of all maxima if there are.
        """
        leaves, is_max = jax.tree.leaves(self), _is_max(self)
        if not axes:
            return self
        reduced: list[Any] = [None] * len(leaves)
        sums, maxima = "loss and metrics", "metrics of kind Max"
        for reduce, wanted, why in ((lax.psum, False, sums), (lax.pmax, True, maxima)):
            places = [i for i, found in enumerate(is_max) if found == wanted]
            if places:
                with purpose(why):
                    results = _reduced([leaves[i] for i in places], reduce, axes)
                for place, x in zip(places, results, strict=True):
                    reduced[place] = x
        return jax.tree.unflatten(jax.tree.structure(self), reduced)

    def reported(self) -> Metrics:
        """{name: value} of the whole batch; means are 0 where their weight is 0."""
        metrics = {} if self.weight is None else {WEIGHT: self.weight}
        for name, kind in self.metrics.items():
            if isinstance(kind, Weighted):
                metrics[name] = kind.total / self.nonzero_divisor
            elif isinstance(kind, Mean):
                metrics[name] = divided(*kind)
                metrics[weight_name(name)] = kind.weight
            else:
                (metrics[name],) = kind
        return metrics


def _reduced(
    values: Sequence[Array], reduce: Callable[..., Array], axes: Sequence[str]
) -> Sequence[Array]:
    """Values that one collective reduces over mesh axes, all together."""
    if all(x.ndim == 0 for x in values):
        return reduce(jnp.stack(values), axes)
    flat = reduce(jnp.concatenate([x.ravel() for x in values]), axes)
    ends = np.cumsum([x.size for x in values])[:-1]
    parts = jnp.split(flat, ends)
    return [part.reshape(x.shape) for part, x in zip(parts, values, strict=True)]


def _of_part(value: Any, weight: Array | None) -> Any:
    """A metric of one part as its kind."""
    if isinstance(value, KINDS):
        return type(value)(*map(jnp.float32, value))
    value = jnp.float32(value)
    return Weighted(value if weight is None else masked(weight, weight * value))


def _is_max(totals: Totals) -> list[bool]:
    """Whether each leaf is a maximum."""
    leaves = jax.tree.leaves(totals, is_leaf=lambda x: isinstance(x, Max))
    return [isinstance(leaf, Max) for leaf in leaves]


def _by_leaf(
    of_sums: Callable[..., Array], of_maxima: Callable[..., Array], *totals: Totals
) -> Totals:
    """Maps the leaves of totals: sums by one function, maxima by another."""
    rows = zip(_is_max(totals[0]), *map(jax.tree.leaves, totals), strict=True)
    leaves = [of_maxima(*row) if is_max else of_sums(*row) for is_max, *row in rows]
    return jax.tree.unflatten(jax.tree.structure(totals[0]), leaves)


class Gradients(NamedTuple):
    """The gradients and totals of one batch.

    Attributes:
      totals: loss and metrics.
      gradients: {path: array} of the trained parameters, before clipping.
      state: {path: new value} of variables that the model changed and that are no
        parameters.
    """

    totals: Totals
    gradients: Params
    state: Params
