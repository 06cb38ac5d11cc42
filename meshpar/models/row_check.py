"""Refuses losses, metrics and state that differ once the batch is split into parts.

Microbatches and shards of the batch each compute the loss of their own rows. The loss
of the whole batch is their mean, so a loss has to be a mean over rows, or to come with
a weight; metrics in the same way. Running state has to be a mean over rows, or not to
depend on the batch.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshpar.arrays import abstract
from meshpar.errors import LayoutError
from meshpar.models.metrics import KINDS, LossResult, Mean, Sum
from meshpar.models.model import Model
from meshpar.rows import opaque
from meshpar.rows.analysis import RowAnalysis
from meshpar.rows.values import (
    Fixed,
    Mixed,
    Ratio,
    Rows,
    Summed,
    degree_of,
)

_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061)

COUNT = "count"
"""Form of a `Summed` that is the number of rows itself, or a multiple of it."""


@dataclasses.dataclass(frozen=True)
class Split:
    """How a batch is split into parts.

    Attributes:
      parts: number of parts.
      why: settings that split it, such as "microbatches=4".
    """

    parts: int
    why: str

    @classmethod
    def by(cls, settings: Mapping[str, int]) -> "Split":
        """The split by settings {name: number of parts}."""
        why = ",".join(f"{name}={number}" for name, number in settings.items())
        return cls(math.prod(settings.values()), why)


def check_losses(
    model: Model, batch: Any, split: Split, evaluates: bool
) -> dict[str, Any]:
    """Checks the losses of a model whose batch is split into parts.

    Args:
      model: the model.
      batch: abstract batch before it is split.
      split: its parts.
      evaluates: whether evaluation splits the batch, too.

    Returns:
      {path: how its new value depends on the rows} of the state that training changes.

    Raises:
      LayoutError: a loss or a metric that the parts cannot give, with the remedy.
    """
    params, key = abstract(model.params), jax.eval_shape(lambda: jax.random.key(0))

    def loss(params: Any, batch: Any, key: Any) -> LossResult:
        return model.loss(params, batch, key)

    def evaluation_loss(params: Any, batch: Any, _: Any) -> LossResult:
        return model.evaluation_loss(params, batch)

    if evaluates:
        _check(evaluation_loss, "the evaluation loss", params, batch, key, split)
    return _check(loss, "the loss", params, batch, key, split).state


def averaged_state(state: dict[str, Any], split: Split) -> frozenset[str]:
    """Paths of the state whose new value is the mean of what the parts make of it.

    Other state does not depend on the batch: each part makes the same of it.

    Args:
      state: from `check_losses`.
      split: the parts, which run one after the other.

    Raises:
      LayoutError: state that the parts cannot give.
    """
    for path, value in state.items():
        if reason := _reason_no_mean(value):
            raise LayoutError(
                f"the new value of {path} is no mean over rows: {reason}; leave out "
                f"{split.why}, or use a layer that keeps no such state (LayerNorm or "
                "GroupNorm in place of BatchNorm)"
            )
    return frozenset(p for p, value in state.items() if not isinstance(value, Fixed))


def _check(
    fn: Callable, what: str, params: Any, batch: Any, key: Any, split: Split
) -> LossResult:
    prime = _prime_for(params, batch)
    try:
        traced = _traced(fn, params, batch, key, prime)
    except Exception as error:
        result = _of_one_part(fn, what, params, batch, key, split, error)
    else:
        result = values_of(*traced, RowAnalysis(prime))
    if problem := problem_of(result, what):
        raise LayoutError(f"{problem} ({split.why} splits the batch into parts)")
    return result


def row_values(fn: Callable, params: Any, batch: Any, key: Any) -> Any:
    """The result of fn(params, batch, key) with a value of `rows.values` in each leaf.

    Args:
      fn: a function of pytrees; traced with another number of rows.
      params: {path: ShapeDtypeStruct}.
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...].
      key: abstract random key.
    """
    prime = _prime_for(params, batch)
    traced = _traced(fn, params, batch, key, prime)
    return values_of(*traced, RowAnalysis(prime))


def _traced(
    fn: Callable, params: Any, batch: Any, key: Any, prime: int
) -> tuple[Any, Any, list[Any]]:
    """(jaxpr, shapes of the result, values of the inputs) for a prime of rows."""
    batch = jax.tree.map(lambda x: _with_rows(x, prime), batch)
    with opaque.analysed():
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(params, batch, key)
    inputs: list[Any] = [Fixed() for _ in jax.tree.leaves(params)]
    inputs += [Rows(0) for _ in jax.tree.leaves(batch)]
    return closed, shape, [*inputs, *(Fixed() for _ in jax.tree.leaves(key))]


def values_of(closed: Any, shape: Any, inputs: list[Any], analysis: RowAnalysis) -> Any:
    """The values of a traced function's results.

    Args:
      closed: its jaxpr.
      shape: shapes of the results.
      inputs: values of the arguments.
      analysis: evaluates the jaxpr.
    """
    consts = [analysis.constant(x) for x in closed.consts]
    try:
        results = analysis.run(closed.jaxpr, consts, inputs)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # A primitive that no rule foresees must not stop a loss with a weight.
        reason = f"it could not be followed ({type(error).__name__}: {error})"
        return jax.tree.map(lambda _: Mixed(reason), shape)
    results = [_counted(x, analysis.prime) for x in results]
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _counted(value: Any, prime: int) -> Any:
    """A constant that is a multiple of the number of rows, as a sum over rows."""
    degree = degree_of(value, prime)
    return Summed(degree - 1, COUNT) if degree > 0 else value


def _with_rows(x: Any, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _prime_for(params: Any, batch: Any) -> int:
    """A prime that divides no dim of the model and of one row."""
    sizes = {size for x in jax.tree.leaves(params) for size in x.shape}
    sizes |= {size for x in jax.tree.leaves(batch) for size in x.shape[1:]}
    return next(p for p in _PRIMES if all(size % p for size in sizes if size))


def _of_one_part(
    fn: Callable,
    what: str,
    params: Any,
    batch: Any,
    key: Any,
    split: Split,
    error: Exception,
) -> Any:
    """The result for the rows of one part, about which nothing else is known."""
    (num, *_) = (x.shape[0] for x in jax.tree.leaves(batch))
    part = jax.tree.map(lambda x: _with_rows(x, num // split.parts), batch)
    try:
        shape = jax.eval_shape(fn, params, part, key)
    except Exception as error:
        raise LayoutError(
            f"{what} cannot be traced with the {num // split.parts} rows of a part "
            f"({split.why} splits a batch of {num} rows into parts); take sizes from "
            f"the arrays ({type(error).__name__}: {error})"
        ) from error
    reason = (
        "it cannot be traced with another number of rows "
        f"({type(error).__name__}: {error})"
    )
    return jax.tree.map(lambda _: Mixed(reason), shape)


def problem_of(result: LossResult, what: str) -> str:
    """The first problem of a loss and its metrics, with the remedy; "" without."""
    weight = result.aux.get("weight")
    remedy = (
        "return meshpar.Mean(total, weight) with sums over rows, or give the weight of "
        "each part as aux['weight'] (1.0 if all parts count the same)"
    )
    if weight is None and (reason := _reason_no_mean(result.loss)):
        return f"{what} is no mean over rows: {reason}; {remedy}"
    if isinstance(weight, Sum) and (reason := _reason_no_ratio(result.loss)):
        remedy = "sum both over rows, or return a scalar with aux['weight']"
        return f"{what} is no meshpar.Mean of sums over rows: {reason}; {remedy}"
    for name, value in result.metrics.items():
        if problem := _metric_problem(name, value, weight):
            return problem
    return ""


def _metric_problem(name: str, value: Any, weight: Any) -> str:
    """The problem of one metric, with the remedy; "" without."""
    if isinstance(value, Mean):
        reason = next((v.reason for v in value if isinstance(v, Mixed)), "")
        if not reason and len(set(map(_degree, value))) > 1:
            reason = "one of them is a mean over rows, or a constant"
        how = f"is no meshpar.Mean of sums over rows: {reason}; sum both over rows"
        return f"aux[{name!r}] {how}" if reason else ""
    if isinstance(value, Sum):
        is_sum = isinstance(value.value, Mixed) or _degree(value.value) == 0
        how = "is a meshpar.Sum, but its value is no sum over rows; sum it over rows"
        return "" if is_sum else f"aux[{name!r}] {how}, or use meshpar.Mean"
    if isinstance(value, KINDS):
        return ""
    reason = _reason_no_mean(value)
    if weight is not None and not _is_constant(weight):
        if isinstance(value, Ratio) and value.degree == 0:
            return ""
        if not reason and not isinstance(value, Fixed):
            reason = "it is a mean over rows, but parts weigh as their loss does"
    if not reason:
        return ""
    return (
        f"aux[{name!r}] is no mean as the loss is: {reason}; use "
        "meshpar.Mean(total, weight), meshpar.Sum, meshpar.Max or meshpar.Last"
    )


def _is_constant(value: Any) -> bool:
    return isinstance(value, Fixed) or getattr(value, "form", "") == COUNT


def _degree(value: Any) -> int | None:
    """The power of the number of rows with which a total grows, less 1."""
    if isinstance(value, Summed):
        return value.degree
    return -1 if isinstance(value, Fixed) else None


def _reason_no_mean(value: Any) -> str:
    """Why a scalar is no mean over rows; "" if it is."""
    if isinstance(value, Fixed):
        return ""
    if isinstance(value, Summed) and value.degree == -1:
        return "it is kept away from 0" if value.form == "guarded" else ""
    if isinstance(value, Summed):
        return "it is a sum over rows that is not divided by their number"
    if isinstance(value, Mixed):
        return value.reason
    return "it divides by a sum over rows, which differs between parts"


def _reason_no_ratio(value: Any) -> str:
    """Why a loss is no sum over rows divided by another one; "" if it is."""
    if isinstance(value, Ratio) and value.degree == 0:
        return ""
    reason = _reason_no_mean(value)
    if reason and not isinstance(value, Mixed):
        return "one of them is a mean over rows, or a constant"
    return reason
