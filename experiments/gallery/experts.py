"""GShard: FLOPs of a device do not grow with the number of experts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

import meshpar
from experiments import recipes
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.decoder_config import DecoderConfig
from experiments.models.language_model import language_model
from meshpar.methods.random_second_expert import gating
from meshpar.ops import experts

_EXPERTS = (1, 2, 4, 8)
"""Numbers of experts, one on each device."""

_SEQUENCES, _LENGTH, _EXPERTS_PER_TOKEN = 2, 32, 1


def _config(num_experts: int, depth: int) -> DecoderConfig:
    return dataclasses.replace(
        recipes.tiny().model,
        vocab=64,
        length=_LENGTH,
        depth=depth,
        embed=64,
        mlp=512,
        num_experts=num_experts,
        experts_per_token=_EXPERTS_PER_TOKEN,
    )


def measure(num_experts: int) -> tuple[float, int]:
    """(FLOPs that a device runs in one step as compiled, parameters of the model).

    Every device holds one expert and the same number of tokens. Loops count once in the
    compiler's count, so the model has one layer.
    """
    config = _config(num_experts, depth=1)
    model = language_model(config)
    shape = (_SEQUENCES * num_experts, config.length)
    tokens = jax.ShapeDtypeStruct(shape, np.int32)
    program = meshpar.lower(
        model,
        optax.sgd(0.1),
        f"expert={num_experts}",
        {"tokens": tokens, "targets": tokens},
        devices=jax.devices()[:num_experts],
    )
    cost = program.compiled.cost_analysis()
    return float(cost["flops"]), sum(param.size for param in model.params.values())


def mixture_error() -> float:
    """Largest error of a mixture with capacity against a loop over tokens, in numpy.

    First choices take the slots of an expert first, in the order of the tokens; an
    output has the share of its expert in the softmax of the router's scores, over those
    of the chosen ones.
    """
    sequences, length, width, hidden, num, top = 2, 12, 6, 10, 4, 2
    config = experts.MixtureConfig(num, top, capacity_factor=1.0, normalize=True)
    draws = np.random.default_rng(0)
    x, router = (
        draws.normal(size=(sequences, length, width)),
        draws.normal(size=(width, num)),
    )
    up = draws.normal(size=(num, width, hidden))
    down = draws.normal(size=(num, hidden, width))
    weights = experts.Experts(jnp.float32(up), jnp.float32(down))
    mixture = jax.jit(experts.mixture, static_argnums=3)
    found = mixture(jnp.float32(x), jnp.float32(router), weights, config)
    wanted, slots = np.zeros_like(x), math.ceil(length * top / num)
    for b in range(sequences):
        used = np.zeros(num, int)
        scores = np.exp(x[b] @ router)
        shares = scores / scores.sum(1, keepdims=True)
        chosen = np.argsort(-shares, axis=1, kind="stable")[:, :top]
        for choice in range(top):
            for token in range(length):
                expert = chosen[token, choice]
                used[expert] += 1
                if used[expert] > slots:
                    continue
                h = x[b, token] @ up[expert]
                own = shares[token]
                weight = own[expert] / own[chosen[token]].sum()
                wanted[b, token] += weight * (h / (1 + np.exp(-h))) @ down[expert]
    return float(np.abs(np.asarray(found.y) - wanted).max() / np.abs(wanted).max())


def mixture_claim() -> Claim:
    """Whether the mixture is that of the paper, with the router's weights."""
    error = mixture_error()
    return Claim(
        "a mixture with capacity equals a loop over its tokens, to 1e-4",
        "gates times the outputs of experts, tokens over capacity dropped (alg. 1)",
        f"{error:.1e} off",
        error < 1e-4,
    )


def gating_error(capacity: int) -> tuple[float, float]:
    """(error of top-2 gating against a loop, share of second experts that come along).

    The loop is algorithm 1 of the paper, token by token: first choices take slots
    first; a second one comes with probability 2 g2, if there is a slot.
    """
    num, tokens = 4, 256
    logits = np.random.default_rng(0).normal(size=(tokens, num)).astype(np.float32)
    key = jax.random.key(0)
    found = jax.jit(gating, static_argnums=1)(logits, capacity, key)
    draws = np.asarray(jax.random.uniform(key, (tokens,)))
    shares = np.exp(np.float64(logits))
    shares /= shares.sum(axis=1, keepdims=True)
    chosen = np.argsort(-shares, axis=1, kind="stable")[:, :2]
    pairs = np.take_along_axis(shares, chosen, axis=1)
    pairs /= pairs.sum(axis=1, keepdims=True)
    wanted, used = np.zeros((tokens, num, capacity)), np.zeros(num, int)
    for choice in range(2):
        for token in range(tokens):
            expert, gate = chosen[token, choice], pairs[token, choice]
            if used[expert] < capacity and (choice == 0 or 2 * gate > draws[token]):
                wanted[token, expert, used[expert]] = gate
                used[expert] += 1
    error = float(np.abs(np.asarray(found.combine) - wanted).max())
    return error, (used.sum() / tokens - 1) if capacity >= tokens else math.nan


def gating_claim() -> Claim:
    """Whether second experts come along at random, as in the paper's algorithm."""
    errors = [gating_error(capacity) for capacity in (16, 96, 256)]
    worst, share = max(error for error, _ in errors), errors[-1][1]
    return Claim(
        "top-2 gating with a random second expert equals a loop over its tokens, at 3 "
        "capacities, to 1e-6",
        "dispatched with probability proportional to its gate (algorithm 1)",
        f"{worst:.1e} off; {share:.0%} of second experts come along",
        worst < 1e-6,
    )


def _run(setting: Setting) -> Result:
    found = {}
    chosen = (2, 8) if setting.quick else _EXPERTS[1:]
    for index, count in enumerate(chosen):
        setting.progress(f"{count} experts", index / len(chosen))
        found[count] = measure(count)
    flops = {count: value for count, (value, _) in found.items()}
    sizes = {count: value for count, (_, value) in found.items()}
    first, last = min(chosen), max(chosen)
    growth, grown = flops[last] / flops[first], sizes[last] / sizes[first]
    rows = [
        (str(count), f"{sizes[count]:,}", f"{flops[count] / 1e6:.2f}")
        for count in chosen
    ]
    claims = (
        mixture_claim(),
        gating_claim(),
        Claim(
            f"MFLOPs of a device, {last} experts against {first}",
            "constant (sublinear in the number of experts)",
            f"{growth:.3f} times",
            0.9 < growth < 1.1,
        ),
        Claim(
            "parameters grow with the experts",
            "37B to 600B from 128 to 2048 experts",
            f"{grown:.2f} times",
            grown > 0.8 * last / first,
        ),
    )

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for name, values in (("FLOPs of a device", flops), ("parameters", sizes)):
            relative = [values[count] / values[first] for count in chosen]
            axes.plot(chosen, relative, "o-", label=name)
        axes.set(xlabel="experts, one per device", ylim=0, xticks=chosen)
        axes.set_ylabel(f"relative to {first} experts")
        axes.legend()

    return Result(
        ("experts", "parameters", "MFLOPs of a device and step"),
        tuple(rows),
        claims,
        {"flops_per_device": flops, "parameters": sizes},
        draw,
    )


PAPER = Paper(
    name="experts",
    title="Mixture of experts: capacity at constant compute",
    source="Lepikhin et al., GShard, ICLR 2021, arXiv:2006.16668, section 3.4, table 1",
    shows="FLOPs of a device and parameters of the model over the number of experts, "
    "from compiled programs",
    run=_run,
)
