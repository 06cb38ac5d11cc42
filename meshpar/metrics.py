"""Losses and metrics of a part of a batch: means with a weight, sums, maxima, last.

A batch may be split into parts: microbatches, and the shards of `data` and `fsdp`. The
kind of a number says how the numbers of the parts become the number of the batch. A
metric may be an array, such as one number for each class: its entries are numbers.
"""

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.arrays import Array
from meshpar.errors import MeshparError

WEIGHT = "weight"
"""Name of the loss's weight among the metrics."""

STATE = "running state"
"""Name of the changed state beside the metrics."""

RESERVED = ("loss", "grad_norm", STATE)
"""Names that a loss function cannot give to its metrics."""


class Mean(NamedTuple):
    """total / weight over the whole batch; 0 where the weight is 0.

    Attributes:
      total: a sum over rows, such as the summed losses of all tokens.
      weight: a sum over rows, such as the number of tokens; no gradient flows through
        it.
    """

    total: Any
    weight: Any


class Sum(NamedTuple):
    """The sum over the parts of the batch.

    Attributes:
      value: a sum over rows, such as a number of tokens.
    """

    value: Any


class Max(NamedTuple):
    """The largest value of all parts of the batch.

    Attributes:
      value: a maximum over rows.
    """

    value: Any


class Last(NamedTuple):
    """The value of one part: the last microbatch on the last shard of the batch.

    Attributes:
      value: any number.
    """

    value: Any


KINDS = (Mean, Sum, Max, Last)
"""Kinds of metrics; others are means, weighted as the loss is."""


def weight_name(name: str) -> str:
    """The name under which the weight of a `Mean` is reported beside it."""
    return f"{name}/{WEIGHT}"


class LossResult(NamedTuple):
    """The loss of one part of a batch.

    Attributes:
      loss: a scalar; the mean over this part.
      aux: {name: array or kind}. "weight", if there is one, is the weight of `loss`
        against the losses of other parts: a `Sum` if the loss was a `Mean`, whose
        weight it is, a scalar if the user gave it. `STATE`, if it is there, is `state`.
    """

    loss: Array
    aux: dict[str, Any]

    @property
    def state(self) -> dict[str, Array]:
        """{path: new value} of variables that are no parameters and that changed."""
        return self.aux.get(STATE, {})

    def with_state(self, state: dict[str, Array]) -> "LossResult":
        """The result of a model that changed its state."""
        return self._replace(aux={**self.aux, STATE: state}) if state else self

    @property
    def weight(self) -> Array | None:
        """The weight of the loss; None if all parts count the same."""
        weight = self.aux.get(WEIGHT)
        return weight.value if isinstance(weight, Sum) else weight

    @property
    def metrics(self) -> dict[str, Any]:
        """{name: array or kind}, without the weight and the state."""
        rest = (WEIGHT, STATE)
        return {name: x for name, x in self.aux.items() if name not in rest}


def nonzero(weight: Any) -> Array:
    """The weight, or 1 where it is 0: totals of weight 0 are 0 and stay so."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def divided(total: Any, weight: Any) -> Array:
    """Divides a total by a weight; 0 where the weight is 0."""
    return masked(weight, total / nonzero(weight))


def masked(weight: Any, x: Array) -> Array:
    """x, or zeros where the weight is 0; without a weight x as it is."""
    return x if weight is None else jnp.where(weight == 0, jnp.zeros_like(x), x)


def loss_result(result: Any) -> LossResult:
    """The result of a loss function, checked.

    Args:
      result: loss, (loss, aux) or a LossResult; the loss is a scalar or a `Mean`.

    Raises:
      MeshparError: a loss or a weight that is not a scalar, a second result that is no
        dict, two weights, or a metric with a name that is taken.
    """
    loss, aux = result, {}
    if isinstance(result, tuple) and not isinstance(result, KINDS):
        if len(result) != 2 or not isinstance(result[1], dict):
            kinds = ", ".join(type(x).__name__ for x in result)
            raise MeshparError(
                f"loss_fn returned a tuple of ({kinds}); return a loss, or (loss, aux) "
                "with a dict of numbers as aux, such as {'accuracy': accuracy}"
            )
        loss, aux = result[0], dict(result[1])
    if isinstance(loss, Mean):
        if WEIGHT in aux:
            raise MeshparError(
                "loss_fn returned a meshpar.metrics.Mean, which has a weight, and "
                "aux['weight']; leave out one of them"
            )
        for x in loss:
            if jnp.ndim(x):
                raise MeshparError(
                    f"the loss has shape {jnp.shape(x)}; return "
                    "meshpar.metrics.Mean(total, weight) of scalars"
                )
        weight = lax.stop_gradient(jnp.asarray(loss.weight))
        loss = divided(jnp.asarray(loss.total), weight)
        return LossResult(loss, {**_checked(aux), WEIGHT: Sum(weight)})
    if isinstance(loss, KINDS):
        raise MeshparError(
            f"loss_fn returned a loss of kind {type(loss).__name__}; return a scalar "
            "(the mean over the batch) or meshpar.metrics.Mean(total, weight)"
        )
    if not _is_number(loss):
        raise MeshparError(
            f"loss_fn returned {_told(loss)}; return a real scalar, such as the mean "
            "over the batch"
        )
    if jnp.ndim(loss):
        raise MeshparError(
            f"loss_fn returned a loss of shape {jnp.shape(loss)}; return a scalar "
            "(the mean over the batch) or meshpar.metrics.Mean(total, weight)"
        )
    return LossResult(loss, _checked(aux))


def _is_number(x: Any) -> bool:
    """Whether a value is a real number or an array of them."""
    if (dtype := getattr(x, "dtype", None)) is None:
        return isinstance(x, numbers.Real)
    real = jnp.floating, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(dtype, kind) for kind in real)


def _told(x: Any) -> str:
    """A value that is no real number, in words."""
    known = getattr(x, "dtype", None)
    return f"numbers of {known}" if known is not None else f"a {type(x).__name__}"


def _checked(aux: dict[str, Any]) -> dict[str, Any]:
    """The metrics, after their names and shapes are checked."""
    for name, value in aux.items():
        _check_metric(name, value, aux)
    return aux


def _check_metric(name: str, value: Any, aux: dict[str, Any]) -> None:
    """Raises MeshparError if a metric's name is taken or its value is no number."""
    if not isinstance(name, str):
        raise MeshparError(f"aux[{name!r}]: give every metric a text as its name")
    for x in value if isinstance(value, KINDS) else (value,):
        if not _is_number(x):
            raise MeshparError(
                f"aux[{name!r}] is {_told(x)}; give a real number or an array of them"
            )
    if name in RESERVED:
        raise MeshparError(
            f"aux[{name!r}] has the name of a metric that every step reports; rename it"
        )
    if name == WEIGHT and (isinstance(value, KINDS) or jnp.ndim(value)):
        kind = type(value).__name__
        what = f"a {kind}" if isinstance(value, KINDS) else f"of {jnp.shape(value)}"
        raise MeshparError(
            f"aux['weight'] is {what}; give the weight of the loss as a scalar"
        )
    if isinstance(value, Mean) and weight_name(name) in aux:
        raise MeshparError(
            f"aux[{weight_name(name)!r}] has the name of the weight of aux[{name!r}]; "
            "rename it"
        )
    shapes = [jnp.shape(x) for x in value] if isinstance(value, Mean) else [()]
    if len(set(shapes)) > 1 and shapes[1] != ():
        raise MeshparError(
            f"aux[{name!r}] is a Mean of a total of shape {shapes[0]} and a weight of "
            f"shape {shapes[1]}; give both the same shape, or a scalar weight"
        )


class MetricSums:
    """Adds up the metrics of steps or evaluations, each by its kind.

        sums = program.metric_sums()
        for batch in batches:
            sums.add(program.evaluate(state, batch))
        print(sums.result()["loss"])

    Means are weighted: those of kind `Mean` by their own weight, others by the weight
    of the loss, if there is one. Nothing waits for the metrics that were added last.
    """

    def __init__(self, kinds: Mapping[str, type] | None = None):
        """Starts without metrics.

        Args:
          kinds: {name: Mean, Sum, Max or Last}; other metrics are means,
            weighted as the loss is.
        """
        self._kinds = dict(kinds or {})
        self._pending: Mapping[str, Any] | None = None
        self._totals: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of one step or evaluation.

        Args:
          metrics: {name: number or array}, with the same names each time.
        """
        previous, self._pending = self._pending, dict(metrics)
        if previous is not None:
            self._add(previous)

    def result(self) -> dict[str, Any]:
        """{name: number or array} over everything that was added; {} before that.

        "weight" and the weights of means are sums; a mean is 0 if its weight is 0.
        """
        if self._pending is not None:
            self._add(self._pending)
            self._pending = None
        result = {}
        for name, total in self._totals.items():
            weight = self._weights.get(name)
            if weight is not None:
                total = np.divide(
                    total, weight, out=np.zeros(np.shape(total)), where=weight != 0
                )
            result[name] = total if np.ndim(total) else float(total)
        return result

    def _add(self, metrics: Mapping[str, Any]) -> None:
        found = jax.device_get(dict(metrics))
        numbers = {name: np.asarray(x, np.float64) for name, x in found.items()}
        for name, number in numbers.items():
            kind = self._kind(name)
            if kind is Mean:
                self._add_mean(name, number, numbers[weight_name(name)])
            elif kind is Sum:
                self._totals[name] = self._totals.get(name, 0.0) + number
            elif kind is Max:
                self._totals[name] = np.maximum(self._totals.get(name, number), number)
            elif kind is Last:
                self._totals[name] = number
            else:
                self._add_mean(name, number, numbers.get(WEIGHT, 1.0))

    def _kind(self, name: str) -> type | None:
        """The kind of a metric; weights are sums."""
        means = (other for other, kind in self._kinds.items() if kind is Mean)
        if name == WEIGHT or name in map(weight_name, means):
            return Sum
        return self._kinds.get(name)

    def _add_mean(self, name: str, mean: Any, weight: Any) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + mean * weight
        self._weights[name] = self._weights.get(name, 0.0) + weight
