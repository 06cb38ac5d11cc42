"""Random models with a loss, an optimizer and a layout, and the plain loop as judge."""

import dataclasses
import functools
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util
from models.random_losses import LOSSES
from models.random_nets import LENGTH, VOCAB, LinenNet, NnxNet
from models.random_parts import PARTS, WIDTH
from support import plain_optax

import meshpar
from meshpar.errors import MeshparError
from meshpar.models.model import STEP

ROWS, SIDE, STEPS = 16, 4, 3

EQUAL, REFUSED, WRONG, CRASHED = "equal", "refused", "WRONG", "CRASHED RAW"

ARRANGEMENTS = {
    "nnx": ("one", "one", "list", "twice", "remat", "scanned", "layers", "attributes"),
    "linen": ("one", "one", "list", "twice", "remat", "scanned", "layers", "jit"),
}
"""{framework: how blocks of parts are put together}."""

LAYERED = {
    ("nnx", "layers"): "blocks",
    ("nnx", "attributes"): "block_*",
    ("linen", "layers"): "block_*",
    ("linen", "scanned"): "blocks",
}
"""{(framework, arrangement): name of the layers}; others have none."""

ADAPTIVE = {"eps": 1e-2}
"""Updates that divide by a root of squares; a small eps makes noise of rounding."""


def _kernels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in jax.tree_util.keystr(path), params
    )


def _labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", params)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2, **ADAPTIVE),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=_kernels, **ADAPTIVE),
    "by ndim": lambda: optax.adamw(
        1e-2,
        weight_decay=0.1,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        **ADAPTIVE,
    ),
    "lamb": lambda: optax.lamb(1e-2, **ADAPTIVE),
    "lars": lambda: optax.lars(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-3, **ADAPTIVE),
    "adagrad": lambda: optax.adagrad(1e-2, eps=1e-2),
    "nadam": lambda: optax.nadam(1e-2, **ADAPTIVE),
    "radam": lambda: optax.radam(1e-2, **ADAPTIVE),
    "novograd": lambda: optax.novograd(1e-3, **ADAPTIVE),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)
    ),
    "clipped by block": lambda: optax.chain(
        optax.clip_by_block_rms(0.01), optax.sgd(0.1)
    ),
    "adaptive clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.01), optax.sgd(0.1)
    ),
    "schedule": lambda: optax.sgd(optax.warmup_cosine_decay_schedule(0, 0.1, 2, 10)),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.0, 10)
    ),
    "multi": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2, **ADAPTIVE), "other": optax.sgd(0.05)}, _labels
    ),
    "partly": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), _kernels), optax.sgd(0.05)
    ),
    "accumulated": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "plateau": lambda: optax.chain(
        optax.sgd(0.05), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "sign": lambda: optax.sign_sgd(1e-3),
}
"""{name: optimizer}."""

CHAOTIC = {"lion", "adafactor", "muon", "sm3", "sign"}
"""Optimizers that make steps of full size from gradients that are rounding alone.

They train one step, and weights whose gradient is rounding are not judged.
"""

LAYOUTS = (
    *("data=8", "fsdp=8", "data=2,fsdp=2", "fsdp=4,zero=1", "fsdp=4,zero=2"),
    *("data=2,microbatches=2", "fsdp=2,microbatches=4", "data=1,microbatches=4"),
    *("fsdp=2,tensor=2,allow=.", "data=2,tensor=2,allow=."),
)
"""Layouts of any model."""

LAYERED_LAYOUTS = (
    *("pipe=2,microbatches=2", "pipe=2,data=2,microbatches=4", "pipe=4,microbatches=4"),
    *("pipe=2,fsdp=2,microbatches=2", "pipe=2,microbatches=4,schedule=gpipe"),
    *("pipe=2,virtual_stages=2,microbatches=2", "fsdp=4,remat=full", "fsdp=4"),
    *("data=2,fsdp=2,microbatches=2", "fsdp=2,zero=1,remat=dots", "data=4"),
    *("pipe=2,tensor=2,microbatches=2,allow=.", "pipe=2,microbatches=2,remat=full"),
)
"""Layouts of models with layers."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """A model, what trains it, and where."""

    framework: str
    data: str
    arrangement: str
    parts: tuple[str, ...]
    loss: str
    optimizer: str
    layout: str
    lowering: str = ""

    @property
    def layers(self) -> str:
        return LAYERED.get((self.framework, self.arrangement), "")


def draw(seed: int) -> Draw:
    """The draw of a seed."""
    rng = random.Random(seed)
    framework = rng.choice(("nnx", "linen"))
    data = rng.choice(("sequences", "sequences", "tokens", "images"))
    arrangement = rng.choice(ARRANGEMENTS[framework])
    own = PARTS[framework, data == "images"]
    parts = rng.sample(sorted(own.modules), rng.choice((1, 1, 2)))
    parts += rng.sample(sorted(own.functions), rng.choice((0, 1, 1)))
    rng.shuffle(parts)
    loss = "sown" if "sown" in parts else rng.choice(sorted(set(LOSSES) - {"sown"}))
    optimizer = rng.choice(sorted(OPTIMIZERS))
    layouts, lowering = LAYOUTS, rng.choice(("", "", "shard_map"))
    if (framework, arrangement) in LAYERED:
        layouts = LAYERED_LAYOUTS
    layout = rng.choice(layouts)
    if "tensor" in layout or "remat" in layout:
        lowering = ""
    if "tensor" in layout and "dense" not in parts:
        parts.append("dense")  # Its dims have names.
    drawn = framework, data, arrangement, tuple(parts), loss, optimizer, layout
    return Draw(*drawn, lowering)


def loss_of(of: Draw):
    """The user's loss function of a draw: (module or apply, batch) -> loss."""
    of_output = LOSSES[of.loss]

    def nnx_loss(module, batch, **asked):
        out = module(batch["x"])
        if of.loss == "sown":
            found = nnx.pop(module, nnx.Intermediate)
            asked["aux"] = sum(x.mean() for x in jax.tree.leaves(found))
        if of.loss == "penalized":
            asked["params"] = nnx.to_pure_dict(nnx.state(module, nnx.Param))
        return of_output(out, batch, **asked)

    def linen_loss(apply, batch, **asked):
        if of.loss == "sown":
            out, new = apply(batch["x"], mutable=["intermediates"])
            asked["aux"] = sum(x.mean() for x in jax.tree.leaves(new))
        else:
            out = apply(batch["x"])
        if of.loss == "penalized":
            asked["params"] = nn.meta.unbox(apply.variables["params"])
        return of_output(out, batch, **asked)

    loss = nnx_loss if of.framework == "nnx" else linen_loss
    if of.loss == "noisy":
        return lambda model, batch, key: loss(model, batch, key=key)
    if of.loss == "scheduled":
        return lambda model, batch, step: loss(model, batch, step=step)
    return lambda model, batch: loss(model, batch)


def batch_of(of: Draw, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    length = SIDE * SIDE if of.data == "images" else LENGTH
    shapes = {"sequences": (LENGTH, WIDTH), "images": (SIDE, SIDE, WIDTH)}
    if of.data == "tokens":
        x = rng.integers(0, VOCAB, (ROWS, LENGTH))
    else:
        x = rng.normal(size=(ROWS, *shapes[of.data])).astype(np.float32)
    mask = rng.random((ROWS, length)) < 0.7
    mask[:, 0] = True
    return {
        "x": x,
        "label": rng.integers(0, VOCAB, (ROWS, length)),
        "target": rng.normal(size=(ROWS, length, VOCAB)).astype(np.float32),
        "mask": mask.astype(np.float32),
        "weight": rng.integers(1, 4, ROWS).astype(np.float32),
    }


class Plain:
    """The user's own training on one device, without meshpar.

    Attributes:
      start: parameters at the start, as the module's user has them.
    """

    def __init__(self, of: Draw) -> None:
        self._of, self._loss = of, loss_of(of)
        if of.framework == "nnx":
            module = NnxNet(of, nnx.Rngs(0))
            self.start = nnx.state(module)
            kinds = nnx.RngState, nnx.Param, ...
            self._graph, self._random, *self._like = nnx.split(module, *kinds)
            self._params, self._state = map(nnx.to_pure_dict, self._like)
        else:
            keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
            example = batch_of(of, 0)["x"][:1]
            variables = dict(jax.jit(LinenNet(of, True).init)(keys, example))
            variables.pop("intermediates", None)
            self.start = nn.meta.unbox(variables)
            self._state = dict(self.start)
            self._params = self._state.pop("params")

    def train(self, optimizer, batches):
        """[(metrics, {path: array}, gradients {path: array})] of every step."""
        run = self._nnx if self._of.framework == "nnx" else self._linen
        steps = plain_optax.steps(run, self._params, self._state, optimizer, batches)
        found = []
        for metrics, params, state, grads in steps:
            weights = _flat(params) | _flat(state)
            found.append((metrics, weights, _flat(grads)))
        return found

    def _asked(self, step):
        if self._of.loss == "noisy":
            return {"key": jax.random.key(5)}
        return {"step": step} if self._of.loss == "scheduled" else {}

    def _nnx(self, params, state, batch, step):
        variables = [nnx.clone(like) for like in self._like]
        for own, given in zip(variables, (params, state), strict=True):
            nnx.replace_by_pure_dict(own, given)
        module = nnx.merge(self._graph, nnx.clone(self._random), *variables)
        result = self._loss(module, batch, **self._asked(step))
        nnx.pop(module, nnx.Intermediate)
        _, _, new = nnx.state(module, nnx.RngState, nnx.Param, ...)
        return *value_of(result), nnx.to_pure_dict(new)

    def _linen(self, params, state, batch, step):
        new = dict(state)
        asked = self._of.loss == "sown"

        def apply(*args, mutable=()):
            rngs = {"dropout": jax.random.key(7)}
            kinds = [*state, *mutable]
            variables = {"params": params, **state}
            out = LinenNet(self._of, True).apply(
                variables, *args, mutable=kinds, rngs=rngs
            )
            new.update({kind: out[1][kind] for kind in state})
            return (out[0], {k: out[1][k] for k in mutable}) if asked else out[0]

        apply.variables = {"params": params}
        result = self._loss(apply, batch, **self._asked(step))
        return *value_of(result), new


def value_of(result):
    """(loss, metrics) of a user's result on the whole batch."""
    value, aux = result if type(result) is tuple else (result, {})
    if isinstance(value, meshpar.metrics.Mean):
        value = value.total / value.weight
    found = {}
    for name, x in aux.items():
        if isinstance(x, meshpar.metrics.Mean):
            x = x.total / jnp.where(x.weight == 0, 1, x.weight)
        found[name] = x[0] if isinstance(x, tuple) else x
    return value, {"loss": value, **found}


def _flat(tree):
    flat = traverse_util.flatten_dict(tree)
    return {"/".join(map(str, keys)): np.asarray(x) for keys, x in flat.items()}


def model_of(of: Draw) -> meshpar.Model:
    loss = loss_of(of)
    quiet = {}
    if of.loss == "noisy":
        quiet["evaluation_loss_fn"] = lambda *args: loss(*args, key=None)
    if of.framework == "nnx":
        make = functools.partial(NnxNet, of)
        return meshpar.from_nnx(
            lambda rngs: make(rngs), loss, layers=of.layers, **quiet
        )
    example = batch_of(of, 0)["x"][:1]
    quiet["evaluation_module"] = LinenNet(of, False)
    return meshpar.from_linen(
        LinenNet(of, True), loss, example, layers=of.layers, **quiet
    )


def outcome(of: Draw) -> tuple[str, str]:
    """(verdict, why) of a draw."""
    with jax.numpy_rank_promotion("allow"), nnx.use_eager_sharding(False):
        num_steps = 1 if of.optimizer in CHAOTIC else STEPS
        batches = [batch_of(of, seed) for seed in range(num_steps)]
        plain = Plain(of)  # Errors of these lines are the generator's own.
        wanted = plain.train(OPTIMIZERS[of.optimizer](), batches)
        try:
            return _compared(of, plain, wanted, batches)
        except MeshparError as error:
            return REFUSED, str(error)
        except Exception as error:
            return CRASHED, f"{type(error).__name__}: {error}"


def _compared(of, plain, wanted, batches):
    layout = meshpar.layouts.parse(of.layout)
    devices = jax.devices()[: layout.num_devices]
    options = {"devices": devices, "lowering": of.lowering}
    optimizer = OPTIMIZERS[of.optimizer]()
    program = meshpar.lower(model_of(of), optimizer, layout, batches[0], **options)
    state = program.init(0, params=plain.start)
    before = jax.device_get(program.weights(state))
    for batch, (metrics, weights, grads) in zip(batches, wanted, strict=True):
        state, found = program.step(state, batch)
        for name, want in metrics.items():
            if problem := _difference(found[name], want, 2e-5 * _size(want) + 1e-6):
                return WRONG, f"{name}: {problem}"
        after = jax.device_get(program.weights(state))
        if problem := _of_weights(of, before, after, weights, grads):
            return WRONG, problem
    return EQUAL, ""


def _of_weights(of, before, after, wanted, grads):
    """The first weight that differs; "" without."""
    largest = max(map(_size, grads.values()))
    after = {path: x for path, x in after.items() if path != STEP}
    if after.keys() != wanted.keys():
        return f"variables {sorted(after.keys() ^ wanted.keys())} are not in both"
    for path, want in wanted.items():
        found, grad = after[path], grads.get(path)
        if of.optimizer in CHAOTIC and grad is not None:
            seen = np.abs(grad) > 1e-3 * largest
            found, want = np.where(seen, found, want), want
        change = _size(want - before[path])
        limit = 3e-4 * change + 3e-6 * _size(want) + 1e-7
        if problem := _difference(found, want, limit):
            return f"{path}: {problem}; it changes by {change:.3g}"
    return ""


def _size(x):
    return float(np.abs(np.asarray(x, np.float64)).max(initial=0))


def _difference(found, want, limit):
    """How far two arrays are apart; "" within a limit."""
    found, want = (np.asarray(x, np.float64) for x in (found, want))
    if found.shape != want.shape:
        return f"shape {found.shape} in place of {want.shape}"
    apart = _size(found - want)
    within = apart <= limit and np.isfinite(want).all()
    return "" if within else f"{apart:.3g} apart, of {_size(want):.3g}"


def named(of: Draw) -> str:
    parts = "+".join(of.parts)
    words = of.framework, of.data, of.arrangement, parts, of.loss, of.optimizer
    return " ".join((*words, of.layout, of.lowering)).strip()
