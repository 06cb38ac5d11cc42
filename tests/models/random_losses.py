"""Losses of random models, of what a network gives for a batch."""

import jax
import jax.numpy as jnp
import optax
from models.random_nets import VOCAB

import meshpar


def _errors(out, batch):
    return jnp.square(out - batch["target"]).mean(axis=-1)


def _cross_entropies(out, batch):
    return optax.softmax_cross_entropy_with_integer_labels(out, batch["label"])


def mean_squares(out, batch, **_):
    return _errors(out, batch).mean()


def cross_entropy(out, batch, **_):
    return _cross_entropies(out, batch).mean()


def weighted(out, batch, **_):
    losses = _cross_entropies(out, batch) * batch["weight"][:, None]
    return meshpar.metrics.Mean(losses.sum(), batch["weight"].sum() * out.shape[1])


def masked(out, batch, **_):
    losses, mask = _cross_entropies(out, batch), batch["mask"]
    return (losses * mask).sum() / mask.sum(), {"weight": mask.sum()}


def masked_by_row(out, batch, **_):
    """Each row is the mean over its own mask."""
    losses, mask = _cross_entropies(out, batch), batch["mask"]
    return ((losses * mask).sum(axis=1) / mask.sum(axis=1)).mean()


def with_metrics(out, batch, **_):
    losses = _cross_entropies(out, batch)
    right = (out.argmax(axis=-1) == batch["label"]).astype(jnp.float32)
    metrics = meshpar.metrics
    return losses.mean(), {
        "accuracy": right.mean(),
        "masked": metrics.Mean((right * batch["mask"]).sum(), batch["mask"].sum()),
        "right": metrics.Sum(right.sum()),
        "largest": metrics.Max(out.max()),
    }


def smoothed(out, batch, **_):
    """Label smoothing, a z-loss and a Huber loss."""
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], VOCAB), 0.1)
    losses = optax.softmax_cross_entropy(out, labels)
    losses += 1e-2 * jnp.square(jax.nn.logsumexp(out, axis=-1))
    return (losses + optax.huber_loss(out, batch["target"]).mean(axis=-1)).mean()


def cosine(out, batch, **_):
    distances = optax.cosine_distance(out, batch["target"], epsilon=1e-3)
    return distances.mean(), {"by label": _by_label(distances, batch)}


def _by_label(values, batch):
    hot = jax.nn.one_hot(batch["label"], VOCAB)
    weight = hot.sum(axis=(0, 1))
    return meshpar.metrics.Mean(jnp.einsum("bl,blv->v", values, hot), weight)


def first_place(out, batch, **_):
    """A loss of one position alone."""
    return optax.softmax_cross_entropy_with_integer_labels(
        out[:, -1], batch["label"][:, -1]
    ).mean()


def noisy(out, batch, key=None, **_):
    """Noise that sums to zero in each row, from the key of the loss."""
    if key is not None:
        noise = jax.random.normal(key, out.shape)
        out = out + 0.0 * noise
    return _errors(out, batch).mean()


def scheduled(out, batch, step=0, **_):
    """A weight that grows with the steps."""
    return _errors(out, batch).mean() * (1 + 0.5 * step)


def penalized(out, batch, params=None, **_):
    squares = (jnp.square(x).sum() for x in jax.tree.leaves(params))
    return _cross_entropies(out, batch).mean() + 1e-2 * sum(squares)


def sown(out, batch, aux=0.0, **_):
    return _cross_entropies(out, batch).mean() + 0.1 * aux, {"aux": aux}


LOSSES = {
    fn.__name__: fn
    for fn in (
        *(mean_squares, cross_entropy, weighted, masked, masked_by_row, with_metrics),
        *(smoothed, cosine, first_place, noisy, scheduled, penalized, sown),
    )
}
"""{name: loss of (output, batch)}."""
