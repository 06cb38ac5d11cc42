"""Outer optimizers run on pieces of the weights, and are held to it."""

import optax
import pytest
from optax import contrib
from support.regression import NESTEROV, SGD, lower

from meshpar.errors import MeshparError, StalenessError
from meshpar.local_sgd import LocalSGD


def lowered(outer):
    return lower("replica=2", SGD, mode=LocalSGD(period=2, outer=outer))


@pytest.mark.parametrize(
    "outer, words",
    [
        (optax.clip_by_global_norm(1.0), "depends on other elements"),
        (optax.lamb(0.1), "depends on other elements"),
        (optax.add_noise(0.1, 0.5, key=0), "random numbers"),
        (contrib.reduce_on_plateau(), "uses the loss"),
    ],
)
def test_an_outer_optimizer_that_is_not_elementwise_is_refused(outer, words):
    with pytest.raises(StalenessError, match=rf"outer=.*{words}.*optax.sgd"):
        lowered(outer)


def test_elementwise_outer_optimizers_and_missing_arguments():
    for outer in (None, NESTEROV, optax.adam(0.1)):
        lowered(outer)
    with pytest.raises(MeshparError, match="needs value_fn"):
        lowered(optax.lbfgs())
