"""Islands of a linear regression, and the papers' recurrences for them in numpy."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar
from meshpar.islands import ASP, Islands

ROWS, DIM = 8, 4
RATE = 0.05

BASE = Islands(
    1,
    consistency=ASP(),
    server_optimizer="sgd",
    learning_rate=0.05,
    momentum=0.5,
    local_learning_rate=0.03,
    alpha=0.3,
    compensation=0.7,
    ranges=3,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of `BASE` that differ, and the momentum of the islands' optimizer."""

    settings: dict
    momentum: float = 0.6

    @property
    def mode(self):
        return dataclasses.replace(BASE, **self.settings)


def _cases():
    for push in (1, 3):
        for fetch in (1, 2):
            both = dict(push=push, fetch=fetch)
            yield f"downpour {push} {fetch}", Case(both)
            yield f"damped {push} {fetch}", Case(dict(algorithm="damped") | both)
        adagrad = dict(server_optimizer="adagrad", push=push)
        yield f"adagrad {push}", Case(adagrad)
        yield f"adam {push}", Case(adagrad | dict(server_optimizer="adam"))
        easgd = dict(algorithm="easgd", push=push)
        yield f"easgd {push}", Case(easgd, momentum=0.0)
        yield f"eamsgd {push}", Case(easgd)
        diloco = dict(algorithm="diloco", push=push, quorum=1, learning_rate=0.6)
        yield f"diloco {push}", Case(diloco)
    for fetch in (1, 2):
        yield f"compensated {fetch}", Case(dict(algorithm="compensated", fetch=fetch))


CASES = dict(_cases())
"""{"ALGORITHM PUSH FETCH": case}, of one island."""


# The program.


class Net(nn.Module):
    """Two matrices, one of which is trained."""

    @nn.compact
    def __call__(self, x_BD):
        init = nn.with_logical_partitioning(nn.initializers.normal(0.5), (None, None))
        frozen_DD = self.param("frozen", init, (DIM, DIM))
        return x_BD @ frozen_DD @ self.param("own", init, (DIM, DIM))


def loss(apply, batch):
    errors_B = jnp.square(apply(batch["x"]) - batch["y"]).sum(-1)
    weight = batch["weight"].sum()
    return (batch["weight"] * errors_B).sum() / weight, {"weight": weight}


def batch(number):
    """The batch of a step; batches differ in weight."""
    rng = np.random.default_rng(number)
    return {
        "x": rng.normal(size=(ROWS, DIM)).astype(np.float32),
        "y": rng.normal(size=(ROWS, DIM)).astype(np.float32),
        "weight": rng.uniform(0.5, 2.0, ROWS).astype(np.float32),
    }


def given():
    """The weights that programs start from: not those of any seed."""
    rng = np.random.default_rng(99)
    paths = "frozen", "own"
    return {p: rng.normal(size=(DIM, DIM)).astype(np.float32) / 2 for p in paths}


def lower(momentum, mode=None, devices=None):
    """The program, by default on one device."""
    model = meshpar.from_linen(Net(), loss, batch(0)["x"], trained="own")
    optimizer = optax.sgd(RATE, momentum or None, nesterov=True)
    devices = devices or jax.devices()[:1]
    return meshpar.lower(
        model, optimizer, "data=1", batch(0), devices=devices, mode=mode
    )


@functools.cache
def lowered(momentum, host=""):
    """The program of an island, or of a host's; tests share what is compiled."""
    return lower(momentum, dataclasses.replace(BASE, host=host) if host else None)


@functools.cache
def synchronous_state(momentum, steps=3):
    """The portable state of a synchronous run, on the host."""
    program = lowered(momentum)
    state = program.init(0, given())
    for step in range(steps):
        state, _ = program.step(state, batch(100 + step))
    return jax.device_get(program.in_model_order(state))


# The recurrences, in float64.


def gradient(w_DD, part):
    """(gradient of the loss, weight of the batch)."""
    frozen_DD = given()["frozen"].astype(np.float64)
    z_BD = part["x"] @ frozen_DD
    errors_BD = (z_BD @ w_DD - part["y"]) * part["weight"][:, None]
    weight = part["weight"].sum(dtype=np.float64)
    return 2 * z_BD.T @ errors_BD / weight, weight


@dataclasses.dataclass
class Momentum:
    """Nesterov's momentum as EASGD's authors write it (eq. 5): a point and its speed.

    Optax holds `ahead`, the point at which the gradient is taken.
    """

    x: np.ndarray
    v: np.ndarray
    decay: float

    @property
    def ahead(self):
        return self.x + self.decay * self.v

    def move_to(self, ahead):
        self.x = ahead - self.decay * self.v

    def step(self, part, elastic=0.0):
        g, weight = gradient(self.ahead, part)
        self.v = self.decay * self.v - RATE * g
        self.x = self.x + self.v - elastic
        return weight


def started(momentum, steps=0):
    """The optimizer of a run after synchronous steps from the given weights."""
    own = given()["own"].astype(np.float64)
    inner = Momentum(own, np.zeros_like(own), momentum)
    for step in range(steps):
        inner.step(batch(100 + step))
    return inner


class Server:
    """The store: its weights, updates counted, and rounds with a quorum."""

    def __init__(self, mode, weights):
        self.mode, self.w, self.version = mode, weights, 0
        self.members, self.waiting, self.moments = set(), [], {}

    def push(self, name, vector, weight, version, read):
        if not self.mode.quorum:
            return self.apply(vector, self.version - version, read)
        self.waiting.append((name, vector, weight))
        self.close_complete()

    def close_complete(self):
        present = {name for name, *_ in self.waiting}
        if present and (len(present) >= self.mode.quorum or present >= self.members):
            total = sum(weight for *_, weight in self.waiting)
            mean = sum(vector * weight for _, vector, weight in self.waiting) / total
            self.waiting = []
            self.apply(mean)

    def moment(self, name, like, start=0.0):
        return self.moments.setdefault(name, np.full_like(like, start))

    def apply(self, g, staleness=0, read=None):
        mode, self.version = self.mode, self.version + 1
        if mode.algorithm == "easgd":
            self.w = self.w + g
            return
        if mode.algorithm == "damped":
            g = g / (1 + staleness)
        if mode.algorithm == "compensated":
            g = g + mode.compensation * g * g * (self.w - read)
        optimizer = "sgd" if mode.algorithm == "diloco" else mode.server_optimizer
        if optimizer == "adagrad":
            squares = self.moment("squares", g, 0.1)
            squares += g * g
            g = g / np.sqrt(squares + 1e-7)
        elif optimizer == "adam":
            first, second = self.moment("first", g), self.moment("second", g)
            first += 0.1 * (g - first)
            second += 0.001 * (g * g - second)
            # Optax corrects the bias in float32, where 1 - 0.999 has few digits.
            unbiased = [1 - np.float32(b) ** self.version for b in (0.9, 0.999)]
            g = first / unbiased[0] / (np.sqrt(second / unbiased[1]) + 1e-8)
        else:
            trace = self.moment("trace", g)
            trace[:] = g + mode.momentum * trace
            nesterov = mode.algorithm == "diloco"
            g = g + mode.momentum * trace if nesterov else trace.copy()
        self.w = self.w - mode.learning_rate * g


class Gradients:
    """A worker of Downpour SGD (Dean et al. 2012, algorithm 1) and its kin."""

    def __init__(self, name, server, start):
        self.name, self.server, self.mode = name, server, server.mode
        self.steps, self.sum, self.weight = 0, 0.0, 0.0

    def communicate(self):
        mode, server = self.mode, self.server
        if self.steps and self.steps % mode.push == 0:
            mean = self.sum / mode.push
            server.push(self.name, mean, self.weight, self.version, self.read)
            self.sum, self.weight = 0.0, 0.0
        if self.steps % mode.fetch == 0:
            self.w, self.version = server.w, server.version

    def train(self, part):
        g, weight = gradient(self.w, part)
        self.read, self.sum, self.weight = self.w, self.sum + g, self.weight + weight
        self.w = self.w - self.mode.local_learning_rate * g
        self.steps += 1


class Weights:
    """A worker of EASGD (Zhang et al. 2015, eq. 2, 3 and 5) or of DiLoCo."""

    def __init__(self, name, server, start):
        self.name, self.server, self.mode = name, server, server.mode
        self.inner = dataclasses.replace(start)
        self.steps, self.elastic, self.weight = 0, 0.0, 0.0

    def communicate(self):
        server, steps = self.server, self.steps
        if steps and steps % self.mode.push == 0:
            if self.mode.algorithm == "easgd":
                self.elastic = self.mode.alpha * (self.inner.ahead - server.w)
                vector = self.elastic
            else:
                vector = self.start - self.inner.ahead
            server.push(self.name, vector, self.weight, 0, None)
            self.weight = 0.0
        if not steps or (
            self.mode.algorithm == "diloco" and steps % self.mode.push == 0
        ):
            self.start = server.w
            self.inner.move_to(server.w)

    def train(self, part):
        self.weight += self.inner.step(part, self.elastic)
        self.steps, self.elastic = self.steps + 1, 0.0


class Reference:
    """Islands that communicate and train in turns."""

    def __init__(self, mode, start):
        self.server, self.start = Server(mode, start.ahead), start
        self.workers, self.turns = {}, {}

    def join(self, name):
        kind = (
            Weights if self.server.mode.algorithm in ("easgd", "diloco") else Gradients
        )
        self.workers[name] = kind(name, self.server, self.start)
        self.turns[name] = 0
        self.server.members.add(name)

    def leave(self, name):
        del self.workers[name]
        self.server.members.remove(name)
        self.server.close_complete()

    def turn(self, name, part):
        """An island communicates or trains."""
        worker = self.workers[name]
        worker.train(part) if self.turns[name] % 2 else worker.communicate()
        self.turns[name] += 1

    def resume(self):
        """Everything goes on from a checkpoint."""

    def weights(self):
        return self.server.w


# One island of a host.


def check_host(case, host, replace, synchronous_steps):
    """Compares the store with the recurrence after every step of one island.

    The island starts from given weights or goes on from synchronous steps, is replaced,
    and resumes from a checkpoint.

    Args:
      case: the case.
      host: name of the host.
      replace: replaces the island of a `Host`.
      synchronous_steps: steps of one program before.
    """
    whole = lowered(case.momentum, host)
    mode = dataclasses.replace(case.mode, host=host)

    def fresh():
        running = type(whole._running)()
        return dataclasses.replace(whole, mode=mode, _running=running)

    def check(program, state, numbers):
        for number in numbers:
            state, _ = program.step(state, batch(number))
            program.host.drain()
            reference.turn("a", batch(number))
            reference.turn("a", None)
            got, want = program.host.center().reshape(DIM, DIM), reference.weights()
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
        return state

    reference = Reference(case.mode, started(case.momentum, synchronous_steps))
    reference.join("a")
    reference.turn("a", None)
    program = fresh()
    if synchronous_steps:
        portable = synchronous_state(case.momentum, synchronous_steps)
        state = program.as_stored(portable)
    else:
        state = program.init(0, given())
    state = check(program, state, range(4))
    replace(program.host)
    reference.leave("a")
    reference.join("a")
    reference.turn("a", None)
    state = check(program, state, range(4, 9))
    portable, extra = program.in_model_order(state), program.extra_state(state)
    program.close()
    program = fresh()
    check(program, program.as_stored(portable, extra), range(9, 13))
    program.close()
