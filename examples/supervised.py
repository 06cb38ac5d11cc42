"""Supervised fine-tuning of a chat model: the loss is on the assistant's words alone.

    meshpar run examples/supervised.py:supervised --layout=fsdp=8

A line of --set=path=FILE is {"messages": [{"role": "user", "content": "..."}, ...]}.
"""

import json
import pathlib

import jax
import numpy as np
import optax
from flax import nnx

from meshpar import Run
from meshpar.metrics import Mean


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        qkv = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, -1, 16)
        q, k, v = (qkv[:, :, i] for i in range(3))
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += self.out(heads.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder(base, width, depth, seed):
    """A decoder with the weights of an npz file, {path: array}, or random ones."""
    made, stored = (
        Decoder(width, depth, nnx.Rngs(seed)),
        np.load(base, allow_pickle=False) if base else {},
    )
    for path, x in nnx.iter_graph(made):
        if base and isinstance(x, nnx.Param):
            x[...] = stored["/".join(map(str, path))]
    return made


def encode(chats, length):
    """Chats as arrays [chats, length]: bytes, the next bytes, and their weights."""
    tokens = np.zeros((len(chats), length + 1), np.int32)
    weights = np.zeros((len(chats), length + 1), np.float32)
    for row, chat in enumerate(chats):
        end = 0
        for message in chat["messages"]:
            head, text = f"{message['role']}: ", f"{message['content']}\n"
            for part, weight in (head, 0), (text, message["role"] == "assistant"):
                numbers = list(part.encode())[: length + 1 - end]
                own = slice(end, end := end + len(numbers))
                tokens[row, own], weights[row, own] = numbers, weight
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:], "weights": weights[:, 1:]}


def loss(model, batch):
    logits, weights = model(batch["tokens"]), batch["weights"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    right = (logits.argmax(-1) == batch["next"]) * weights
    # Rows have unequal numbers of the assistant's bytes, and each byte counts the same.
    total = weights.sum()
    return Mean((losses * weights).sum(), total), {"accuracy": Mean(right.sum(), total)}


def sums():
    """Chats to learn from without a file."""
    for a, b in np.ndindex(16, 16):
        texts = ("user", f"What is {a} + {b}?"), ("assistant", f"It is {a + b}.")
        yield {"messages": [{"role": role, "content": text} for role, text in texts]}


def supervised(path="", base="", width=64, depth=4, length=64, rate=3e-3, seed=0):
    lines = pathlib.Path(path).read_text().splitlines() if path else []
    data = encode([json.loads(line) for line in lines] or list(sums()), length)
    return Run(
        decoder(base, width, depth, seed),
        optax.adamw(rate),
        {name: np.delete(x, np.s_[::8], axis=0) for name, x in data.items()},
        loss,
        evaluation={name: x[::8] for name, x in data.items()},
        layers="blocks",
    )
