"""Losses of a tiny network, as trainers write them, that parts of a batch can give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import meshpar

ROWS, WIDTH, CLASSES = 16, 8, 5

CLASS_WEIGHTS = np.linspace(0.5, 1.5, CLASSES, dtype=np.float32)
ROW_TABLE = np.linspace(0, 1, ROWS, dtype=np.float32)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "x": normal(ROWS, WIDTH),
        "y": normal(ROWS),
        "mask": (rng.random(ROWS) < 0.6).astype(np.float32),
        "label": rng.integers(0, CLASSES, ROWS, np.int32),
        "others": normal(ROWS, 3, CLASSES),
        "teacher": rng.dirichlet(np.ones(CLASSES), ROWS).astype(np.float32),
        "temperature": rng.uniform(0.5, 2, ROWS).astype(np.float32),
        "time": ROW_TABLE,
    }


def errors(net, b, x=None):
    """The squared error of each row."""
    return jnp.square(net(b["x"] if x is None else x)[:, 0] - b["y"])


def entropies(net, b):
    """The cross-entropy of each row."""
    return optax.softmax_cross_entropy_with_integer_labels(net(b["x"]), b["label"])


# Means of what each row gives.


def squared(net, b):
    return errors(net, b).mean()


def cross_entropy(net, b):
    return entropies(net, b).mean()


def label_smoothing(net, b):
    target = optax.smooth_labels(jax.nn.one_hot(b["label"], CLASSES), 0.1)
    return optax.softmax_cross_entropy(net(b["x"]), target).mean()


def focal(net, b):
    log_p = jax.nn.log_softmax(net(b["x"]))[jnp.arange(len(b["x"])), b["label"]]
    return -(jnp.square(1 - jnp.exp(log_p)) * log_p).mean()


def huber(net, b):
    return optax.huber_loss(net(b["x"])[:, 0], b["y"]).mean()


def hinge(net, b):
    return jax.nn.relu(1 - jnp.sign(b["y"]) * net(b["x"])[:, 0]).mean()


def cosine(net, b):
    return optax.cosine_distance(net(b["x"]), b["teacher"], epsilon=1e-6).mean()


def distillation(net, b):
    logits = net(b["x"]) / b["temperature"][:, None]
    return optax.kl_divergence(jax.nn.log_softmax(logits), b["teacher"]).mean()


def masked_in_place(net, b):
    return (errors(net, b) * b["mask"]).mean()


def masked_mean(net, b):
    return meshpar.metrics.Mean((errors(net, b) * b["mask"]).sum(), b["mask"].sum())


def mean_with_epsilon(net, b):
    return meshpar.metrics.Mean(
        (errors(net, b) * b["mask"]).sum(), b["mask"].sum() + 1e-8
    )


def class_weights(net, b):
    return (entropies(net, b) * jnp.asarray(CLASS_WEIGHTS)[b["label"]]).mean()


def regularized(net, b):
    logits = net(b["x"])
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
    z_loss = jnp.square(jax.nn.logsumexp(logits, -1))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, b["label"])
    return (losses - 0.01 * entropy).mean() + 1e-3 * z_loss.mean() + 0.5


def with_weight_decay(net, b):
    return squared(net, b) + 1e-3 * jnp.square(net.head.kernel[...]).sum()


def triplet(net, b):
    anchor, other = net(b["x"]), b["others"]
    near, far = (jnp.square(anchor - other[:, i]).sum(-1) for i in range(2))
    return jax.nn.relu(near - far + 1).mean()


def contrastive_in_a_row(net, b):
    scores = jnp.einsum("bc,bkc->bk", net(b["x"]), b["others"])
    return -jax.nn.log_softmax(scores)[:, 0].mean()


def gradient_penalty(net, b):
    slopes = jax.vmap(jax.grad(lambda x: jnp.square(net(x[None])).sum()))(b["x"])
    return squared(net, b) + 0.01 * jnp.square(slopes).sum(-1).mean()


def divided_by_rows(net, b):
    return errors(net, b).sum() / len(b["x"])


def a_share_of_rows(net, b):
    return 0.3 / len(b["x"]) * errors(net, b).sum()


def counted_by_ones(net, b):
    return errors(net, b).sum() / jnp.ones(len(b["x"])).sum()


def at_least_one_row(net, b):
    return errors(net, b).sum() / jnp.maximum(jnp.float32(len(b["x"])), 1)


def equal_weights(net, b):
    return jnp.full(len(b["x"]), 1 / len(b["x"])) @ errors(net, b)


def in_half_precision(net, b):
    losses = errors(net, b)
    return (losses.astype(jnp.bfloat16) * 0 + 1).mean().astype(jnp.float32) + (
        losses.mean()
    )


def choice_in_each_row(net, b):
    losses = errors(net, b)
    return jnp.where(losses > 2, 2 * jnp.sqrt(losses + 1e-3), losses).mean()


def branch_in_each_row(net, b):
    def of_row(loss):
        return lax.cond(loss > 2, lambda: 3 * loss, lambda: loss)

    return jax.vmap(of_row)(errors(net, b)).mean()


def sorted_in_a_row(net, b):
    return jnp.sort(net(b["x"]), -1)[:, CLASSES // 2].mean()


def summed_up_in_a_row(net, b):
    return jnp.cumsum(net(b["x"]), -1)[:, 2].mean()


def two_largest_in_a_row(net, b):
    return lax.top_k(net(b["x"]), 2)[0].sum(-1).mean()


def along_features(net, b):
    scale = jnp.linspace(0.5, 1, WIDTH)[None]
    mask = jnp.ones((len(b["x"]), WIDTH)).at[:, -1].set(0)
    columns = (jnp.zeros((len(b["x"]), 1)), jnp.ones((len(b["x"]), WIDTH - 1)))
    return errors(net, b, b["x"] * scale * mask * jnp.concatenate(columns, 1)).mean()


def time_of_the_batch(net, b):
    return errors(net, b, b["x"] * b["time"][:, None]).mean()


def loop_over_features(net, b):
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x) + i, errors(net, b)).mean()


def fixed_projection(net, b):
    projection = jax.random.normal(jax.random.key(4), (CLASSES, 3))
    return jnp.square(net(b["x"]) @ projection).mean()


def by_class(net, b):
    """Summed up by class: a linear function of a table of sums."""
    sums = jax.ops.segment_sum(errors(net, b), b["label"], CLASSES)
    return (sums * CLASS_WEIGHTS).sum() / len(b["x"])


def empty_guard(net, b):
    """The mean of a masked batch, guarded as a metric."""
    losses, count = errors(net, b), b["mask"].sum()
    share = jnp.where(count > 0, (losses * b["mask"]).sum() / count, 0.0)
    mean = meshpar.metrics.Mean((losses * b["mask"]).sum(), count)
    return mean, {"share": share}


def each_row_in_turn(net, b):
    return lax.map(jnp.tanh, errors(net, b)).mean()


def scan_over_rows(net, b):
    def one(scale, row):
        return scale, scale * jnp.square(row[0] - row[1])

    rows = net(b["x"])[:, 0], b["y"]
    return lax.scan(one, jnp.float32(0.5), rows)[1].mean()


ACCEPTED = (
    *(squared, cross_entropy, label_smoothing, focal, huber, hinge, cosine),
    *(distillation, masked_in_place, masked_mean, mean_with_epsilon, class_weights),
    *(regularized, with_weight_decay, triplet, contrastive_in_a_row, gradient_penalty),
    *(divided_by_rows, a_share_of_rows, counted_by_ones, at_least_one_row),
    *(equal_weights, in_half_precision, choice_in_each_row, branch_in_each_row),
    *(sorted_in_a_row, two_largest_in_a_row, summed_up_in_a_row, along_features),
    *(time_of_the_batch, loop_over_features, fixed_projection, by_class, empty_guard),
    *(each_row_in_turn, scan_over_rows),
)
"""Losses whose parts give the loss of the batch."""

# Draws from the key of the loss, by rows or for all of them.


def noise(net, b, key):
    x = b["x"] + jax.random.normal(key, b["x"].shape)
    return errors(net, b, x).mean()


def dropout(net, b, key):
    kept = jax.random.bernoulli(jax.random.fold_in(key, 7), 0.5, b["x"].shape)
    return errors(net, b, jnp.where(kept, 2 * b["x"], 0)).mean()


def drawn_times(net, b, key):
    first, second = jax.random.split(key)
    times = jax.random.uniform(first, (len(b["x"]), 1))
    level = jax.random.uniform(second)  # One for all rows.
    return errors(net, b, b["x"] * (times + level)).mean()


def one_direction(net, b, key):
    return errors(net, b, b["x"] + jax.random.normal(key, (WIDTH,))[None]).mean()


def sampled_labels(net, b, key):
    logits = net(b["x"])
    labels = jax.random.categorical(key, lax.stop_gradient(logits))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def a_key_for_each_row(net, b, key):
    def noisy(key, x):
        return x + jax.random.normal(key, x.shape)

    x = jax.vmap(noisy)(jax.random.split(key, len(b["x"])), b["x"])
    return errors(net, b, x).mean()


def tokens_in_one_dim(net, b, key):
    noise = jax.random.normal(key, (len(b["x"]) * WIDTH,)).reshape(-1, WIDTH)
    return errors(net, b, b["x"] + noise).mean()


def mixed_with_gamma(net, b, key):
    share = jax.random.gamma(key, 2.0, (len(b["x"]),))
    return (errors(net, b) * share).mean()


DRAWING = (
    *(noise, dropout, drawn_times, one_direction, sampled_labels),
    *(a_key_for_each_row, tokens_in_one_dim, mixed_with_gamma),
)
"""Losses that draw from their key; without one they cannot be evaluated."""
