"""Losses of a tiny network that parts of a batch cannot give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from support.row_losses import ROW_TABLE, WIDTH, errors, squared

import meshpar

# They count rows.


def weighed(weights):
    def loss(net, b):
        losses = errors(net, b)
        return (losses * weights(len(losses))).mean()

    return loss


def first_half(net, b):
    losses = errors(net, b)
    return jnp.where(jnp.arange(len(losses)) < len(losses) // 2, losses, 0).mean()


def along_rows(net, b):
    times = jnp.linspace(0, 1, len(b["x"]))[:, None]
    return errors(net, b, b["x"] * times).mean()


def stratified(net, b, key):
    rows = jnp.arange(len(b["x"]))
    times = (rows + jax.random.uniform(key, rows.shape)) / len(rows)
    return errors(net, b, b["x"] * times[:, None]).mean()


def table_of_rows(net, b):
    return (errors(net, b) * ROW_TABLE).mean()


def every_other_has_guidance(net, b):
    guided = jax.nn.one_hot(jnp.arange(len(b["x"])) % 2, 2)[:, :1]
    return errors(net, b, b["x"] * guided).mean()


def picked(rows):
    return lambda net, b: rows(errors(net, b)).mean()


def pairs(net, b):
    y = net(b["x"])[:, 0]
    return jnp.square(y[1:] - y[:-1]).mean()


def ranks(net, b):
    losses = errors(net, b)
    return (losses * jnp.argsort(jnp.argsort(losses))).mean()


def scaled(factor):
    return lambda net, b: errors(net, b).mean() * factor(len(b["x"]))


def unbiased(net, b):
    losses = errors(net, b)
    return losses.sum() / (len(losses) - 1)


def one_more(net, b):
    losses = errors(net, b)
    return (losses.sum() + 1) / len(losses)


def plus_rows(net, b):
    return squared(net, b) + 0.01 * len(b["x"])


def as_many_rounds_as_rows(net, b):
    step = lax.fori_loop(0, len(b["x"]), lambda i, x: x + 0.1, 0.0)
    return squared(net, b) * step


def branch_on_rows(net, b):
    return squared(net, b) * (2 if len(b["x"]) < 8 else 1)


def other_work_for_few_rows(net, b):
    losses = errors(net, b)
    return (losses if len(losses) < 8 else jnp.sqrt(losses + 1)).mean()


def folded_by_number(net, b, key):
    def noisy(number, x):
        return x + jax.random.normal(jax.random.fold_in(key, number), x.shape)

    x = jax.vmap(noisy)(jnp.arange(len(b["x"])), b["x"])
    return errors(net, b, x).mean()


def running_total(net, b):
    def one(total, x):
        return total + x, total * x

    return lax.scan(one, jnp.float32(0), errors(net, b))[1].mean()


def divided_in_a_loop(net, b):
    return lax.map(lambda x: jnp.tanh(x / len(b["x"])), errors(net, b)).mean()


def numbered_in_a_loop(net, b):
    numbers = jnp.arange(len(b["x"]), dtype=jnp.float32)
    return lax.map(lambda row: row[0] * row[1], (errors(net, b), numbers)).mean()


COUNTING = {
    "running_total": running_total,
    "divided_in_a_loop": divided_in_a_loop,
    "numbered_in_a_loop": numbered_in_a_loop,
    "first_half": first_half,
    "along_rows": along_rows,
    "stratified": stratified,
    "table_of_rows": table_of_rows,
    "guidance": every_other_has_guidance,
    "arange": weighed(lambda n: jnp.arange(n, dtype=jnp.float32)),
    "numpy": weighed(lambda n: np.arange(n, dtype=np.float32) / n),
    "cumsum": weighed(lambda n: jnp.cumsum(jnp.ones(n))),
    "eye": weighed(lambda n: jnp.eye(n)[1]),
    "tril": weighed(lambda n: jnp.tril(jnp.ones((n, n))).sum(0)),
    "scatter": weighed(lambda n: jnp.zeros(n).at[0].set(1)),
    "padded": weighed(lambda n: jnp.pad(jnp.ones(n - 1), (0, 1))),
    "every_other": picked(lambda x: x[::2]),
    "half": picked(lambda x: x[: len(x) // 2]),
    "no_last": picked(lambda x: x[:-1]),
    "first": picked(lambda x: x[0]),
    "rolled": picked(lambda x: x * jnp.roll(x, 1)),
    "reversed": picked(lambda x: x * x[::-1]),
    "pairs": pairs,
    "ranks": ranks,
    "unbiased": unbiased,
    "root": scaled(lambda n: n**0.5),
    "log": scaled(np.log),
    "jnp_log": scaled(lambda n: jnp.log(jnp.float32(n))),
    "bessel": scaled(lambda n: n / (n - 1)),
    "one_more": one_more,
    "plus_rows": plus_rows,
    "at_most_eight": scaled(lambda n: min(n, 8)),
    "branch": branch_on_rows,
    "other_work": other_work_for_few_rows,
    "rounds": as_many_rounds_as_rows,
    "folded": folded_by_number,
}
"""Losses that count rows, or compute with their number."""


# A number made of all rows chooses.


def chosen(choose):
    return lambda net, b: choose(errors(net, b).mean())


def larger_if(choice, loss):
    return jnp.where(choice, loss, 2 * loss)


def above_their_mean(losses):
    return jnp.where(losses > losses.mean(), losses, 0).mean()


CHOOSING = {
    "where": chosen(lambda x: jnp.where(x > 2, 3 * x, x)),
    "cond": chosen(lambda x: lax.cond(x > 2, lambda x: 3 * x, lambda x: x, x)),
    "switch": chosen(
        lambda x: lax.switch((x > 2).astype(int), [jnp.sin, lambda x: x], x)
    ),
    "at_least": chosen(lambda x: jnp.maximum(x, 3.0)),
    "at_most": chosen(lambda x: jnp.minimum(x, 3.0)),
    "clipped": chosen(lambda x: jnp.clip(x, 1.0, 3.0)),
    "flooding": chosen(lambda x: jnp.abs(x - 3.0) + 3.0),
    "cut_to_an_integer": chosen(lambda x: x * x.astype(int)),
    "whole_number": chosen(lambda x: x.astype(int).astype(float)),
    "sign": chosen(lambda x: x * jnp.sign(x - 3.0)),
    "arithmetic": chosen(lambda x: x * (x > 3.0)),
    "finite": chosen(lambda x: jnp.where(jnp.isfinite(x), x, 0)),
    "positive": chosen(lambda x: jnp.where(x > 0, 3 * x, x)),
    "masked": lambda net, b: larger_if(b["y"].sum() > 0, squared(net, b)),
    "zeroed": lambda net, b: jnp.where(b["y"].sum() > 0, squared(net, b), 0.0),
    "larger": lambda net, b: jnp.maximum(squared(net, b), jnp.abs(b["y"]).mean()),
    "factor": lambda net, b: squared(net, b) * jnp.where(b["y"].mean() > 0, 1.0, 2.0),
    "stacked": lambda net, b: jnp.max(jnp.stack([squared(net, b), b["y"].mean()])),
    "rows": lambda net, b: above_their_mean(errors(net, b)),
}
"""Losses in which a number made of all rows chooses."""


# Draws that parts would make by themselves.


def own_noise(net, b):
    drawn = jax.random.normal(jax.random.key(1), b["x"].shape)
    return errors(net, b, b["x"] + drawn).mean()


def own_keys(net, b):
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), 3), len(b["x"]))
    drawn = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return errors(net, b, b["x"] + drawn).mean()


def rows_in_the_second_dim(net, b, key):
    drawn = jax.random.normal(key, (WIDTH, len(b["x"]))).T
    return errors(net, b, b["x"] + drawn).mean()


def shuffled(net, b, key):
    order = jax.random.permutation(key, len(b["x"]))
    return errors(net, b, 0.5 * (b["x"] + b["x"][order])).mean()


OWN_DRAWS = {
    "own_noise": (own_noise, "a key of its own.*argument `key`"),
    "own_keys": (own_keys, "a key of its own.*argument `key`"),
    "second_dim": (rows_in_the_second_dim, "another first dim.*first dim, and move"),
    "shuffled": (shuffled, "rows"),
}


# Functions of all rows together.


def info_nce(net, b):
    z = net(b["x"])
    labels = jnp.arange(len(z))
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, labels).mean()


def total(net, b):
    return (errors(net, b) * b["mask"]).sum()


def mean_of(weight):
    return lambda net, b: meshpar.metrics.Mean(total(net, b), weight(b["mask"].sum()))


OF_ALL_ROWS = {
    "log_of_mean": (lambda net, b: jnp.log(squared(net, b)), "log is applied"),
    "variance": (lambda net, b: errors(net, b).var(), "enters single rows"),
    "standard": (lambda net, b: errors(net, b).std(), "enters single rows"),
    "info_nce": (info_nce, "combined with other rows"),
    "largest": (lambda net, b: errors(net, b).max(), "reduce_max runs over rows"),
    "hardest": (lambda net, b: lax.top_k(errors(net, b), 4)[0].mean(), "rows"),
    "quantile": (lambda net, b: jnp.quantile(errors(net, b), 0.9), "rows"),
    "median": (lambda net, b: jnp.median(errors(net, b)), "rows"),
    "sorted": (lambda net, b: (jnp.sort(errors(net, b)) * b["y"]).mean(), "rows"),
    "ratio": (lambda net, b: total(net, b) / b["mask"].sum(), "divides by a sum"),
    "sum": (total, "not divided by their number"),
    "at_least_one": (mean_of(lambda n: jnp.maximum(n, 1)), "Mean is 0 where"),
    "plus_one": (mean_of(lambda n: n + 1), "Mean is 0 where"),
}
