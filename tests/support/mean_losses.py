"""Losses that are means over rows, as public training scripts write them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

import meshpar
from meshpar.metrics import loss_result
from meshpar.ops import vocabulary

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
        {k: meshpar.layouts.Param(s, jnp.float32, None) for k, s in PARAMS.items()},
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
