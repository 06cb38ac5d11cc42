"""Local SGD: held-out loss and bytes against the period and the format of the wire."""

import matplotlib.figure
import numpy as np

import meshpar
from experiments.gallery import digits, plain
from experiments.gallery.paper import Claim, Paper, Result, Setting

_REPLICAS, _ROWS, _LEARNING_RATE = 8, 128, 0.3
_PERIODS, _WIRES = (1, 4, 16, 64), ("bf16", "int8", "int4", "topk:0.05")
_WIRE_PERIOD = 16
_RATES = (0.3, 1.0, 2.0)
"""Learning rates from which each kind of training has its best one."""

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


def _num_steps(setting: Setting) -> int:
    return 128 if setting.quick else 768


def _train(setting: Setting) -> tuple[_Losses, dict[str, float]]:
    """Losses of all seeds, and bytes per step, by case."""
    steps = _num_steps(setting)
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


def recurrence_error(period: int = 4, rounds: int = 2, replicas: int = 4) -> float:
    """Error of local SGD with its weights averaged each period, against plain SGD.

    Every replica trains alone by plain jax on its rows of each batch; the averages are
    taken in numpy.
    """
    rows, steps = _ROWS // 2, period * rounds
    mode = meshpar.LocalSGD(period=period)
    program = digits.lower(f"replica={replicas}", rows, _LEARNING_RATE, mode)
    start = digits.start(0)
    state, own = program.init(0, start), [dict(start) for _ in range(replicas)]
    for step, batch in enumerate(digits.batches(steps, rows, 0)):
        state, _ = program.step(state, batch)
        for replica in range(replicas):
            share = slice(rows // replicas * replica, rows // replicas * (replica + 1))
            part = {name: x[share] for name, x in batch.items()}
            _, slopes = plain.gradients(digits.model(), own[replica], part)
            for path in start:
                slope = np.asarray(slopes[path])
                own[replica][path] = own[replica][path] - _LEARNING_RATE * slope
        if (step + 1) % period == 0:
            mean = {p: np.mean([one[p] for one in own], axis=0) for p in start}
            own = [dict(mean) for _ in own]
    found = {
        path: np.asarray(x).reshape(-1, *start[path].shape)
        for path, x in state.params.items()
    }
    return max(
        plain.distance({p: x[i] for p, x in found.items()}, own[0], start)
        for i in range(len(next(iter(found.values()))))
    )


def recurrence_claim() -> Claim:
    """Whether replicas step alone and then take the mean of all."""
    error = recurrence_error()
    return Claim(
        "4 replicas equal plain SGD on their rows with averages, to 1e-5",
        "algorithm 1",
        f"{error:.1e} off after 2 rounds of 4 steps",
        error < 1e-5,
    )


def tuned(steps: int, seed: int) -> dict[str, dict[float, float]]:
    """{case: {learning rate: held-out loss}} of synchronous and of local SGD."""
    cases = {
        _SYNCHRONOUS: (f"data={_REPLICAS}", None),
        f"H={_WIRE_PERIOD}": (
            f"replica={_REPLICAS}",
            meshpar.LocalSGD(period=_WIRE_PERIOD),
        ),
    }
    return {
        case: {
            rate: digits.train(
                digits.lower(layout, _ROWS, rate, mode), steps, _ROWS, seed
            ).loss
            for rate in _RATES
        }
        for case, (layout, mode) in cases.items()
    }


def tuned_claim(found: dict[str, dict[float, float]]) -> Claim:
    """Whether local SGD is as good as synchronous training, each with its best rate.

    Args:
      found: as `tuned` returns it.
    """
    whole, own = found[_SYNCHRONOUS], found[f"H={_WIRE_PERIOD}"]
    best = {case: min(losses, key=losses.get) for case, losses in found.items()}
    gap = min(own.values()) - min(whole.values())
    inside = all(min(_RATES) < rate < max(_RATES) for rate in best.values())
    return Claim(
        f"H={_WIRE_PERIOD} is within 0.03 nats of synchronous SGD, both at best rates",
        "as good as synchronous training",
        f"{gap:+.4f} nats, rates {' and '.join(f'{x:g}' for x in best.values())} of "
        + ", ".join(f"{rate:g}" for rate in _RATES),
        gap < 3 * _NOISE and inside,
    )


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
    setting.progress("other rates", 0.9)
    best = tuned(_num_steps(setting), setting.seeds[0])
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
        (
            *_claims(losses, sent),
            recurrence_claim(),
            tuned_claim(best),
        ),
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
