"""Local SGD: held-out loss and bytes against the period and the format of the wire."""

import matplotlib.figure
import numpy as np

import meshpar
from experiments.gallery import digits
from experiments.gallery.paper import Claim, Paper, Result, Setting

_REPLICAS, _ROWS, _LEARNING_RATE = 8, 128, 0.3
_PERIODS, _WIRES = (1, 4, 16, 64), ("bf16", "int8", "int4", "topk:0.05")
_WIRE_PERIOD = 16
_NOISE = 0.01
"""Largest difference of losses, in nats, that counts as equal."""

_SYNCHRONOUS, _APART = "synchronous", "never"

_Losses = dict[str, list[float]]


def _cases(setting: Setting, steps: int) -> dict[str, meshpar.LocalSGD | None]:
    """{case: mode}; all start from the same weights and see the same batches."""
    cases: dict[str, meshpar.LocalSGD | None] = {_SYNCHRONOUS: None}
    for period in (1, 16) if setting.quick else _PERIODS:
        cases[f"H={period}"] = meshpar.LocalSGD(period=period)
    for wire in ("int8",) if setting.quick else _WIRES:
        mode = meshpar.LocalSGD(period=_WIRE_PERIOD, wire=wire)
        cases[f"H={_WIRE_PERIOD}, {wire}"] = mode
    return cases | {_APART: meshpar.LocalSGD(period=steps + 1)}


def _train(setting: Setting) -> tuple[_Losses, dict[str, float]]:
    """Losses of all seeds, and bytes per step, by case."""
    steps = 128 if setting.quick else 768
    losses: _Losses = {}
    sent: dict[str, float] = {}
    cases = _cases(setting, steps)
    for index, (case, mode) in enumerate(cases.items()):
        setting.progress(case, index / len(cases))
        layout = f"replica={_REPLICAS}" if mode else f"data={_REPLICAS}"
        program = digits.lower(layout, _ROWS, _LEARNING_RATE, mode)
        runs = [digits.train(program, steps, _ROWS, seed) for seed in setting.seeds]
        losses[case] = [run.loss for run in runs]
        sent[case] = runs[0].bytes_per_step
    return losses, sent


def _claims(losses: _Losses, sent: dict[str, float]) -> tuple[Claim, ...]:
    means = {case: float(np.mean(found)) for case, found in losses.items()}
    whole, plain = means[_SYNCHRONOUS], f"H={_WIRE_PERIOD}"
    ratio = sent["H=1"] / sent[plain]
    int8, bytes_int8 = f"{plain}, int8", sent[plain] / sent[f"{plain}, int8"]
    apart = means[_APART] - whole
    return (
        Claim(
            "H=1 is synchronous training",
            "the same for SGD",
            f"{abs(means['H=1'] - whole):.1e} nats apart",
            abs(means["H=1"] - whole) < 1e-4,
        ),
        Claim(
            f"bytes fall by the period, {plain}",
            f"{_WIRE_PERIOD} times fewer rounds",
            f"{ratio:.2f} times fewer bytes",
            abs(ratio / _WIRE_PERIOD - 1) < 1e-6,
        ),
        Claim(
            f"{plain} loses nothing",
            "as good as synchronous training",
            f"{means[plain] - whole:+.4f} nats",
            means[plain] - whole < _NOISE,
        ),
        Claim(
            "int8 loses nothing, with a quarter of the bytes",
            "4 bits without loss (Streaming DiLoCo)",
            f"{means[int8] - means[plain]:+.4f} nats, {bytes_int8:.2f} times fewer "
            "with scales and padding",
            abs(means[int8] - means[plain]) < _NOISE and 3.5 < bytes_int8 <= 4,
        ),
        Claim(
            "replicas that never meet are worse",
            "",
            f"{apart:+.4f} nats",
            apart > _NOISE,
        ),
    )


def _run(setting: Setting) -> Result:
    losses, sent = _train(setting)
    means = {case: float(np.mean(found)) for case, found in losses.items()}
    errors = {case: float(np.std(found)) for case, found in losses.items()}
    rows = [
        (case, f"{sent[case] / 1e3:.3f}", f"{means[case]:.4f}", f"{errors[case]:.4f}")
        for case in losses
    ]

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for case in losses:
            if case == _APART:
                axes.axhline(means[case], linestyle=":", label="never averaged")
                continue
            marker = "s" if "," in case else "o"
            kilobytes = sent[case] / 1e3
            axes.errorbar(kilobytes, means[case], errors[case], fmt=marker, label=case)
        axes.set(xscale="log", xlabel="kB that a device sends per step")
        axes.set(ylabel="held-out loss, nats")
        axes.legend(fontsize=8)

    return Result(
        ("case", "kB sent per step", "held-out loss", "deviation over seeds"),
        tuple(rows),
        _claims(losses, sent),
        {"losses": losses, "bytes_per_step": sent},
        draw,
    )


PAPER = Paper(
    name="local_sgd",
    title="Local SGD: loss against bytes",
    source="Stich, ICLR 2019, arXiv:1805.09767; Lin et al., arXiv:1808.07217; "
    "Douillard et al., arXiv:2501.18512 (quantized wire)",
    shows="held-out loss of a digit classifier on 8 replicas over the bytes sent, by "
    "period H and format of the wire",
    run=_run,
)
