"""A small regression under local SGD, and the papers' recurrences for it, plainly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from support.tiny_models import host

import meshpar

ROWS, STEPS = 16, 14


class Regression(nnx.Module):
    """Two layers; its parameters fill several blocks of a quantized wire."""

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
    made = hidden @ model.down[...] + model.bias[...][None]
    return jnp.square(made - batch["y"]).mean()


MODEL = meshpar.from_nnx(Regression, loss)


def rows(seed):
    """The batch of a step."""
    x = np.random.default_rng(seed).normal(size=(ROWS, 8)).astype(np.float32)
    y = np.sin(x @ np.random.default_rng(0).normal(size=(8, 8)))
    return {"x": x, "y": y.astype(np.float32)}


def lowered(layout, optimizer, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    return meshpar.lower(MODEL, optimizer, layout, rows(0), devices=devices, **options)


def trained(program, steps=STEPS):
    state, seen = program.init(0), []
    for step in range(1, steps + 1):
        state, metrics = program.step(state, rows(step))
        seen.append(metrics)
    return state, seen


@functools.cache
def gradient():
    return jax.jit(jax.grad(lambda p, b: MODEL.loss(p, b, jax.random.key(0))[0]))


def flat(params):
    return np.concatenate([np.asarray(x).reshape(-1) for x in params.values()])


def like(params, vector):
    made, offset = {}, 0
    for path, x in params.items():
        made[path] = jnp.asarray(vector[offset : offset + x.size].reshape(x.shape))
        offset += x.size
    return made


class Int8:
    """The wire written down plainly: 256 numbers share a scale, an eighth of a byte."""

    largest = 127

    def __call__(self, x):
        blocks = np.pad(x, (0, -len(x) % 256)).reshape(-1, 256)
        scale = np.abs(blocks).max(1, keepdims=True) / np.float32(self.largest)
        numbers = np.round(blocks / np.where(scale == 0, 1, scale))
        return (numbers * scale).reshape(-1)[: len(x)].astype(np.float32)


class Int4(Int8):
    largest = 7


def bf16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


LOSSY = {"int8": Int8(), "int4": Int4(), "bf16": bf16}


def reference(program, mode, inner, steps=STEPS):
    """Params of every replica after `steps`, from the recurrences of the papers."""
    replicas, count = program.layout.replica, mode.fragments
    start = host(program.model.init(jax.random.key(0)))
    size = program.outer.chunk_size * mode.num_chunks
    params = [start] * replicas
    states = [inner.init(start) for _ in params]
    center = flat(start)
    pieces = [slice(f * size, (f + 1) * size) for f in range(count)]
    outer = mode.outer or optax.sgd(1.0)
    memory = [outer.init(jnp.asarray(center[piece])) for piece in pieces]
    wire = LOSSY.get(mode.wire, lambda x: x)
    dropped_up = np.zeros((replicas, len(center)), np.float32)
    dropped_down = np.zeros(len(center), np.float32)
    begins, period, number, flying = 0, None, -1, []

    def center_step(f, snapshots):
        """What comes back to every replica: [R, fragment]."""
        piece = pieces[f]
        old = center[piece].copy()
        if mode.gossip is not None:
            matrix = np.asarray(mode.gossip.rounds(replicas))
            matrix = matrix[flying_number % len(matrix)]
            return np.array(matrix @ snapshots, np.float32)
        differences = []
        for r in range(replicas):
            x = snapshots[r] - old + dropped_up[r, piece]
            sent = wire(x)
            dropped_up[r, piece] = x - sent if mode.error_feedback else 0
            differences.append(sent)
        mean = np.mean(differences, axis=0)
        elastic = isinstance(mode.merge, meshpar.Elastic)
        if elastic:
            update = replicas * mode.merge.alpha * mean
        else:
            update, memory[f] = outer.update(-mean, memory[f], jnp.asarray(old))
            update = np.asarray(update) * (1 + mode.staleness) ** -mode.damping
        x = update + dropped_down[piece]
        dropped_down[piece] = x - wire(x) if mode.error_feedback else 0
        center[piece] = old + wire(x)
        return np.tile(old if elastic else center[piece], (replicas, 1))

    for step in range(1, steps + 1):
        for r in range(replicas):
            own = jax.tree.map(lambda x, r=r: np.split(x, replicas)[r], rows(step))
            g = gradient()(params[r], own)
            update, states[r] = inner.update(g, states[r], params[r])
            params[r] = optax.apply_updates(params[r], update)
        if period is None or step > begins + period:
            begins = step - 1
            period = mode.period(begins) if callable(mode.period) else mode.period
            number += 1
        together = callable(mode.period) and period == 1
        delay = 0 if together else mode.staleness
        for f in range(count):
            due = 1 if together else (f + 1) * period // count
            if step - begins == due:
                taken = np.stack([flat(p)[pieces[f]] for p in params])
                flying.append((step + delay, f, taken, number))
        for one in [one for one in flying if one[0] == step]:
            flying.remove(one)
            _, f, taken, flying_number = one
            back = center_step(f, taken)
            for r in range(replicas):
                now = flat(params[r])
                mine = now[pieces[f]]
                now[pieces[f]] = {
                    meshpar.Overwrite: lambda a, x, s: a,
                    meshpar.Shift: lambda a, x, s: a + x - s,
                    meshpar.Lerp: lambda a, x, s: (
                        mode.merge.own * x + (1 - mode.merge.own) * a
                    ),
                    meshpar.Elastic: lambda a, x, s: x - mode.merge.alpha * (s - a),
                }[type(mode.merge)](back[r], mine, taken[r])
                params[r] = like(start, now)
    return params


SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.05, 0.9), optax.adam(1e-2)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
