"""Metrics and kinds that parts of a batch can give."""

import jax
import jax.numpy as jnp
import pytest
from support.mean_losses import (
    BATCH,
    abstract_params,
    constant,
    cross_entropy,
    made,
    token_losses,
)
from support.other_losses import plain_sum, ratio, variance

import meshpar
from meshpar.errors import LayoutError
from meshpar.models import row_values
from meshpar.models.row_check import Split, check_losses
from meshpar.rows.values import Fixed, Mixed, Ratio, Summed


def kinds(total, weight):
    def loss(p, b, key):
        values = {
            "sum": (token_losses(p, b) * b["mask"]).sum(),
            "mean": (token_losses(p, b) * b["mask"]).mean(),
            "tokens": b["mask"].sum(),
            "rows": b["ids"].shape[0] * 1.0,
            "share": b["mask"].mean(),
            "one": 1.0,
            "root": jnp.sqrt(b["mask"].sum()),
        }
        return meshpar.metrics.Mean(values[total], values[weight])

    return loss


@pytest.mark.parametrize(
    "total, weight, words",
    [
        ("sum", "tokens", ""),
        ("sum", "rows", ""),
        ("mean", "share", ""),
        ("mean", "one", ""),
        ("sum", "one", "one of them is a mean over rows, or a constant"),
        ("sum", "share", "one of them is a mean over rows, or a constant"),
        ("mean", "tokens", "one of them is a mean over rows, or a constant"),
        ("root", "tokens", "sqrt is applied"),
    ],
)
@pytest.mark.parametrize("place", ["loss", "metric"])
def test_a_mean_has_to_be_a_sum_over_a_sum(total, weight, words, place):
    mean = kinds(total, weight)

    def metric(p, b, key):
        return cross_entropy(p, b, key), {"of": mean(p, b, key)}

    of, split = made(mean if place == "loss" else metric), Split(2, "fsdp=2")
    if not words:
        check_losses(of, BATCH, split, evaluates=False)
        return
    with pytest.raises(LayoutError, match=f"no meshpar.metrics.Mean of sums.*{words}"):
        check_losses(of, BATCH, split, evaluates=False)


@pytest.mark.parametrize(
    "metric, plain, weighted",
    [
        (lambda b: b["mask"].mean(), "", "parts weigh as their loss does"),
        (lambda b: b["mask"].sum(), "is a sum over rows", "is a sum over rows"),
        (lambda b: b["mask"].max(), "reduce_max runs", "reduce_max runs"),
        (lambda b: b["mask"].size * 1.0, "is a sum over rows", "is a sum over rows"),
        (
            lambda b: (b["x"].sum(-1) * b["mask"]).sum() / b["mask"].sum(),
            "divides by a sum over rows",
            "",
        ),
        (lambda b: 3.0, "", ""),
        (lambda b: meshpar.metrics.Sum(b["mask"].sum()), "", ""),
        (lambda b: meshpar.metrics.Sum(b["mask"].mean()), "no sum over", "no sum over"),
        (lambda b: meshpar.metrics.Max(b["mask"].max()), "", ""),
        (lambda b: meshpar.metrics.Last(b["mask"][-1, 0]), "", ""),
    ],
)
def test_metrics_are_means_or_name_their_kind(metric, plain, weighted):
    def loss(has_weight):
        def of(p, b, key):
            mean = meshpar.metrics.Mean(
                (token_losses(p, b) * b["mask"]).sum(), b["mask"].sum()
            )
            return mean if has_weight else cross_entropy(p, b, key), {"m": metric(b)}

        return of

    for has_weight, words in ((False, plain), (True, weighted)):
        of, split = made(loss(has_weight)), Split(2, "data=2")
        if not words:
            check_losses(of, BATCH, split, evaluates=False)
            continue
        with pytest.raises(LayoutError, match=rf"aux\['m'\].*{words}.*meshpar"):
            check_losses(of, BATCH, split, evaluates=False)


def test_the_value_of_each_kind_is_told():
    def values(loss):
        arguments = made(loss).loss, abstract_params(), BATCH, jax.random.key(0)
        result = row_values.row_values(row_values.RowTraces(*arguments))
        return result.loss

    assert values(cross_entropy) == Summed(-1) and values(plain_sum) == Summed(0)
    assert isinstance(values(ratio), Ratio) and isinstance(values(constant), Fixed)
    assert isinstance(values(variance), Mixed)
