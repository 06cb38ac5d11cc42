"""Problems of a loss or a metric of a split batch, in words with a remedy."""

from typing import Any

from meshpar.metrics import KINDS, LossResult, Mean, Sum
from meshpar.rows.values import (
    BOUNDED,
    CHOSEN,
    EXACT,
    Fixed,
    Mixed,
    PerRow,
    Ratio,
    Summed,
    Test,
)

_REMEDY = (
    "return meshpar.metrics.Mean(total, weight) with sums over rows, or give the "
    "weight of each part as aux['weight'] (1.0 if all parts count the same)"
)
_OTHERWISE = (
    "or give the weight of each part as aux['weight'] if each is to do so by itself"
)
_NO_BOUND = (
    "it is kept away from 0, or from other values, and each part would do so by itself"
)


def problem_of(result: LossResult, what: str) -> str:
    """The first problem of a loss and its metrics, with the remedy; "" without."""
    weight = result.aux.get("weight")
    if weight is None and (reason := reason_no_mean(result.loss)):
        remedy = _remedy(result.loss)
        remedy = remedy and f"{remedy}, {_OTHERWISE}" or _REMEDY
        return f"{what} is no mean over rows: {reason}; {remedy}"
    if isinstance(weight, Sum) and (reason := _reason_no_ratio(result.loss)):
        remedy = _remedy(result.loss, weight.value)
        remedy = remedy or "sum both over rows, or return a scalar with aux['weight']"
        return (
            f"{what} is no meshpar.metrics.Mean of sums over rows: {reason}; {remedy}"
        )
    for name, value in result.metrics.items():
        if problem := _metric_problem(name, value, weight):
            return problem
    return ""


def _metric_problem(name: str, value: Any, weight: Any) -> str:
    """The problem of one metric, with the remedy; "" without."""
    numbers = value if isinstance(value, KINDS) else (value,)
    if any(isinstance(number, PerRow) for number in numbers):
        return (
            f"aux[{name!r}] has a dim for the rows of the batch; sum over it, or take "
            "such values from program.predictor"
        )
    if isinstance(value, Mean):
        reason = next((_why(v) for v in value if isinstance(v, Mixed | Test)), "")
        if not reason and len(set(map(_degree, value))) > 1:
            reason = "one of them is a mean over rows, or a constant"
        if not reason and _is_bounded(value.weight):
            reason = (
                f"{_NO_BOUND}: a Mean is 0 where its weight is 0, so leave that out"
            )
        how = f"is no meshpar.metrics.Mean of sums over rows: {reason}"
        remedy = _remedy(*value) or "sum both over rows"
        return f"aux[{name!r}] {how}; {remedy}" if reason else ""
    if isinstance(value, Sum):
        is_sum = isinstance(value.value, Mixed) or _degree(value.value) == 0
        if isinstance(value.value, Mixed) and value.value.remedy:
            return f"aux[{name!r}]: {_why(value.value)}; {value.value.remedy}"
        how = "is a meshpar.metrics.Sum, but is no sum over rows; sum it over rows"
        return "" if is_sum else f"aux[{name!r}] {how}, or use meshpar.metrics.Mean"
    if isinstance(value, KINDS):
        return ""
    reason = reason_no_mean(value)
    if weight is not None and not isinstance(weight, Fixed):
        if isinstance(value, Ratio) and value.degree == 0:
            return ""
        if not reason and not isinstance(value, Fixed):
            reason = "it is a mean over rows, but parts weigh as their loss does"
    if not reason:
        return ""
    remedy = _remedy(value) or (
        "use Mean(total, weight), Sum, Max or Last of meshpar.metrics"
    )
    return f"aux[{name!r}] is no mean as the loss is: {reason}; {remedy}"


def _degree(value: Any) -> int | None:
    """The power of the number of rows with which a total grows, less 1."""
    if isinstance(value, Summed):
        return value.degree
    return value.degree - 1 if isinstance(value, Fixed) else None


def reason_no_mean(value: Any) -> str:
    """Why a scalar is no mean over rows; "" if it is."""
    if isinstance(value, Summed) and value.degree == -1:
        if value.form != EXACT:
            return _NO_BOUND
        if not value.shift:
            return ""
        return "a constant is added to a sum over rows before it is divided"
    if isinstance(value, Fixed) and not value.degree:
        return ""
    if isinstance(value, Summed | Fixed):
        return "it is a sum over rows that is not divided by their number"
    if isinstance(value, Mixed | Test):
        return _why(value)
    return "it divides by a sum over rows, which differs between parts"


def _reason_no_ratio(value: Any) -> str:
    """Why a loss is no sum over rows divided by another one; "" if it is."""
    if isinstance(value, Ratio) and value.degree == 0:
        bound = f"its weight: {_NO_BOUND}; a Mean is 0 where its weight is 0 anyway"
        return bound if value.form == BOUNDED else ""
    reason = reason_no_mean(value)
    if reason and not isinstance(value, Mixed | Test):
        return "one of them is a mean over rows, or a constant"
    return reason


def _is_bounded(value: Any) -> bool:
    is_sum = isinstance(value, Summed)
    return is_sum and (value.form == BOUNDED or value.shift is not None)


def _why(value: Any) -> str:
    """The reason of a value that parts cannot give, with the user's line."""
    if isinstance(value, Test):
        value = CHOSEN
    return value.reason + (value.place and f", at {value.place}")


def _remedy(*values: Any) -> str:
    """The first remedy of values that have one of their own; "" without."""
    return next((v.remedy for v in values if isinstance(v, Mixed) and v.remedy), "")
