"""A small regression under local SGD, and the papers' recurrences for it in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from support.tiny_models import host

import meshpar
from meshpar import local_sgd

ROWS, STEPS = 16, 14

SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.05, 0.9), optax.adam(1e-2)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)


class Regression(nnx.Module):
    """Two layers; their parameters fill several blocks of a quantized wire."""

    def __init__(self, rngs):
        self.up = nnx.Param(
            rngs.params.normal((8, 40)) / 3, out_sharding=("embed", "mlp")
        )
        self.down = nnx.Param(
            rngs.params.normal((40, 8)) / 6, out_sharding=("mlp", "embed")
        )
        self.bias = nnx.Param(jnp.zeros(8), out_sharding=(None,))


def loss(model, batch):
    hidden = jnp.tanh(batch["x"] @ model.up[...])
    outputs = hidden @ model.down[...] + model.bias[...][None]
    return jnp.square(outputs - batch["y"]).mean()


MODEL = meshpar.from_nnx(Regression, loss)


def rows(seed):
    """The batch of a step."""
    x = np.random.default_rng(seed).normal(size=(ROWS, 8)).astype(np.float32)
    y = np.sin(x @ np.random.default_rng(0).normal(size=(8, 8)))
    return {"x": x, "y": y.astype(np.float32)}


def rows_of(replica, replicas, batch):
    """One replica's part of a batch."""
    return jax.tree.map(lambda x: np.split(x, replicas)[replica], batch)


def lower(layout, optimizer, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    return meshpar.lower(MODEL, optimizer, layout, rows(0), devices=devices, **options)


def train(program, steps=STEPS):
    """The state after some steps, and the metrics of each."""
    state, metrics_of_steps = program.init(0), []
    for step in range(1, steps + 1):
        state, metrics = program.step(state, rows(step))
        metrics_of_steps.append(metrics)
    return state, metrics_of_steps


@functools.cache
def gradient():
    return jax.jit(jax.grad(lambda p, b: MODEL.loss(p, b, jax.random.key(0))[0]))


def flat(params):
    return np.concatenate([np.asarray(x).reshape(-1) for x in params.values()])


def like(params, vector):
    """The inverse of `flat`."""
    unflattened, offset = {}, 0
    for path, x in params.items():
        part = vector[offset : offset + x.size]
        unflattened[path] = jnp.asarray(part.reshape(x.shape))
        offset += x.size
    return unflattened


def quantize(x, largest):
    """Integers up to `largest`; 256 numbers share a scale."""
    blocks = np.pad(x, (0, -len(x) % 256)).reshape(-1, 256)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(largest)
    numbers = np.round(blocks / np.where(scale == 0, 1, scale))
    return (numbers * scale).reshape(-1)[: len(x)].astype(np.float32)


WIRES = {
    "f32": lambda x: x,
    "bf16": lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)),
    "int8": lambda x: quantize(x, 127),
    "int4": lambda x: quantize(x, 7),
}
"""{wire: numbers as they arrive}."""


def circulant(replicas, distances):
    """The matrix of equal shares of oneself and of those at some distances."""
    own = np.eye(replicas)
    return sum(np.roll(own, d, axis=1) for d in (0, *distances)) / (1 + len(distances))


GRAPHS = {
    "ring": lambda n: [circulant(n, (1, -1))],
    "exponential": lambda n: [circulant(n, (-(2**r),)) for r in range(int(np.log2(n)))],
}
"""{graph: (replicas, above 2) -> matrices}: Lian et al., 2017; Assran et al., 2019."""


def merge(rule, now, snapshot, arrived):
    """A replica's new weights."""
    match rule:
        case local_sgd.Overwrite():
            return arrived
        case local_sgd.Shift():
            return arrived + now - snapshot
        case local_sgd.Lerp():
            return rule.own * now + (1 - rule.own) * arrived
        case local_sgd.Elastic():
            return now - rule.alpha * (snapshot - arrived)


def synchronizations(mode, steps):
    """(step of the snapshot, step of the arrival, fragment, round) of each."""
    begins, number, events = 0, 0, []
    while begins < steps:
        period = mode.period(begins) if callable(mode.period) else mode.period
        together = callable(mode.period) and period == 1
        for f in range(mode.fragments):
            due = 1 if together else (f + 1) * period // mode.fragments
            taken = begins + due
            arrival = taken if together else taken + mode.staleness
            events.append((taken, arrival, f, number))
        begins, number = begins + period, number + 1
    return events


class Center:
    """The global weights, flat, and their outer optimizer."""

    def __init__(self, mode, replicas, weights, fragments):
        self.mode, self.weights, self.fragments = mode, weights, fragments
        self.wire = WIRES[mode.wire]
        self.optimizer = mode.outer or optax.sgd(1.0)
        self.states = [self.optimizer.init(jnp.asarray(weights[f])) for f in fragments]
        self.dropped_up = np.zeros((replicas, len(weights)), np.float32)
        self.dropped_down = np.zeros(len(weights), np.float32)

    def step(self, number, snapshots):
        """Moves a fragment by [R, fragment]; returns the part that replicas receive."""
        mode, fragment = self.mode, self.fragments[number]
        old = self.weights[fragment].copy()
        differences = []
        for dropped, snapshot in zip(self.dropped_up, snapshots, strict=True):
            x = snapshot - old + dropped[fragment]
            sent = self.wire(x)
            dropped[fragment] = x - sent if mode.error_feedback else 0
            differences.append(sent)
        mean = np.mean(differences, axis=0)
        elastic = isinstance(mode.merge, local_sgd.Elastic)
        if elastic:
            update = len(snapshots) * mode.merge.alpha * mean
        else:
            state, weights = self.states[number], jnp.asarray(old)
            update, self.states[number] = self.optimizer.update(-mean, state, weights)
            update = np.asarray(update) * (1 + mode.staleness) ** -mode.damping
        x = update + self.dropped_down[fragment]
        self.dropped_down[fragment] = x - self.wire(x) if mode.error_feedback else 0
        self.weights[fragment] = old + self.wire(x)
        return old if elastic else self.weights[fragment].copy()


def reference(program, mode, inner, steps=STEPS):
    """Params of every replica after `steps`, from the recurrences of the papers."""
    replicas, size = program.layout.replica, program.exchange.fragments.fragment_size
    start = host(program.model.init(jax.random.key(0)))
    params = [start] * replicas
    states = [inner.init(start) for _ in params]
    fragments = [slice(f * size, (f + 1) * size) for f in range(mode.fragments)]
    center = Center(mode, replicas, flat(start), fragments)
    events, snapshots = synchronizations(mode, steps), {}
    for step in range(1, steps + 1):
        for r in range(replicas):
            gradients = gradient()(params[r], rows_of(r, replicas, rows(step)))
            update, states[r] = inner.update(gradients, states[r], params[r])
            params[r] = optax.apply_updates(params[r], update)
        for taken, arrival, f, number in events:
            if taken == step:
                snapshots[f, number] = np.stack([flat(p)[fragments[f]] for p in params])
            if arrival != step:
                continue
            before = snapshots.pop((f, number))
            if mode.gossip is None:
                arrived = [center.step(f, before)] * replicas
            else:
                matrices = mode.gossip.graph
                if isinstance(matrices, str):
                    matrices = GRAPHS[matrices](replicas)
                matrix = np.asarray(matrices[number % len(matrices)])
                arrived = np.array(matrix @ before, np.float32)
            for r in range(replicas):
                weights = flat(params[r])
                now = weights[fragments[f]]
                weights[fragments[f]] = merge(mode.merge, now, before[r], arrived[r])
                params[r] = like(start, weights)
    return params
