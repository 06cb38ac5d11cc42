"""A language model of LSTMs in NNX: nnx.RNN over the length, lengths of sequences."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, WIDTH = 16, 8


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)
        self.rnn = nnx.RNN(cell, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, lengths):
        return x + self.rnn(self.norm(x), seq_lengths=lengths)


class LanguageModel(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens, lengths):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, lengths)
        return self.head(x)


def loss_fn(model, batch):
    logits = model(batch["tokens"][:, :-1], batch["lengths"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    )
    is_token = jnp.arange(losses.shape[1])[None] < batch["lengths"][:, None]
    return (losses * is_token).sum(-1).mean()


def make_batch(seed, batch_size, length=9):
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, VOCAB, (batch_size, length)),
        "lengths": rng.integers(2, length, batch_size),
    }
