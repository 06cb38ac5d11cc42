"""GShard: FLOPs of a device do not grow with the number of experts."""

import dataclasses

import jax
import matplotlib.figure
import numpy as np
import optax

import meshpar
from experiments import recipes
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.decoder_config import DecoderConfig
from experiments.models.language_model import language_model

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
