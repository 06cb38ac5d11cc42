"""Traces of a function with other numbers of rows, and what its results depend on."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshpar import compat
from meshpar.models.foreign_shardings import explained_errors
from meshpar.models.unbound_names import explained_names
from meshpar.replicated import map_rows, num_rows
from meshpar.rows import opaque
from meshpar.rows.analysis import RowAnalysis
from meshpar.rows.draws import Drawn
from meshpar.rows.two_traces import Differences, UnlikeError, unlike_work
from meshpar.rows.values import (
    BRANCHES,
    IN_BATCH,
    Counted,
    Fixed,
    Key,
    Mixed,
    PerRow,
    counts,
    is_value,
)

_PRIMES = (
    (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061),
    (2003, 2011, 2017, 2027, 2029, 2039, 2053, 2063, 2069, 2081),
    (4001, 4003, 4007, 4013, 4019, 4021, 4027, 4049, 4051, 4057),
)
"""Rows to trace with: every dtype tells numbers apart of which one is twice another."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowTraces:
    """Traces of fn(params, batch, key) with several numbers of rows, each made once.

    Attributes:
      fn: a function of pytrees.
      params: {path: ShapeDtypeStruct}.
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...].
      key: abstract random key.
    """

    fn: Callable
    params: Any
    batch: Any
    key: Any
    _made: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    _raised: list[Exception] = dataclasses.field(default_factory=list)

    def of(self, rows: int) -> tuple[Any, Any]:
        """(jaxpr, shapes of the result) with a number of rows."""
        if rows not in self._made:
            batch = map_rows(lambda x: with_rows(x, rows), self.batch)
            arguments = self.params, batch, self.key
            try:
                with explained_errors(), explained_names():
                    self._made[rows] = traced_with_shape(self.fn, *arguments)
            except Exception as error:
                self._raised.append(error)
                raise
        return self._made[rows]

    def raised(self, error: Exception) -> bool:
        """Whether an error comes from a trace, and not from what reads the traces."""
        return any(error is other for other in self._raised)


def row_values(
    traces: RowTraces, drawn: Drawn | None = None, rows: Sequence[int] = ()
) -> Any:
    """The result of a function with a value of `rows.values` in each leaf.

    Args:
      traces: of the function.
      drawn: takes note of what it draws from the key.
      rows: the numbers of rows with which it will run, the first one that of the batch.
        A function that does other things with them, such as one that branches on their
        number, is found by them.
    """
    prime, *others = _primes_for(traces.params, traces.batch)
    runs = [(n, traces.of(n)[0]) for n in rows]
    closed, shape = traces.of(prime)
    inputs: list[Any] = [Fixed() for _ in jax.tree.leaves(traces.params)]
    batch = map_rows(lambda _: PerRow(0), traces.batch, others=lambda _: Fixed())
    inputs += jax.tree.leaves(batch, is_leaf=is_value)
    inputs += [Key() for _ in jax.tree.leaves(traces.key)]

    def analysis(differences: Differences) -> RowAnalysis:
        return RowAnalysis(prime, differences, drawn or Drawn())

    seconds = itertools.chain(runs[:1], ((n, traces.of(n)[0]) for n in others))
    return compared_values(closed, shape, inputs, prime, seconds, analysis, runs)


def traced_with_shape(fn: Callable, *args: Any) -> tuple[Any, Any]:
    """(jaxpr, shapes of the result) of a function, for the analysis."""

    def call(*args: Any) -> Any:  # Traces are cached by function.
        return fn(*args)

    with opaque.analysed():
        return jax.make_jaxpr(call, return_shape=True)(*args)


def compared_values(
    closed: Any,
    shape: Any,
    inputs: list[Any],
    prime: int,
    seconds: Iterator[tuple[int, Any]],
    analysis: Callable[[Differences], RowAnalysis],
    runs: Sequence[tuple[int, Any]] = (),
) -> Any:
    """The values of a traced function's results, by a comparison with other traces.

    Args:
      closed: its jaxpr.
      shape: shapes of the results.
      inputs: values of the arguments.
      prime: rows of this trace.
      seconds: (rows, jaxpr) of other traces; the first one that has the same equations
        is compared.
      analysis: differences -> evaluates the jaxpr.
      runs: (rows, jaxpr) of those that will run.
    """
    unlike: Any = None
    for rows, second in seconds:
        try:
            found = Differences.between(
                closed, second, (prime, rows), frozenset(opaque.RULES)
            )
        except UnlikeError as error:
            unlike = unlike or error.equation
            continue
        found, unlike = _held_to_runs(found, closed, runs)
        if unlike is None:
            return values_of(closed, shape, inputs, analysis(found))
        break
    place = compat.user_line(unlike) if unlike is not None else ""
    return jax.tree.map(lambda _: Mixed(BRANCHES, IN_BATCH, place), shape)


def _held_to_runs(
    found: Differences, closed: Any, runs: Sequence[tuple[int, Any]]
) -> tuple[Differences, Any]:
    """(differences, equation with which what runs does another thing, if any)."""
    for rows, other in runs:
        try:
            found = found.compared_with(closed, other, rows)
        except UnlikeError:
            if (unlike := unlike_work(closed, other)) is not None:
                return found, unlike
    return found, None


def values_of(closed: Any, shape: Any, inputs: list[Any], analysis: RowAnalysis) -> Any:
    """The values of a traced function's results.

    Args:
      closed: its jaxpr.
      shape: shapes of the results.
      inputs: values of the arguments.
      analysis: evaluates the jaxpr.
    """
    results = analysis.evaluate(closed, inputs)
    results = [counts(x) if isinstance(x, Counted) else x for x in results]
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def with_rows(x: Any, rows: int) -> jax.ShapeDtypeStruct:
    """A leaf of a batch with another number of rows."""
    return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _primes_for(params: Any, batch: Any) -> tuple[int, int, int]:
    """Primes that divide no size of the model and of the batch: one, and two others.

    The first one is at most half of the rows of the batch, or at least twice as many.
    The third one is close to it, for programs that change with sizes.
    """
    leaves = *jax.tree.leaves(params), *jax.tree.leaves(batch)
    sizes = {size for x in leaves for size in x.shape if size}
    low, middle, high = (
        [p for p in primes if all(size % p for size in sizes)] for primes in _PRIMES
    )
    rows = num_rows(batch)
    first = high if low[0] / 2 < rows < 2 * low[0] else low
    return first[0], middle[0], first[1]
