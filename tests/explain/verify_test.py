"""verify: finds planted differences and broken contracts."""

import dataclasses

import jax.numpy as jnp
import pytest
from support.marks import slow
from support.mistakes import on_devices
from support.tiny_stack import batch, model

from meshpar.contracts.contract import Contract
from meshpar.explain.verify import Comparison, VerifyReport, verify

TINY = model()


def lower(layout, of=TINY):
    return on_devices(of, layout, batch())


def planted(change):
    """The tiny model with a loss whose gradient or value is slightly wrong."""

    def loss(params, batch, key):
        return TINY.loss(change(params), batch, key)

    return dataclasses.replace(TINY, loss=loss, layered=None)


def test_equal_layouts_are_equal():
    report = verify(lower("fsdp=2"), lower("data=1"), [batch(), batch(1)])
    assert report.ok and report.first_difference is None
    assert {c.step for c in report.comparisons} == {1, 2}
    tensors = {c.tensor for c in report.comparisons if c.kind == "gradient"}
    assert tensors == set(TINY.params)


@pytest.mark.parametrize("path", [slow("layers/kernel"), "head"])
def test_a_wrong_gradient_is_named(path):
    """Off by a ten-thousandth in the gradient of one tensor, exact in the loss."""

    def change(params):
        off = params[path] * 1e-4
        return params | {path: params[path] + off - jnp.copy(stop(off))}

    from jax.lax import stop_gradient as stop

    report = verify(lower("fsdp=2", planted(change)), lower("data=1"), [batch()])
    first = report.first_difference
    assert (first.kind, first.tensor) == ("gradient", path)
    assert 5e-5 < first.error < 5e-4


def test_a_broken_contract_is_a_failure():
    program = lower("fsdp=2")
    program.__dict__["contract"] = Contract(program.contract.terms[1:])
    report = verify(program, lower("data=1"), [batch()])
    assert report.first_difference is None and not report.ok
    assert any("over fsdp" in line for line in report.violations)


def test_nan_is_a_difference():
    assert not VerifyReport((Comparison(1, "loss", "", float("nan"), 1e-5),)).ok
