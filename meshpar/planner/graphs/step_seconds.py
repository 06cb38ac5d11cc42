"""Predicted time of a step of a model that is no stack of layers, by term."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Predicted time of a step, by term.

    Attributes:
      matmuls: compute of matmuls and convolutions.
      operators: compute of all other operators, which memory bounds.
      weights: time in which the device waits for gathers of weights.
      activations: time in which it waits for activations, forward and backward.
      gradients: time in which it waits for sums of gradients.
      update: the optimizer.
      wire_bytes: bytes that one device sends in all.
    """

    matmuls: float
    operators: float
    weights: float
    activations: float
    gradients: float
    update: float
    wire_bytes: float

    @property
    def by_term(self) -> dict[str, float]:
        """{term: seconds}."""
        terms = dataclasses.asdict(self)
        del terms["wire_bytes"]
        return terms

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.by_term.values())

    def slower(self, times: float) -> "StepSeconds":
        """All terms so many times as long; the bytes stay."""
        terms = {name: times * value for name, value in self.by_term.items()}
        return dataclasses.replace(self, **terms)
