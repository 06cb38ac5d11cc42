"""Losses that are no means over rows, as public training scripts write them."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from support.mean_losses import D, token_losses


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
