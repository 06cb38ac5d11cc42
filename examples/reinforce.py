"""Reinforcement learning: samples of a policy are the batches of the next step.

    python examples/reinforce.py "data=2,fsdp=4"

A bandit with ten arms, by REINFORCE (Williams, 1992) with the mean reward as baseline:
`program.weights` gives the policy its weights, and the rewards come from outside.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import meshpar

ARMS, STATES = 10, 16


class Policy(nnx.Module):
    """One of `STATES` -> logits of the arms."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(STATES, 32, rngs=rngs)
        self.head = nnx.Linear(32, ARMS, rngs=rngs)

    def __call__(self, states):
        return self.head(nnx.gelu(self.embed(states)))


def loss(policy, batch):
    log_probs = jax.nn.log_softmax(policy(batch["state"]))
    chosen = jax.numpy.take_along_axis(log_probs, batch["arm"][:, None], 1)[:, 0]
    return -(chosen * batch["advantage"]).mean()


def sample(policy, random, rows):
    """A batch of the policy's own choices, and their mean reward."""
    states = random.integers(STATES, size=rows)
    logits = np.asarray(policy(states))
    arms = (logits + random.gumbel(size=logits.shape)).argmax(1)
    rewards = (arms == states % ARMS).astype(np.float32)
    batch = {"state": states, "arm": arms, "advantage": rewards - rewards.mean()}
    return batch, rewards.mean()


def train(layout, steps=150, rows=256):
    """The mean reward of every step."""
    random, template = np.random.default_rng(0), Policy(nnx.Rngs(0))
    batch, _ = sample(template, random, rows)
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    model = meshpar.from_nnx(Policy, loss)
    program = meshpar.lower(model, optax.adam(0.02), layout, batch, devices=devices)
    state, rewards = program.init(seed=0), []
    for _ in range(steps):
        program.update(template, state)  # The policy's weights, for its next choices.
        batch, reward = sample(template, random, rows)
        state, _ = program.step(state, batch)
        rewards.append(float(reward))
    return rewards


if __name__ == "__main__":
    meshpar.simulate(8)
    for step, reward in enumerate(train(sys.argv[1])):
        if step % 10 == 0:
            print(f"step {step}: mean reward {reward:.3f}")
