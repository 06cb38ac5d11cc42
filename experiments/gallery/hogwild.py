"""Recht et al. 2011: SGD without locks, on sparse rows and on dense ones."""

import matplotlib.figure
import numpy as np

from experiments.convex import lock_free
from experiments.data import hashed_text
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods.hogwild.training import Settings

_PROCESSES = 4
_WITHIN = 0.01
_SPARSE, _DENSE = "sparse", "dense"

Found = dict[str, dict[int, list[float]]]
"""{rows: {processes: objective over that of one process minus 1, by seed}}."""


def claims_of(found: Found) -> list[Claim]:
    """Whether sparse rows lose nothing, and dense rows more."""
    means = {
        rows: {n: float(np.mean(x)) for n, x in by_count.items() if n > 1}
        for rows, by_count in found.items()
    }
    sparse, dense = means[_SPARSE], means[_DENSE]
    worst = max(sparse.values(), key=abs)
    return [
        Claim(
            "sparse rows: the objective of 2 and 4 processes is within 1% of one's",
            "nearly the rate of serial SGD where updates are sparse",
            f"{worst:+.2%} at most",
            abs(worst) <= _WITHIN,
        ),
        Claim(
            "dense rows lose more",
            "the error grows with the share of rows that share a weight",
            f"{dense[_PROCESSES]:+.2%} with {_PROCESSES} processes",
            dense[_PROCESSES] > max(_WITHIN, worst),
        ),
    ]


def _run(setting: Setting) -> Result:
    rows, passes = (8000, 5) if setting.quick else (0, 5)
    text = hashed_text.load(hashed_text.STANDARD_LIBRARY, 18, rows)
    found: Found = {_SPARSE: {}, _DENSE: {}}
    lost: Found = {_SPARSE: {}, _DENSE: {}}
    for index, seed in enumerate(setting.seeds):
        settings = Settings(
            processes=_PROCESSES, passes=passes, learning_rate=0.05, seed=seed
        )

        def say(row: lock_free.Row, index: int = index) -> None:
            share = index / len(setting.seeds)
            setting.progress(f"{row.data}, {row.processes} processes", share)

        for row in lock_free.compare(text.rows, text.labels, settings, say):
            found[row.data].setdefault(row.processes, []).append(row.excess)
            lost[row.data].setdefault(row.processes, []).append(row.lost)

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for name, by_count in found.items():
            percent = {n: 100 * np.asarray(x) for n, x in by_count.items()}
            means = [x.mean() for x in percent.values()]
            errors = [x.std() for x in percent.values()]
            axes.errorbar(list(percent), means, errors, fmt="o-", label=f"{name} rows")
        axes.axhspan(-100 * _WITHIN, 100 * _WITHIN, color="#cccccc", alpha=0.5)
        axes.set(
            xlabel="processes without locks",
            ylabel="objective over one process, %",
            xticks=list(found[_SPARSE]),
        )
        axes.legend()

    table = [
        (name, str(n), f"{np.mean(x):+.2%}", f"{np.mean(lost[name][n]):.2%}")
        for name, by_count in found.items()
        for n, x in by_count.items()
    ]
    return Result(
        ("rows", "processes", "objective over one process", "updates lost"),
        tuple(table),
        tuple(claims_of(found)),
        {"data": text.name, "excess": found, "lost": lost},
        draw,
    )


PAPER = Paper(
    name="hogwild",
    title="Hogwild: SGD without locks",
    source="Recht, Re, Wright, Niu, NeurIPS 2011, arXiv:1106.5730",
    shows="objective of logistic regression over the number of processes that share "
    "their weights without locks, on sparse and on dense rows",
    run=_run,
)
