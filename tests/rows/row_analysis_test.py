"""Losses that parts of a batch can give, and those that they cannot."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from support.tiny_models import batch, model

import meshpar
from meshpar import vocabulary
from meshpar.errors import LayoutError
from meshpar.models import row_check
from meshpar.models.metrics import loss_result
from meshpar.models.row_check import Split, check_losses
from meshpar.rows import analysis as row_analysis
from meshpar.rows.values import Fixed, Mixed, Ratio, Summed

B, L, D, V = 8, 6, 4, 16
PARAMS = {"w": (D, V), "table": (V, D), "bias": (V,), "kernel": (3, D, D)}
BATCH = {
    "x": jax.ShapeDtypeStruct((B, L, D), jnp.float32),
    "mask": jax.ShapeDtypeStruct((B, L), jnp.float32),
    "ids": jax.ShapeDtypeStruct((B, L), jnp.int32),
    "label": jax.ShapeDtypeStruct((B,), jnp.int32),
}


def abstract_params():
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in PARAMS.items()}


def made(loss):
    """A model of loss(params, batch, key)."""

    def result(params, batch, key):
        return loss_result(loss(params, batch, key))

    key = jax.random.key(0)
    return meshpar.Model(
        {k: meshpar.Param(s, jnp.float32, None) for k, s in PARAMS.items()},
        init=None,
        loss=result,
        evaluation_loss=lambda params, batch: result(params, batch, key),
        bind=None,
    )


def logits(p, b):
    return b["x"] @ p["w"] + p["bias"][None, None]


def token_losses(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, b), b["ids"])


def cross_entropy(p, b, key):
    return token_losses(p, b).mean()


def merged(p, b, key):
    """All tokens as one dim, as public trainers do."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(p, b).reshape(-1, V), b["ids"].reshape(-1)
    )
    return losses.mean()


def one_hot(p, b, key):
    target = jax.nn.one_hot(b["ids"], V)
    return -(jax.nn.log_softmax(logits(p, b)) * target).sum(-1).mean()


def picked_by_row_number(p, b, key):
    last = jax.nn.log_softmax(logits(p, b)[:, -1])
    return -last[jnp.arange(last.shape[0]), b["label"]].mean()


def shifted(p, b, key):
    logits_BLV = logits(p, b)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits_BLV, b["ids"][:, 1:]
    ).mean()


def divided_by_a_count(p, b, key):
    losses = token_losses(p, b)
    return losses.sum() / losses.size


def divided_first(p, b, key):
    losses = token_losses(p, b)
    return (losses / losses.size).sum()


def counted_by_ones(p, b, key):
    losses = token_losses(p, b).mean(-1)
    return losses.sum() / jnp.ones(losses.shape[0]).sum()


def times_one_over(p, b, key):
    return token_losses(p, b).sum() * (1.0 / b["ids"].size)


def half_precision(p, b, key):
    return token_losses(p, b).astype(jnp.bfloat16).mean()


def in_blocks(p, b, key):
    """A mean over blocks of the length, rematerialized."""

    def blocks(x):
        return x.reshape(x.shape[0], 2, L // 2, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def block(total, inputs):
        x, ids = inputs
        return total + cross_entropy(p, {"x": x, "ids": ids}, key), None

    return lax.scan(block, 0.0, (blocks(b["x"]), blocks(b["ids"])))[0] / 2


def with_a_loop(p, b, key):
    x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x) + i, b["x"])
    return (x**2).mean()


def attention(p, b, key):
    x = b["x"] + p["table"][b["ids"]]
    mask = jnp.tril(jnp.ones((L, L)))[None]
    scores = jnp.einsum("bld,bmd->blm", x, x) + jnp.where(mask > 0, 0, -1e9)
    return (jax.nn.softmax(scores) @ x).mean()


def heads(p, b, key):
    x = b["x"].reshape(-1, L, 2, D // 2)
    return jax.nn.dot_product_attention(x, x, x, is_causal=True).mean()


def convolved(p, b, key):
    x = lax.conv_general_dilated(
        b["x"], p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return (
        nn.GroupNorm(num_groups=2)
        .apply({"params": {"scale": jnp.ones(D), "bias": jnp.zeros(D)}}, x)
        .mean()
    )


def with_dropout(p, b, key):
    kept = jax.random.bernoulli(key, 0.5, b["x"].shape)
    return jnp.where(kept, b["x"] * 2, 0).mean()


def with_penalties(p, b, key):
    z_loss = (jax.nn.logsumexp(logits(p, b), -1) ** 2).mean()
    return cross_entropy(p, b, key) + 0.1 * z_loss + 1e-4 * (p["w"] ** 2).sum()


def means_of_rows(p, b, key):
    """Each row by its own tokens; then a mean over rows."""
    mask = b["mask"]
    rows = (token_losses(p, b) * mask).sum(-1) / jnp.maximum(mask.sum(-1), 1)
    return rows.mean()


def by_matrix_product(p, b, key):
    losses = token_losses(p, b).mean(-1)
    return jnp.ones(losses.shape[0]) @ losses / losses.shape[0]


def per_row_gradient(p, b, key):
    gradient = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum()))(b["x"])
    return (gradient**2).mean()


def vocabulary_loss(p, b, key):
    return vocabulary.token_losses(logits(p, b), b["ids"]).mean()


def sorted_in_a_row(p, b, key):
    return jnp.sort(b["x"], axis=1)[:, 0].mean() + jnp.cumsum(b["x"], 1).mean()


def stacked(p, b, key):
    """Two means, joined and summed; and rows that are joined along a new dim."""
    x = jnp.stack([b["x"], b["x"] * 2], axis=0)
    return jnp.stack([x.mean(), b["mask"].mean()]).sum()


def cropped(p, b, key):
    """A crop of each row at a place of its own, written into zeros."""

    def crop(x, key):
        first = jax.random.randint(key, (), 0, 2)
        return lax.dynamic_slice_in_dim(x, first, L - 2)

    parts = jax.vmap(crop)(b["x"], jax.random.split(key, b["x"].shape[0]))
    return jnp.zeros_like(b["x"]).at[:, 2:].set(parts).mean()


def recurrent(p, b, key):
    cell = nn.RNN(nn.GRUCell(D))
    params = cell.init(key, jnp.zeros((1, L, D)))
    return (cell.apply(params, b["x"]) ** 2).mean()


def correct(p, b, key):
    hits = logits(p, b)[:, 0].argmax(-1) == b["label"]
    five = lax.top_k(logits(p, b)[:, 0], 5)[1] == b["label"][:, None]
    return hits.mean() + five.any(-1).mean()


def constant(p, b, key):
    return (p["w"] ** 2).sum()


MEANS = (
    *(cross_entropy, merged, one_hot, picked_by_row_number, shifted, in_blocks),
    *(divided_by_a_count, divided_first, counted_by_ones, times_one_over),
    *(half_precision, with_a_loop, attention, heads, convolved, with_dropout),
    *(with_penalties, means_of_rows, by_matrix_product, per_row_gradient),
    *(vocabulary_loss, sorted_in_a_row, stacked, cropped, recurrent, correct),
    constant,
)


@pytest.mark.parametrize("loss", MEANS, ids=lambda loss: loss.__name__)
def test_a_mean_over_rows_is_accepted(loss):
    check_losses(made(loss), BATCH, Split(2, "data=2"), evaluates=True)


def ratio(p, b, key):
    return (token_losses(p, b) * b["mask"]).sum() / b["mask"].sum()


def guarded_ratio(p, b, key):
    count = b["mask"].sum()
    return (token_losses(p, b) * b["mask"]).sum() / jnp.maximum(count, 1)


def ratio_with_epsilon(p, b, key):
    return (token_losses(p, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-8)


def ratio_or_zero(p, b, key):
    count = b["mask"].sum()
    total = (token_losses(p, b) * b["mask"]).sum()
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0.0)


def ratio_of_means(p, b, key):
    return (token_losses(p, b) * b["mask"]).mean() / b["mask"].mean()


def ratio_first(p, b, key):
    return (token_losses(p, b) * b["mask"] / b["mask"].sum()).sum()


def times_inverse(p, b, key):
    return (token_losses(p, b) * b["mask"]).sum() * (1 / b["mask"].sum())


def masked_mean(p, b, key):
    return jnp.mean(token_losses(p, b), where=b["mask"] > 0)


def plain_sum(p, b, key):
    return token_losses(p, b).sum()


def batch_norm(p, b, key):
    x = b["x"] - b["x"].mean((0, 1), keepdims=True)
    return (x**2).mean()


def contrastive(p, b, key):
    x = b["x"].mean(1)
    scores = x @ x.T
    return optax.softmax_cross_entropy_with_integer_labels(
        scores, jnp.arange(scores.shape[0])
    ).mean()


def variance(p, b, key):
    return token_losses(p, b).var()


def largest(p, b, key):
    return token_losses(p, b).max()


def rooted(p, b, key):
    return jnp.sqrt((b["x"] ** 2).mean())


def first_row(p, b, key):
    return token_losses(p, b)[0].mean()


def shuffled(p, b, key):
    return (b["x"] * jax.random.permutation(key, b["x"])).mean()


def reversed_rows(p, b, key):
    return (b["x"] * b["x"][::-1]).mean()


def sorted_rows(p, b, key):
    return (jnp.sort(b["x"], axis=0) * b["x"]).mean()


def summed_up(p, b, key):
    return jnp.cumsum(b["x"], axis=0).mean()


def overwritten(p, b, key):
    return (lax.dynamic_update_slice(b["x"], p["w"][None, :, :D], (0, 0, 0))).mean()


def mixed_up(p, b, key):
    order = jax.random.permutation(key, b["x"].shape[0])
    return (0.3 * b["x"] + 0.7 * b["x"][order]).var(axis=(1, 2)).mean()


def over_rows(p, b, key):
    return lax.scan(lambda c, x: (jnp.tanh(c + x.sum()), None), 0.0, b["x"])[0]


def interleaved(p, b, key):
    """Rows after the length: the second reshape cuts them elsewhere."""
    x = b["x"].swapaxes(0, 1).reshape(b["x"].shape)
    return (x * b["x"]).mean()


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
    mixed_up: "single rows are picked",
    over_rows: "a loop runs over rows",
    interleaved: "rows are combined",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_another_loss_is_refused_unless_it_has_a_weight(loss):
    split = Split(4, "microbatches=4")
    words = f"{REFUSED[loss]}.*meshpar.Mean.*aux.'weight'.*microbatches=4 splits"
    with pytest.raises(LayoutError, match=words):
        check_losses(made(loss), BATCH, split, evaluates=False)

    def weighted(p, b, key):
        return loss(p, b, key), {"weight": 1.0}

    check_losses(made(weighted), BATCH, split, evaluates=True)


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
        return meshpar.Mean(values[total], values[weight])

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
    with pytest.raises(LayoutError, match=f"no meshpar.Mean of sums.*{words}"):
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
        (lambda b: meshpar.Sum(b["mask"].sum()), "", ""),
        (lambda b: meshpar.Sum(b["mask"].mean()), "no sum over", "no sum over"),
        (lambda b: meshpar.Max(b["mask"].max()), "", ""),
        (lambda b: meshpar.Last(b["mask"][-1, 0]), "", ""),
    ],
)
def test_metrics_are_means_or_name_their_kind(metric, plain, weighted):
    def loss(has_weight):
        def of(p, b, key):
            mean = meshpar.Mean((token_losses(p, b) * b["mask"]).sum(), b["mask"].sum())
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
        result = row_check.row_values(
            made(loss).loss, abstract_params(), BATCH, jax.random.key(0)
        )
        return result.loss

    assert values(cross_entropy) == Summed(-1) and values(plain_sum) == Summed(0)
    assert isinstance(values(ratio), Ratio) and isinstance(values(constant), Fixed)
    assert isinstance(values(variance), Mixed)


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


def test_a_primitive_that_no_rule_foresees_needs_a_weight(monkeypatch):
    def unforeseen(*_):
        raise IndexError("no such dim")

    monkeypatch.setitem(row_analysis._RULES, "reduce_sum", unforeseen)
    split = Split(2, "data=2")
    with pytest.raises(LayoutError, match="could not be followed.*no such dim"):
        check_losses(made(plain_sum), BATCH, split, evaluates=False)

    def weighted(p, b, key):
        return plain_sum(p, b, key), {"weight": 1.0}

    check_losses(made(weighted), BATCH, split, evaluates=False)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        dict(dropout=0.3, kv_heads=4),
        dict(tied=True, position="learned", norm="layernorm"),
        dict(loss_block=4),
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
