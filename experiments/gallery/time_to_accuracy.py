"""Time to accuracy: measured passes times the time of a pass, over workers."""

import functools

import matplotlib.figure
import numpy as np

from experiments.gallery import digits, messages, passes
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods import time_to_accuracy as law

_TARGET = 0.25
"""Held-out loss in nats."""

_RATES = 2.0 ** np.arange(-3, 2)
_PASSES = {8: 3.0, 32: 3.0, 128: 7.0, 512: 21.0}
"""{batch size: passes after which its runs end}."""

_GRADIENT = 4 * (digits.PIXELS * digits.HIDDEN + digits.HIDDEN * digits.CLASSES)
CLUSTER = law.Cluster(
    row_seconds=1e-3, gradient_bytes=_GRADIENT, latency=5e-5, bandwidth=1.25e9
)
"""A millisecond a row, and a network of 10 Gbit/s."""

_MOST = 128
"""Workers that there are."""

PLANTED = {8: 1.5, 32: 1.6, 128: 4.75, 512: 16.5}
"""Passes for checks that train nothing."""


@functools.cache
def _ring(workers: int) -> tuple[int, float]:
    """(messages, payloads) of a sum around a ring, message by message."""
    return messages.simulate("all_reduce", "ring", workers) if workers > 1 else (0, 0.0)


def step_by_messages(cluster: law.Cluster, workers: int, batch: int) -> float:
    """Seconds of a step: rows one after another, then messages one after another."""
    count, payloads = _ring(workers)
    seconds = sum(cluster.row_seconds for _ in range(batch)) / workers
    seconds += sum(cluster.latency for _ in range(count))
    return seconds + payloads * cluster.gradient_bytes / cluster.bandwidth


def tried(
    cluster: law.Cluster, needed: dict[int, float], most: int = _MOST
) -> dict[tuple[int, int], float]:
    """{(batch size, workers): seconds to the target}, step by step, for all of them."""
    found = {}
    for batch, count in needed.items():
        steps = count * passes.ROWS / batch
        for workers in range(1, min(most, batch) + 1):
            found[batch, workers] = steps * step_by_messages(cluster, workers, batch)
    return found


def law_claims(needed: dict[int, float]) -> list[Claim]:
    """Whether the law's times and its fastest choice are those of brute force."""
    by_hand = tried(CLUSTER, needed)
    off = max(
        abs(law.seconds(CLUSTER, needed, passes.ROWS, workers, batch) / x - 1)
        for (batch, workers), x in by_hand.items()
    )
    best = {
        batch: min((x, workers) for (of, workers), x in by_hand.items() if of == batch)[
            1
        ]
        for batch in needed
    }
    closed = {batch: min(CLUSTER.best_workers(batch), _MOST) for batch in needed}
    found = law.fastest(CLUSTER, needed, passes.ROWS, _MOST)
    (batch, workers), least = min(by_hand.items(), key=lambda item: item[1])
    return [
        Claim(
            f"passes times seconds of a pass, {len(by_hand)} batch sizes and workers: "
            "the sum over all steps, rows and messages",
            "",
            f"{off:.1e} off",
            off < 1e-9,
        ),
        Claim(
            "workers with the shortest step, for each batch size, by trying all",
            ", ".join(f"{x:.1f}" for x in closed.values())
            + ": sqrt((B t - 2 m/bandwidth) / (2 latency))",
            ", ".join(map(str, best.values())),
            all(abs(best[b] - x) <= 1 for b, x in closed.items()),
        ),
        Claim(
            f"the fastest of all, {batch} rows and {workers} workers, is found",
            "",
            f"{found.batch} rows, {found.workers} workers: {found.seconds:.3f} s",
            found[:2] == (batch, workers) and abs(found.seconds / least - 1) < 1e-9,
        ),
        Claim(
            "the best number of workers lies inside the range",
            "",
            f"{workers} of 1 to {_MOST}",
            1 < workers < _MOST,
        ),
    ]


def passes_claims(found: dict[int, passes.Tuned]) -> list[Claim]:
    """Whether passes grow with the batch, at the best rate of each."""
    needed = [found[batch].passes for batch in sorted(found)]
    first, last = min(found), max(found)
    growth = needed[-1] / needed[-2]
    return [
        Claim(
            "the best rate of each batch size lies inside its grid",
            "",
            ", ".join(f"{x.rate:g} ({batch})" for batch, x in found.items()),
            all(x.inside for x in found.values()),
        ),
        Claim(
            f"passes to {_TARGET} nats grow from {first} to {last} rows a batch",
            "E = E_min (1 + B / B_crit)",
            ", ".join(f"{x:.2f}" for x in needed),
            sorted(needed) == needed and needed[-1] > 2 * needed[0],
        ),
        Claim(
            "beyond the critical batch four times the rows need 2.5 to 4 times the "
            "passes: larger batches save hardly any step",
            "at most 4",
            f"{growth:.2f}",
            2.5 < growth <= 4,
        ),
    ]


def _run(setting: Setting) -> Result:
    sizes = [b for b in _PASSES if not setting.quick or b > 8]
    found = {}
    for index, batch in enumerate(sizes):
        setting.progress(f"batches of {batch} rows", index / len(sizes))
        found[batch] = passes.tuned(
            batch, _RATES, _TARGET, _PASSES[batch], setting.seeds
        )
    needed = {batch: x.passes for batch, x in found.items()}
    claims = passes_claims(found) + law_claims(needed)
    by_hand = tried(CLUSTER, needed)
    rows = []
    for batch, x in found.items():
        one = law.fastest(CLUSTER, {batch: x.passes}, passes.ROWS, _MOST)
        alone = law.seconds(CLUSTER, needed, passes.ROWS, 1, batch)
        cells = f"{x.rate:g}", f"{x.passes:.2f}", str(one.workers)
        rows.append((str(batch), *cells, f"{one.seconds:.3f}", f"{alone:.3f}"))

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.plot(sizes, [needed[b] for b in sizes], "o-")
        left.set(xscale="log", yscale="log", xlabel="rows of a batch")
        left.set(ylabel=f"passes to {_TARGET} nats, best rate")
        left.set_xticks(sizes, map(str, sizes))
        left.minorticks_off()
        for batch in sizes:
            curve = {w: x for (of, w), x in by_hand.items() if of == batch}
            right.plot(list(curve), list(curve.values()), label=f"{batch} rows")
        best = law.fastest(CLUSTER, needed, passes.ROWS, _MOST)
        right.plot(best.workers, best.seconds, "k*", markersize=10, label="fastest")
        right.set(xscale="log", yscale="log", xlabel="workers")
        right.set(ylabel="seconds to the loss")
        right.legend(fontsize=8)

    return Result(
        ("batch", "best rate", "passes", "workers", "seconds", "of one worker"),
        tuple(rows),
        tuple(claims),
        {"passes": needed, "rates": {b: x.rate for b, x in found.items()}},
        draw,
    )


PAPER = Paper(
    name="time_to_accuracy",
    title="Time to accuracy over workers and batch sizes",
    source="McCandlish et al., arXiv:1812.06162, section 2; Goyal et al., "
    "arXiv:1706.02677; no figure of theirs",
    shows="passes that a loss needs by batch size, measured, and seconds to it over "
    "workers, by a law of the time of a pass",
    run=_run,
)
