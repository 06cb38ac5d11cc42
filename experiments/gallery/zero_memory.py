"""ZeRO: memory of the training state of a 7.5B model on 64 devices, from plans."""

import matplotlib.figure

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
