"""L-BFGS for a coordinator that holds no vectors (Sandblaster).

The vectors (weights, gradients, differences) lie in parts on the servers. The
coordinator sends commands that every server runs on its own part: linear combinations
and dot products. It sees scalars alone.

The direction of L-BFGS is a combination of the stored differences and the gradient. Its
coefficients follow from the dot products of these vectors, so an iteration needs two
rounds of commands beside its evaluations.

Source: Dean et al., DistBelief, NeurIPS 2012, section 4.2 (Sandblaster); Chen, Wang,
  Zhou, Large-scale L-BFGS using MapReduce, NeurIPS 2014 (the dot products).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from meshpar.errors import MeshparError
from meshpar.methods.sandblaster.line_search import LineSearch

WEIGHTS, GRADIENT = "weights", "gradient"
_START, _START_GRADIENT, _DIRECTION = "start", "start gradient", "direction"
_MAX_EVALUATIONS = 20


class VectorRange:
    """The parts [start, stop) of named vectors, on one server.

    Attributes:
      start: of the part.
      stop: of the part.
      vectors: {name: float64 [stop - start]}.
    """

    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop
        self.vectors: dict[str, np.ndarray] = {WEIGHTS: np.zeros(stop - start)}

    def combine(self, name: str, terms: Mapping[str, float]) -> None:
        """Sets a vector to a linear combination {vector: coefficient} of vectors."""
        total = np.zeros(self.stop - self.start)
        for term, coefficient in terms.items():
            total += coefficient * self.vectors[term]
        self.vectors[name] = total

    def dots(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """This part's share of dot products, [pairs]."""
        return np.array([self.vectors[a] @ self.vectors[b] for a, b in pairs])


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The state after an iteration.

    Attributes:
      number: from 1.
      value: of the objective.
      gradient_norm: 2-norm of the gradient.
      evaluations: of value and gradient so far.
    """

    number: int
    value: float
    gradient_norm: float
    evaluations: int


class Coordinator:
    """The coordinator of L-BFGS.

    Args:
      ranges: the parts of all vectors; together they cover [0, size).
      evaluate: computes the value at the vector `WEIGHTS`, and puts the gradient there
        into the vector `GRADIENT`.
      memory: pairs of differences that are kept.
    """

    def __init__(
        self,
        ranges: Sequence[VectorRange],
        evaluate: Callable[[], float],
        memory: int = 10,
    ):
        if memory < 1:
            raise MeshparError(f"memory={memory}: use a whole number, at least 1")
        self._ranges, self._evaluate, self._memory = ranges, evaluate, memory
        self._slots: list[int] = []
        self._products: dict[tuple[str, str], float] = {}
        self._evaluations = 0

    def _combine(self, name: str, terms: Mapping[str, float]) -> None:
        for part in self._ranges:
            part.combine(name, terms)

    def _dots(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        return np.sum([part.dots(pairs) for part in self._ranges], axis=0).tolist()

    def _value(self) -> float:
        self._evaluations += 1
        return float(self._evaluate())

    def run(self, iterations: int, tolerance: float = 0.0) -> Iterator[Iteration]:
        """Iterates from the present weights; yields the state after each iteration.

        Args:
          iterations: most iterations.
          tolerance: of the 2-norm of the gradient at which it stops.
        """
        value = self._value()
        for number in range(1, iterations + 1):
            terms = self._direction()
            self._combine(_DIRECTION, terms)
            self._combine(_START, {WEIGHTS: 1.0})
            self._combine(_START_GRADIENT, {GRADIENT: 1.0})
            pairs = [(_DIRECTION, GRADIENT), (_DIRECTION, _DIRECTION)]
            slope, square = self._dots(pairs)
            if slope >= 0:
                return
            first = 1.0 if self._slots else min(1.0, 1 / math.sqrt(square))
            found = self._search(value, slope, first)
            if found is None:
                return
            value = found
            norm = math.sqrt(self._dots([(GRADIENT, GRADIENT)])[0])
            yield Iteration(number, value, norm, self._evaluations)
            if norm <= tolerance:
                return
            self._remember(number)

    def _search(self, value: float, slope: float, step: float) -> float | None:
        """The value after a step along the direction; None if none is lower."""
        search = LineSearch(value, slope, step)
        for _ in range(_MAX_EVALUATIONS):
            self._combine(WEIGHTS, {_START: 1.0, _DIRECTION: search.step})
            found = self._value()
            (slope_there,) = self._dots([(_DIRECTION, GRADIENT)])
            search.tell(found, slope_there)
            if search.done:
                return found if found < value else None
        return None

    def _remember(self, number: int) -> None:
        """Stores the differences of the last step, in place of the oldest ones."""
        slot = number % self._memory
        s, y = f"s{slot}", f"y{slot}"
        self._combine("new s", {WEIGHTS: 1.0, _START: -1.0})
        self._combine("new y", {GRADIENT: 1.0, _START_GRADIENT: -1.0})
        curvature, size = self._dots([("new s", "new y"), ("new s", _START_GRADIENT)])
        if curvature <= np.finfo(float).eps * -size:
            return  # Such a pair would make the model of the curvature singular.
        self._combine(s, {"new s": 1.0})
        self._combine(y, {"new y": 1.0})
        if slot in self._slots:
            self._slots.remove(slot)
        self._slots.append(slot)

    def _direction(self) -> dict[str, float]:
        """Coefficients of the direction: minus the inverse Hessian times the gradient.

        The two loops of L-BFGS, on coefficients in place of vectors.
        """
        stored = [f"{kind}{slot}" for slot in self._slots for kind in "sy"]
        fresh = set(stored[-2:]) | {GRADIENT}
        names = [*stored, GRADIENT]
        pairs = [
            pair
            for pair in itertools.combinations_with_replacement(names, 2)
            if fresh & set(pair)
        ]
        for pair, product in zip(pairs, self._dots(pairs), strict=True):
            self._products[pair] = self._products[pair[::-1]] = product
        terms = dict.fromkeys(names, 0.0)
        terms[GRADIENT] = -1.0

        def dot(name: str) -> float:
            """Dot product of a stored vector and the present combination."""
            return sum(c * self._products[name, other] for other, c in terms.items())

        shares = {}
        for slot in reversed(self._slots):
            s, y = f"s{slot}", f"y{slot}"
            shares[slot] = dot(s) / self._products[s, y]
            terms[y] -= shares[slot]
        if self._slots:
            s, y = f"s{self._slots[-1]}", f"y{self._slots[-1]}"
            scale = self._products[s, y] / self._products[y, y]
            terms = {name: scale * coefficient for name, coefficient in terms.items()}
        for slot in self._slots:
            s, y = f"s{slot}", f"y{slot}"
            terms[s] += shares[slot] - dot(y) / self._products[s, y]
        return terms
