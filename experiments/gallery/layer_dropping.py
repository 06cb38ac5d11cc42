"""Progressive layer dropping: loss, theta(t), and the layers that really run."""

import dataclasses
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import matplotlib.figure
import numpy as np
import optax
from flax import nnx

import meshpar
from experiments import data, recipes
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.language_model import language_model
from experiments.recipes.config import Config
from meshpar.methods import layer_dropping
from meshpar.runs.config import with_settings

LEAST = 0.5
"""The keep probability at the end, as in the paper."""

_SMALL = ("model.depth=4", "model.embed=32", "model.mlp=64", "model.length=32")
_LARGE = ("model.depth=8", "model.embed=48", "model.mlp=192", "model.length=32")
_TIMED = ("model.depth=12", "model.embed=128", "model.mlp=512", "model.length=64")
"""Wide enough that a step spends its time in the layers."""

_CONSTANTS, _COINS = 8, 2000
"""Layers of the model whose layers add constants; steps whose coins are counted."""

_TIMED_STEPS, _ROUNDS, _ALMOST_ONE = 10, 8, 1 - 2.0**-20


class LayerCounter:
    """Counts the layers that a program really runs, by callbacks in each layer."""

    def __init__(self):
        self._lock, self._forward, self._backward = threading.Lock(), 0, 0

    def add_forward(self) -> None:
        with self._lock:
            self._forward += 1

    def add_backward(self) -> None:
        with self._lock:
            self._backward += 1

    def take(self) -> tuple[int, int]:
        """The forward and backward passes of layers since the last call."""
        jax.effects_barrier()
        with self._lock:
            found = self._forward, self._backward
            self._forward = self._backward = 0
        return found

    def counted(self, model: meshpar.Model) -> meshpar.Model:
        """The model, whose layers report that they run in training."""
        layered = model.layered

        @jax.custom_vjp
        def reported(x: Any) -> Any:
            return x

        def forward(x: Any) -> tuple[Any, None]:
            return x, None

        def backward(_: None, gradient: Any) -> tuple[Any]:
            jax.debug.callback(self.add_backward)
            return (gradient,)

        reported.defvjp(forward, backward)

        def layer(params: Any, x: Any, key: Any, context: Any) -> Any:
            jax.debug.callback(self.add_forward)
            return layered.layer(params, reported(x), key, context)

        layered_counted = dataclasses.replace(layered, layer=layer)
        return dataclasses.replace(
            model, layered=layered_counted, loss=layered_counted.loss
        )


def _config(sizes: tuple[str, ...]) -> Config:
    others = "model.heads=4", "model.kv_heads=4", "model.vocab=256"
    return with_settings(recipes.get("tiny"), [*sizes, *others])


def _batches(config: Config, steps: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Windows of the standard library's text, in bytes."""
    tokens, length = data.load(config.data).train, config.model.length
    starts = np.random.default_rng(seed).integers(
        0, len(tokens) - length - 1, (steps, config.batch_size)
    )
    found = np.asarray(tokens)[starts[..., None] + np.arange(length + 1)]
    return [
        {"tokens": x[:, :-1].astype(np.int32), "targets": x[:, 1:].astype(np.int32)}
        for x in found
    ]


def _program(
    model: meshpar.Model,
    schedule: layer_dropping.Schedule | None,
    batch: Any,
    layout: str = "data=1",
) -> meshpar.TrainProgram:
    if schedule is not None:
        model = layer_dropping.with_dropped_layers(model, schedule)
    return meshpar.lower(
        model,
        optax.adamw(3e-3),
        layout,
        batch,
        devices=jax.devices()[:1],
        lowering="jit",
    )


def _train(
    program: meshpar.TrainProgram, batches: list[dict[str, np.ndarray]], seed: int
) -> tuple[np.ndarray, Any]:
    """(losses [steps], parameters)."""
    state, losses = program.init(seed), []
    for batch in batches:
        state, metrics = program.step(state, batch)
        losses.append(metrics["loss"])
    return np.asarray(jax.device_get(losses)), jax.device_get(state.params)


def count_claim(
    program: meshpar.TrainProgram,
    counter: LayerCounter,
    batches: list[dict[str, np.ndarray]],
    wanted: list[int],
) -> Claim:
    """Whether exactly the layers of the schedule run, step by step.

    Args:
      program: whose layers report to the counter.
      counter: of the layers that run.
      batches: of each step.
      wanted: layers that shall run in each step.
    """
    state, found = jax.block_until_ready(program.init()), []
    counter.take()
    for batch in batches:
        state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)
        found.append(counter.take())
    forward, backward = (sum(counts) for counts in zip(*found, strict=True))
    return Claim(
        f"layers that ran forward and backward in each of {len(batches)} steps, "
        "counted by callbacks",
        "as the coins of the schedule say",
        f"{forward} and {backward} in all, schedule {sum(wanted)}",
        found == [(count, count) for count in wanted],
    )


def keep_one_claim(
    baseline: meshpar.TrainProgram,
    kept: meshpar.TrainProgram,
    batches: list[dict[str, np.ndarray]],
) -> Claim:
    """Whether a program with a keep probability of 1 trains as the baseline does."""
    losses, params = _train(baseline, batches, 0)
    kept_losses, kept_params = _train(kept, batches, 0)
    same = np.array_equal(losses, kept_losses) and all(
        np.array_equal(x, kept_params[path]) for path, x in params.items()
    )
    text = "all losses and weights are equal" if same else "they differ"
    return Claim("keep = 1 is the baseline, bit for bit", "", text, bool(same))


class _Constants(nnx.Module):
    """Layers that add a constant each, whatever their input."""

    def __init__(self, rngs: nnx.Rngs):
        def layer(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(1, 1, kernel_init=nnx.initializers.zeros, rngs=rngs)

        self.layers = nnx.vmap(layer)(rngs.split(_CONSTANTS))


def scale_claim(steps: int = 24) -> Claim:
    """Whether a layer that runs adds its change divided by its keep probability.

    Layer i of L adds 2^i, so that the sum tells which layers ran, and how each was
    scaled. The probabilities 1 - i / L (1 - theta) are computed anew, in numpy.
    """
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda model, batch: batch["x"],
        layer=lambda layer, x: x + layer(0 * x),
        head_loss=lambda model, x, batch: x.mean(),
    )
    model = meshpar.from_nnx(_Constants, stack)
    batch = {"x": np.zeros((2, 1), np.float32)}
    schedule = layer_dropping.progressive(LEAST, steps, speed=5.0)
    dropped = layer_dropping.with_dropped_layers(model, schedule)
    program = meshpar.lower(
        dropped,
        optax.sgd(0.0),
        "data=1",
        batch,
        devices=jax.devices()[:1],
        lowering="jit",
    )
    weights = jax.device_get(program.init(0).params)
    (bias,) = [path for path in weights if path.endswith("bias")]
    number = np.arange(_CONSTANTS)
    state = program.init(0, {**weights, bias: np.float32(2.0**number).reshape(-1, 1)})
    ran = layer_dropping.layers_run(schedule, steps, _CONSTANTS)
    worst = 0.0
    for step in range(steps):
        state, metrics = program.step(state, batch)
        theta = (1 - LEAST) * np.exp(-5.0 * step / steps) + LEAST
        keep = 1 - number / _CONSTANTS * (1 - theta)
        wanted = float((ran[step] * 2.0**number / keep).sum())
        worst = max(worst, abs(float(metrics["loss"]) - wanted))
    return Claim(
        f"a layer that runs adds its change over 1 - i / L (1 - theta), {steps} steps",
        "divided by the keep probability (algorithm 1)",
        f"{worst:.1e} off",
        worst < 1e-4,
    )


def _cpu_seconds(
    programs: Sequence[meshpar.TrainProgram], batches: list[dict[str, np.ndarray]]
) -> np.ndarray:
    """CPU seconds of each step of each program, [programs, steps].

    The programs take turns step by step, so that other work on the machine meets all
    alike; a step counts with the least time of several rounds.
    """
    found = []
    for _ in range(_ROUNDS):
        states = [program.step(program.init(), batches[0])[0] for program in programs]
        jax.block_until_ready(states)
        seconds = np.zeros((len(programs), len(batches)))
        for step, batch in enumerate(batches):
            for i, program in enumerate(programs):
                start = time.process_time()
                states[i], _ = program.step(states[i], batch)
                jax.block_until_ready(states[i])
                seconds[i, step] = time.process_time() - start
        found.append(seconds)
    return np.min(found, axis=0)


def time_claim() -> Claim:
    """Whether the CPU time of a step falls as much as the layers that run.

    The judge is the same program with coins that keep all layers. Against a program
    without coins less is saved: XLA copies on CPUs what a conditional hands on.

    Activations are computed again in the backward pass: where they are saved instead,
    a layer that is skipped writes zeros in their place, which takes time.
    """
    config = _config(_TIMED)
    batches, model = _batches(config, _TIMED_STEPS, 0), language_model(config.model)
    schedules = None, lambda t: _ALMOST_ONE, lambda t: LEAST
    programs = [_program(model, s, batches[0], "data=1,remat=full") for s in schedules]
    plain, whole, dropped = _cpu_seconds(programs, batches).sum(axis=1)
    # The first step of `_cpu_seconds` compiles, and is not timed.
    ran = layer_dropping.layers_run(
        lambda t: LEAST, _TIMED_STEPS + 1, config.model.depth
    )
    saved, skipped = float(1 - dropped / whole), 1 - float(ran[1:].mean())
    return Claim(
        "CPU time falls by at least 0.9 of the share of skipped layers, remat=full",
        "24% less time per sample with theta = 0.5",
        f"layers {skipped:.1%}, CPU time {saved:.1%}, and {1 - dropped / plain:.1%} "
        "against a program without coins",
        saved >= 0.9 * skipped,
    )


def _loss_claims(ratio: float, share: float) -> list[Claim]:
    """The savings of dropping by the formula, and its cost.

    Args:
      ratio: of the last losses, dropped over all layers, minus 1.
      share: of the layers that ran.
    """
    expected = 0.5 * 11 / 24  # The mean of (1 - theta) i / L over 12 layers.
    skipped = 1 - float(layer_dropping.layers_run(lambda t: LEAST, _COINS, 12).mean())
    return [
        Claim(
            "layers skipped at theta = 0.5 with 12 layers, as in BERT-base",
            "24% less time per sample",
            f"{skipped:.1%} of the layers in {_COINS} steps, by the formula "
            f"{expected:.1%}",
            abs(skipped - expected) < 0.01,
        ),
        Claim(
            "the loss ends within 5% of that with all layers",
            "similar accuracy",
            f"{ratio:+.1%}, with {share:.0%} of the layers",
            abs(ratio) < 0.05,
        ),
    ]


def _smooth(losses: np.ndarray, width: int) -> np.ndarray:
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def _draw(
    curves: dict[str, list[np.ndarray]],
    ran: np.ndarray,
    theta: np.ndarray,
    figure: matplotlib.figure.Figure,
) -> None:
    """The loss over the layers that ran so far, with theta."""
    steps, depth = ran.shape
    axes = figure.subplots()
    for name, found in curves.items():
        mean, spread = np.mean(found, axis=0), np.std(found, axis=0)
        share = ran.sum(axis=1) if name == "dropped" else np.full(steps, depth)
        work = np.cumsum(share)[steps - len(found[0]) :] / depth
        (line,) = axes.plot(work, mean, label=name)
        shade = dict(color=line.get_color(), alpha=0.25, linewidth=0)
        axes.fill_between(work, mean - spread, mean + spread, **shade)
    axes.set(
        xlabel="work: layers that ran, over the depth",
        ylabel="training loss, nats per byte",
    )
    right = axes.twinx()
    right.plot(np.cumsum(ran.sum(axis=1)) / depth, theta, ":", color="#666666")
    right.set(ylabel="theta(t), dotted", ylim=(0, 1.05))
    axes.legend(loc="upper right")


def _run(setting: Setting) -> Result:
    config = _config(_SMALL if setting.quick else _LARGE)
    steps = 60 if setting.quick else 120
    schedule = layer_dropping.progressive(LEAST, steps, speed=10.0)
    depth, width = config.model.depth, max(1, steps // 15)
    model, curves = language_model(config.model), {"all layers": [], "dropped": []}
    batches, counter = _batches(config, steps, 0), LayerCounter()
    programs = {
        "all layers": _program(model, None, batches[0]),
        "dropped": _program(counter.counted(model), schedule, batches[0]),
    }
    for number, seed in enumerate(setting.seeds):
        for name, program in programs.items():
            setting.progress(f"trains with {name}", 0.7 * number / len(setting.seeds))
            losses = _train(program, _batches(config, steps, seed), seed)[0]
            curves[name].append(_smooth(losses, width))
    ends = {name: float(np.mean([x[-1] for x in c])) for name, c in curves.items()}
    ratio = ends["dropped"] / ends["all layers"] - 1
    ran = layer_dropping.layers_run(schedule, steps, depth)
    setting.progress("counts layers", 0.7)
    counted = 20 if setting.quick else 60
    wanted = ran[:counted].sum(axis=1).tolist()
    dropping = programs["dropped"]
    claims = [count_claim(dropping, counter, batches[:counted], wanted)]
    claims.append(scale_claim())
    setting.progress("compares keep = 1 with the baseline", 0.8)
    kept = _program(model, lambda t: 1.0, batches[0])
    claims.append(keep_one_claim(programs["all layers"], kept, batches[:5]))
    if not setting.quick:
        setting.progress("measures CPU time", 0.9)
        claims.append(time_claim())
    claims += _loss_claims(ratio, float(ran.mean()))
    theta = np.asarray(schedule(np.arange(steps)))
    rows = [
        (name, f"{ends[name]:.4f}", f"{share:.1%}")
        for name, share in (("all layers", 1.0), ("dropped", ran.mean()))
    ]
    return Result(
        ("training", f"loss of the last {width} steps", "layers that ran"),
        tuple(rows),
        tuple(claims),
        {
            "theta": theta,
            "layers": ran.sum(axis=1),
            "losses": {name: np.mean(found, axis=0) for name, found in curves.items()},
        },
        functools.partial(_draw, curves, ran, theta),
    )


PAPER = Paper(
    name="layer_dropping",
    title="Progressive layer dropping",
    source="Zhang, He, NeurIPS 2020, arXiv:2010.13369, section 4",
    shows="loss over the layers that ran, with theta(t)",
    run=_run,
)
