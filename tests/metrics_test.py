"""Results of loss functions: what is accepted, and what is refused with a remedy."""

import jax
import jax.numpy as jnp
import pytest

import meshpar
from meshpar.metrics import loss_result

ONE, ROW = jnp.float32(1), jnp.ones(3)


def test_a_mean_is_divided_once_and_has_a_weight():
    loss, aux = result = loss_result(
        (meshpar.metrics.Mean(ONE * 6, ONE * 3), {"m": ONE})
    )
    assert loss == 2 and result.weight == 3 and result.metrics == {"m": ONE}
    assert set(aux) == {"m", "weight"}
    assert loss_result(result._replace(aux={})).weight is None


def test_a_mean_of_weight_0_is_0_with_a_gradient_of_0():
    def loss(x, weight):
        return loss_result(meshpar.metrics.Mean(x * weight, weight)).loss

    for weight, gradients in ((0.0, (0, 0)), (2.0, (1, 1.5))):
        found = jax.value_and_grad(loss, argnums=(0, 1))(ONE * 3, jnp.float32(weight))
        assert found == (3 * (weight > 0), gradients)


@pytest.mark.parametrize(
    "result, words",
    [
        ((ONE, ROW), r"tuple of \(.*return a loss, or \(loss, aux\)"),
        ((ONE, {}, {}), r"tuple of \(.*return a loss, or \(loss, aux\)"),
        (ROW, r"shape \(3,\); return a scalar .*meshpar.metrics.Mean"),
        (meshpar.metrics.Mean(ROW, ONE), r"the loss has shape \(3,\)"),
        (meshpar.metrics.Sum(ONE), "loss of kind Sum; return a scalar"),
        ((meshpar.metrics.Mean(ONE, ONE), {"weight": ONE}), "leave out one of them"),
        ((ONE, {"loss": ONE}), "every step reports; rename"),
        ((ONE, {"grad_norm": ONE}), "every step reports; rename"),
        ((ONE, {"m": meshpar.metrics.Mean(ONE, ROW)}), "or a scalar weight"),
        ((ONE, {"weight": ROW}), r"of \(3,\); give the weight of the loss as a scalar"),
        ((ONE, {"weight": meshpar.metrics.Sum(ONE)}), "the loss as a scalar"),
        (
            (ONE, {"m": meshpar.metrics.Mean(ONE, ONE), "m/weight": ONE}),
            "the name of the weight of aux.'m'.*rename",
        ),
    ],
)
def test_another_result_is_an_error_with_the_remedy(result, words):
    with pytest.raises(ValueError, match=words):
        loss_result(result)
