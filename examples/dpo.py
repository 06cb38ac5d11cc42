r"""Direct preference optimization: of two answers, the chosen one becomes likelier.

    meshpar run examples/dpo.py:dpo --layout="pipe=2,fsdp=4" \
        --set=path=pairs.jsonl

A line of the file is {"prompt": "...", "chosen": "...", "rejected": "..."}. The frozen
reference stands beside the policy in every layer, so a layout splits both alike.

Source: Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, equation 7.
"""

import json
import pathlib

import numpy as np
import optax
from flax import nnx
from supervised import decoder, encode

import meshpar


class Both(nnx.Module):
    """A part of the policy and its frozen copy in the reference."""

    def __init__(self, part):
        self.policy, self.reference = part, nnx.clone(part)

    def __call__(self, both):
        return self.policy(both[0]), self.reference(both[1])


class PolicyAndReference(nnx.Module):
    def __init__(self, decoder):
        self.embed = Both(decoder.embed)
        self.blocks = nnx.List([Both(block) for block in decoder.blocks])
        self.head = Both(decoder.head)

    def __call__(self, tokens):
        both = self.embed((tokens, tokens))
        for block in self.blocks:
            both = block(both)
        return self.head(both)


def loss(model, batch, beta):
    # The two answers to a prompt, [rows, 2, length], go through the model as one batch.
    tokens, targets, weights = (batch[k] for k in ("tokens", "next", "weights"))
    logits = model(tokens.reshape(-1, tokens.shape[-1]))

    def log_probability(logits):  # of each answer, [rows, 2]
        logits = logits.reshape(*tokens.shape, -1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return -(losses * weights).sum(-1)

    policy, reference = map(log_probability, logits)
    rewards = beta * (policy - reference)
    margin = rewards[:, 0] - rewards[:, 1]
    return nnx.softplus(-margin).mean(), {
        "margin": margin.mean(),
        "chosen_wins": (margin > 0).mean(),
    }


def sums():
    """Preferences to learn without a file: the right sum over a wrong one."""
    for a, b in np.ndindex(16, 16):
        right, wrong = f"It is {a + b}.", f"It is {a + b + 1}."
        yield {"prompt": f"What is {a} + {b}?", "chosen": right, "rejected": wrong}


def chats(pairs, answer):
    for pair in pairs:
        question = {"role": "user", "content": pair["prompt"]}
        yield {"messages": [question, {"role": "assistant", "content": pair[answer]}]}


def dpo(path="", base="", beta=0.1, width=64, depth=4, length=64, rate=1e-3, seed=0):
    lines = pathlib.Path(path).read_text().splitlines() if path else []
    pairs = [json.loads(line) for line in lines] or list(sums())
    answers = [encode(list(chats(pairs, a)), length) for a in ("chosen", "rejected")]
    data = {name: np.stack([x[name] for x in answers], 1) for name in answers[0]}
    model = meshpar.from_nnx(
        PolicyAndReference(decoder(base, width, depth, seed)),
        lambda model, batch: loss(model, batch, beta),
        layers="blocks",
        trained=r"(^|/)policy/",
    )
    return meshpar.Run(model, optax.adamw(rate), data)
