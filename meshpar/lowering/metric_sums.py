"""Metrics over many steps or evaluations, such as an epoch."""

from collections.abc import Mapping
from typing import Any

import jax

from meshpar.models.metrics import WEIGHT, Last, Max, Mean, Sum, weight_name


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
          kinds: {name: meshpar.Mean, Sum, Max or Last}; other metrics are means,
            weighted as the loss is.
        """
        self._kinds = dict(kinds or {})
        self._pending: Mapping[str, Any] | None = None
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of one step or evaluation.

        Args:
          metrics: {name: scalar}, with the same names each time.
        """
        previous, self._pending = self._pending, dict(metrics)
        if previous is not None:
            self._add(previous)

    def result(self) -> dict[str, float]:
        """{name: number} over everything that was added; {} before that.

        "weight" and the weights of means are sums; a mean is 0 if its weight is 0.
        """
        if self._pending is not None:
            self._add(self._pending)
            self._pending = None
        result = {}
        for name, total in self._totals.items():
            weight = self._weights.get(name)
            if weight is not None:
                total = total / weight if weight else 0.0
            result[name] = total
        return result

    def _add(self, metrics: Mapping[str, Any]) -> None:
        numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
        for name, number in numbers.items():
            kind = self._kind(name)
            if kind is Mean:
                self._add_mean(name, number, numbers[weight_name(name)])
            elif kind is Sum:
                self._totals[name] = self._totals.get(name, 0.0) + number
            elif kind is Max:
                self._totals[name] = max(self._totals.get(name, number), number)
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

    def _add_mean(self, name: str, mean: float, weight: float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + mean * weight
        self._weights[name] = self._weights.get(name, 0.0) + weight
