"""Losses that parts of a batch can give, and those that they cannot."""

import pytest
from support.mean_losses import BATCH, MEANS, cropped, made, with_dropout
from support.other_losses import (
    batch_norm,
    contrastive,
    first_row,
    guarded_ratio,
    interleaved,
    largest,
    masked_mean,
    mixed_up,
    over_rows,
    overwritten,
    plain_sum,
    ratio,
    ratio_first,
    ratio_of_means,
    ratio_or_zero,
    ratio_with_epsilon,
    reversed_rows,
    rooted,
    shuffled,
    sorted_rows,
    summed_up,
    times_inverse,
    variance,
)

from meshpar.errors import LayoutError
from meshpar.models.row_check import Split, check_losses

REFUSED = {
    ratio: "divides by a sum over rows",
    guarded_ratio: "divides by a sum over rows",
    ratio_with_epsilon: "divides by a sum over rows",
    ratio_or_zero: "divides by a sum over rows",
    ratio_of_means: "divides by a sum over rows",
    ratio_first: "divides by a sum over rows",
    times_inverse: "divides by a sum over rows",
    masked_mean: "divides by a sum over rows",
    plain_sum: "sum over rows that is not divided",
    batch_norm: "batch normalization",
    contrastive: "rows",
    variance: "batch normalization",
    largest: "reduce_max runs over rows",
    rooted: "sqrt is applied",
    first_row: "single rows are picked",
    shuffled: "rows",
    reversed_rows: "rev works along rows",
    sorted_rows: "sort works along rows",
    summed_up: "cumsum works along rows",
    overwritten: "single rows are picked",
    mixed_up: "counts rows of the batch.*other_losses.py",
    over_rows: "a loop runs over rows",
    interleaved: "rows are combined",
}


@pytest.mark.parametrize("loss", MEANS, ids=lambda loss: loss.__name__)
def test_a_mean_over_rows_is_accepted(loss):
    draws = loss in (with_dropout, cropped)  # There is no key in evaluation.
    check_losses(made(loss), BATCH, Split(2, "data=2"), evaluates=not draws)


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_another_loss_is_refused_unless_it_has_a_weight(loss):
    split = Split(4, "microbatches=4")
    words = f"{REFUSED[loss]}.*aux.'weight'.*microbatches=4 splits"
    with pytest.raises(LayoutError, match=words):
        check_losses(made(loss), BATCH, split, evaluates=False)

    def weighted(p, b, key):
        return loss(p, b, key), {"weight": 1.0}

    check_losses(made(weighted), BATCH, split, evaluates=True)
