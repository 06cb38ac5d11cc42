"""ZeRO: memory of the training state of a 7.5B model on 64 devices, from plans."""

import math

import jax
import matplotlib.figure
import optax

import meshpar
from experiments.gallery import legal_layouts, wires
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.gallery.published_decoders import (
    GB,
    MEGATRON_2021,
    decoder,
    num_parameters,
    plan,
)

_DEVICES = 64
_BARS = {
    "data parallel": (f"data={_DEVICES}", 120.0),
    "ZeRO-1 (optimizer)": (f"fsdp={_DEVICES},zero=1", 31.4),
    "ZeRO-2 (+ gradients)": (f"fsdp={_DEVICES},zero=2", 16.6),
    "ZeRO-3 (+ parameters)": (f"fsdp={_DEVICES},zero=3", 1.9),
}
"""{name: (layout, GB per device as printed)}."""

_PARAMETERS = 7.5e9
"""Of the paper's example; ours is the published model nearest to it."""

_KINDS = ("weights", "gradients", "parameters", "optimizer")


def measured() -> dict[str, tuple[float, dict[str, float], float]]:
    """{layout: (bytes of state, payloads sent, temporary bytes)} on one of 8 devices.

    A small stack of layers in float32 with Adam: the state after its start, and the
    compiled step. All are divided by the bytes of the whole weights, and what is sent
    also by (n - 1) / n, so that a payload that a ring moves once counts 1.
    """
    model, found = legal_layouts.small_model(), {}
    (batch,) = legal_layouts.small_batches(1)
    size = 4 * sum(math.prod(x.shape) for x in model.params.values())
    for level in (0, 1, 2, 3):
        layout = f"fsdp=8,zero={level}" if level else "data=8"
        program = meshpar.lower(
            model, optax.adam(1e-3), layout, batch, lowering="shard_map"
        )
        leaves = jax.tree.leaves(program.init(0))
        state = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        sent = wires.sent(program.compiled.as_text(), program.mesh.shape)
        payloads = {kind: x / size / (7 / 8) for kind, x in sent.items()}
        temporary = program.compiled.memory_analysis().temp_size_in_bytes
        found[layout] = state / size, payloads, temporary / size
    return found


def measured_claims() -> list[Claim]:
    """Whether compiled programs shard, send and save what the paper says."""
    found = measured()
    plain, *levels = found.values()
    state = [one[0] for one in levels]
    sent = [sum(one[1].values()) for one in found.values()]
    first, second, third = (one[2] for one in levels)
    return [
        Claim(
            "8 devices hold an eighth of weights and moments, measured, within 1%",
            "",
            f"{plain[0]:.3f} to {', '.join(f'{x:.3f}' for x in state)} of the weights",
            abs(plain[0] / 3 - 1) < 0.01
            and all(abs(x / (3 / 8) - 1) < 0.01 for x in state),
        ),
        Claim(
            "payloads that a compiled step sends: data parallel, ZeRO-1, 2 and 3",
            "2, 2, 2 and 3 (section 7)",
            ", ".join(f"{x:.2f}" for x in sent),
            all(abs(x - y) < 0.02 for x, y in zip(sent, (2, 2, 2, 3), strict=True)),
        ),
        Claim(
            "temporary memory falls by 7/8 of the gradients, and then of the weights",
            "ZeRO-2 shards gradients, ZeRO-3 parameters",
            f"{first:.2f}, {second:.2f} and {third:.2f} of the weights",
            min(first - second, second - third) > 0.85,
        ),
    ]


def _run(setting: Setting) -> Result:
    setting.progress("plans", 0.0)
    config = decoder(next(m for m in MEGATRON_2021 if m.billions == 7.5))
    scale = _PARAMETERS / num_parameters(config)
    found = {}
    for name, (layout, _) in _BARS.items():
        state = plan(config, layout).bytes_per_device()
        found[name] = {kind: scale * state[kind] / GB for kind in _KINDS}
    rows, claims = [], []
    for name, (layout, paper) in _BARS.items():
        total = sum(found[name].values())
        parts = [f"{found[name][kind]:.2f}" for kind in _KINDS]
        rows.append((name, layout, *parts, f"{total:.2f}"))
        claims.append(
            Claim(
                f"{name}: GB of training state per device, within 1%",
                f"{paper}",
                f"{total:.2f}",
                abs(total / paper - 1) < 0.01,
            )
        )

    setting.progress("compiles", 0.5)
    claims += measured_claims()

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes, names = figure.subplots(), list(found)
        left = [0.0] * len(names)
        labels = ("bfloat16 weights", "gradients", "float32 weights", "Adam's moments")
        for kind, label in zip(_KINDS, labels, strict=True):
            sizes = [found[name][kind] for name in names]
            axes.barh(names, sizes, left=left, label=label)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        for index, total in enumerate(left):
            axes.text(total + 1, index, f"{total:.1f} GB", va="center")
        axes.invert_yaxis()
        axes.set(xlabel="GB per device", xlim=(0, 138))
        axes.legend(loc="lower right")

    return Result(
        ("state", "layout", *(f"{kind}, GB" for kind in _KINDS), "total, GB"),
        tuple(rows),
        tuple(claims),
        {"devices": _DEVICES, "parameters": _PARAMETERS, "gb_per_device": found},
        draw,
    )


PAPER = Paper(
    name="zero_memory",
    title="Memory of ZeRO's stages, 7.5B parameters on 64 devices",
    source="Rajbhandari et al., SC 2020, arXiv:1910.02054, figure 1",
    shows="training state per device by ZeRO level, from the plans of four layouts",
    run=_run,
)
