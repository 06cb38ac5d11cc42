"""Losses that cannot be traced with other rows, and programs that need no check."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow
from support.mean_losses import BATCH, B, D, L, made
from support.other_losses import plain_sum
from support.tiny_models import batch, model

import meshpar
from meshpar.errors import LayoutError
from meshpar.models.row_check import Split, check_losses
from meshpar.rows import analysis as row_analysis
from meshpar.rows.two_traces import Differences


def test_a_loss_that_needs_its_number_of_rows_is_refused():
    def fixed(p, b, key):
        return b["x"].reshape(B, L, D).mean()

    with pytest.raises(LayoutError, match="2 rows of a part.*reshape"):
        check_losses(made(fixed), BATCH, Split(4, "data=4"), evaluates=False)


def test_pairs_of_rows_need_a_weight():
    """An even number of rows can be traced, but not told."""

    def pairs(p, b, key):
        x = b["x"].reshape(-1, 2, L, D)
        return (x[:, 0] - x[:, 1]).mean()

    split = Split(4, "data=4")
    with pytest.raises(LayoutError, match="another number of rows.*aux.'weight'"):
        check_losses(made(pairs), BATCH, split, evaluates=False)

    def weighted(p, b, key):
        return pairs(p, b, key), {"weight": 1.0}

    check_losses(made(weighted), BATCH, split, evaluates=False)


@pytest.mark.parametrize("where", ["rule", "comparison"])
def test_an_error_of_the_analysis_is_not_blamed_on_the_loss(where, monkeypatch):
    def unforeseen(*_):
        raise IndexError("no such dim")

    if where == "rule":
        monkeypatch.setitem(row_analysis._RULES, "reduce_sum", unforeseen)
    else:
        monkeypatch.setattr(Differences, "between", unforeseen)
    split = Split(2, "data=2")
    words = "fails at it .IndexError: no such dim.*error of meshpar, not of the loss"
    with pytest.raises(LayoutError, match=words) as error:
        check_losses(made(plain_sum), BATCH, split, evaluates=False)
    assert "traced" not in str(error.value)

    def weighted(p, b, key):
        return plain_sum(p, b, key), {"weight": 1.0}

    check_losses(made(weighted), BATCH, split, evaluates=False)


@pytest.mark.parametrize(
    "sizes",
    [
        slow({}),
        dict(dropout=0.3, kv_heads=4),
        dict(tied=True, position="learned", norm="layernorm"),
        slow(dict(loss_block=4)),
    ],
)
def test_the_decoders_are_accepted(framework, sizes):
    if framework == "linen":
        unknown = ("loss_block", "kv_heads")
        sizes = {k: v for k, v in sizes.items() if k not in unknown}
    check_losses(model(framework, **sizes), batch(), Split(2, "data=2"), True)


class Line(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((D,)), out_sharding=("embed",))


def test_jit_sees_the_whole_batch_unless_it_has_microbatches():
    def loss(module, batch):
        errors = batch["mask"] * (batch["x"] @ module.w[...]) ** 2
        return errors.sum() / batch["mask"].sum(), {"tokens": batch["mask"].sum()}

    data = {"x": np.ones((B, D), np.float32), "mask": np.ones(B, np.float32)}
    line, pair = meshpar.from_nnx(Line, loss), jax.devices()[:2]
    program = meshpar.lower(line, optax.sgd(0.1), "data=2", data, devices=pair)
    metrics = program.gradients(program.init(0), data)[0]
    assert metrics["loss"] == D**2 and metrics["tokens"] == B
    with pytest.raises(LayoutError, match="microbatches=2 splits the batch"):
        layout = "data=2,microbatches=2"
        meshpar.lower(line, optax.sgd(0.1), layout, data, devices=pair)
    with pytest.raises(LayoutError, match="replica=2 splits the batch"):
        mode = meshpar.LocalSGD(period=1)
        meshpar.lower(line, optax.sgd(0.1), "replica=2", data, devices=pair, mode=mode)
