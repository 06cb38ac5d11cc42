"""Compares two traces of a function, to find numbers that depend on the rows.

The same function is traced with two numbers of rows, a prime and another. A number that
differs between the traces comes from the rows: its degree tells a factor, as in a mean,
from anything else, such as n - 1 or the root of n.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from meshpar.jaxprs.walk import equations

_POWERS = (0, 1, -1, 2, -2, 3, -3)
_NO_SIZES = ("integer_pow",)
"""Primitives whose integers are no sizes, so that they must not grow with the rows."""

_MOVES = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "transpose", "jit", "pjit")
    + ("convert_element_type", "expand_dims", "copy", "copy_p")
)
"""Primitives that move numbers, and calls."""

_JAXPRS = (core.Jaxpr, core.ClosedJaxpr)


class UnlikeError(Exception):
    """The traces hold different equations.

    Attributes:
      equation: the first one that differs; None if there is no such equation.
    """

    def __init__(self, equation: Any):
        super().__init__("the traces hold different equations")
        self.equation = equation


@dataclasses.dataclass
class Differences:
    """Literals and constants that differ between two traces.

    Attributes:
      numbers: the numbers of rows of both traces, the first one a prime.
      opaque: names of the jitted functions whose bodies are not compared.
      degrees: {(id of an equation or a jaxpr, index of its literal or constant): power
        of the number of rows that it is a multiple of; None for anything else}.
      irregular: ids of the equations with a size that is no multiple of the rows.
    """

    numbers: tuple[int, int]
    opaque: frozenset[str] = frozenset()
    degrees: dict[tuple[int, int], int | None] = dataclasses.field(default_factory=dict)
    irregular: set[int] = dataclasses.field(default_factory=set)
    _seen: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def between(
        cls, first: Any, second: Any, numbers: tuple[int, int], opaque: frozenset[str]
    ) -> "Differences":
        """The differences between two closed jaxprs.

        Raises:
          UnlikeError: they do not hold the same equations.
        """
        found = cls(numbers, opaque)
        found._compare(first, second, None)
        return found

    def compared_with(self, first: Any, other: Any, rows: int) -> "Differences":
        """Checks these differences on a third trace with another number of rows.

        A number that does not go on as these differences say, such as min(rows, 8),
        comes from the number of rows in an odd way.

        Args:
          first: the first jaxpr, as in `between`.
          other: a closed jaxpr.
          rows: its number of rows.

        Raises:
          UnlikeError: they do not hold the same equations.
        """
        degrees, irregular = dict(self.degrees), set(self.irregular)
        held = _Held((self.numbers[0], rows), self.opaque, degrees, irregular)
        held._compare(first, other, None)
        return Differences(self.numbers, self.opaque, degrees, irregular, held._seen)

    def degree(self, owner: Any, index: int) -> int | None:
        """The power of the number of rows of one literal or constant; None if odd."""
        return self.degrees.get((id(owner), index), 0)

    def is_plain(self, jaxpr: Any) -> bool:
        """Whether no number inside a jaxpr comes from the number of rows."""
        owners = {owner for owner, _ in self.degrees} | self.irregular

        def plain(jaxpr: Any) -> bool:
            inside = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
            held = (jaxpr, inside, *inside.eqns)
            inner = (each for eqn in inside.eqns for each in _inner(eqn))
            return owners.isdisjoint(map(id, held)) and all(map(plain, inner))

        return plain(jaxpr)

    def _compare(self, first: Any, second: Any, equation: Any) -> None:
        if first is second or (id(first), id(second)) in self._seen:
            return
        self._seen[id(first), id(second)] = first, second  # Ids stay those of these.
        if type(first) is not type(second):
            raise UnlikeError(equation)
        if isinstance(first, core.ClosedJaxpr):
            _check_equal(len(first.consts), len(second.consts), equation)
            for i, pair in enumerate(zip(first.consts, second.consts, strict=True)):
                self._note(first, i, *pair)
            first, second = first.jaxpr, second.jaxpr
        for one, other in zip(first.eqns, second.eqns, strict=False):
            self._equation(one, other)
        _check_equal(len(first.eqns), len(second.eqns), equation)
        self._atoms(first, first.outvars, second.outvars, equation)

    def _equation(self, first: Any, second: Any) -> None:
        if first.primitive is not second.primitive:
            raise UnlikeError(first)
        self._atoms(first, first.invars, second.invars, first)
        name = first.params.get("name")
        inner = [list(_inner(eqn)) for eqn in (first, second)]
        _check_equal(*map(len, inner), first)
        if not any(inner) and not self._regular(first, second):
            self.irregular.add(id(first))
        if isinstance(name, str) and name in self.opaque:
            return
        if first.primitive.name == "scan":
            lengths = first.params["length"], second.params["length"]
            if not self._is_size(*lengths):
                self.irregular.add(id(first))
        for pair in zip(*inner, strict=True):
            self._compare(*pair, first)

    def _atoms(self, owner: Any, first: Any, second: Any, equation: Any) -> None:
        """Notes the literals that differ."""
        _check_equal(len(first), len(second), equation)
        for i, (one, other) in enumerate(zip(first, second, strict=True)):
            literals = [isinstance(atom, core.Literal) for atom in (one, other)]
            _check_equal(*literals, equation)
            if all(literals):
                self._note(owner, i, one.val, other.val)

    def _note(self, owner: Any, index: int, first: Any, second: Any) -> None:
        if (degree := self._power(first, second)) != 0:
            self.degrees[id(owner), index] = degree

    def _power(
        self, first: Any, second: Any, powers: tuple[int, ...] = _POWERS
    ) -> int | None:
        """The power of the number of rows by which two constants differ.

        Args:
          first: one constant.
          second: the other one.
          powers: which it may be.
        """
        if not isinstance(getattr(first, "dtype", np.dtype(float)), np.dtype):
            return 0  # A random key.
        return self._of(np.asarray(first), np.asarray(second), powers)

    def _of(self, first: Any, second: Any, powers: tuple[int, ...]) -> int | None:
        if first.ndim != second.ndim or first.dtype != second.dtype:
            return None
        for dim, sizes in enumerate(zip(first.shape, second.shape, strict=True)):
            if len(set(sizes)) > 1:
                if not self._is_size(*sizes):
                    return None
                first, second = (np.take(x, [0], axis=dim) for x in (first, second))
        one, other = (x.astype(np.float64) for x in (first, second))
        if 0 in powers and np.array_equal(one, other, equal_nan=True):
            return 0
        is_float = jnp.issubdtype(first.dtype, jnp.floating)
        tolerance = 4 * float(jnp.finfo(first.dtype).eps) if is_float else 1e-12
        factor = self.numbers[1] / self.numbers[0]
        for power in powers:
            if power and np.allclose(
                other, one * factor**power, rtol=tolerance, atol=0
            ):
                return power
        return None

    def _regular(self, first: Any, second: Any) -> bool:
        """Whether all sizes of two equations are equal, or multiples of the rows."""
        if first.primitive.name in _NO_SIZES:
            return list(_integers(first.params)) == list(_integers(second.params))
        sizes = [
            [*_integers(eqn.params), *_integers([v.aval for v in eqn.outvars])]
            for eqn in (first, second)
        ]
        return len(sizes[0]) == len(sizes[1]) and all(map(self._is_size, *sizes))

    def _is_size(self, first: int, second: int) -> bool:
        times, rest = divmod(first, self.numbers[0])
        return first == second or (not rest and second == times * self.numbers[1])


class _Held(Differences):
    """Compares differences with a third trace; those that do not continue are odd."""

    def _note(self, owner: Any, index: int, first: Any, second: Any) -> None:
        degree = self.degree(owner, index)
        if degree is not None and self._power(first, second, (degree,)) is None:
            self.degrees[id(owner), index] = None


def unlike_work(first: Any, second: Any) -> Any:
    """The first equation in which two closed jaxprs differ; None if there is none.

    Moves of numbers, which depend on whether a dim is of size 1, do not count.
    """
    pairs = itertools.zip_longest(*map(_work, (first.jaxpr, second.jaxpr)))
    for one, other in pairs:
        if one is None or other is None or one.primitive is not other.primitive:
            return one or other
    return None


def _work(jaxpr: Any) -> Iterator[Any]:
    for eqn in equations(jaxpr):
        if eqn.primitive.name not in _MOVES:
            yield eqn


def _check_equal(first: Any, second: Any, equation: Any) -> None:
    if first != second:
        raise UnlikeError(equation)


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, _JAXPRS):
                yield each


def _integers(value: Any) -> Iterator[int]:
    """The integers in parameters of an equation, and the sizes of its results."""
    if isinstance(value, bool | np.bool_):
        return
    if isinstance(value, int | np.integer):
        yield int(value)
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _integers(value[key])
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _integers(each)
    elif hasattr(value, "shape") and not isinstance(value, np.ndarray):
        yield from _integers(tuple(value.shape))
