"""Li et al. 2014: bytes that filters save in a parameter server."""

import dataclasses
from typing import Any

import matplotlib.figure
import numpy as np

from experiments.convex import reference
from experiments.data import hashed_text
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods.dbpg.training import Pass, Training
from meshpar.methods.dbpg.training import Result as Trained
from meshpar.methods.dbpg.worker import Settings

_WORKERS, _SERVERS = 4, 2
_FIRST_PASSES, _MOST_PUSHED, _EXCESS = 5, 0.25, 1e-3
_KEYS_AND_NUMBERS = "keys and numbers"
_CACHED = "+ key caching"
_COMPRESSED = "+ compression"
_FILTERED = "+ KKT"
_KILLED = 2
"""Pass after which a server dies."""


def _cases(plain: Settings) -> dict[str, Settings]:
    """{name: settings}, each with one filter more than the one before."""
    cached = dataclasses.replace(plain, key_caching=True)
    compressed = dataclasses.replace(cached, compression="zlib")
    return {
        _KEYS_AND_NUMBERS: plain,
        _CACHED: cached,
        _COMPRESSED: compressed,
        _FILTERED: dataclasses.replace(compressed, kkt_filter=True),
    }


def _train(
    text: hashed_text.HashedText, settings: Settings, kill: bool = False
) -> Trained:
    """Trains; with `kill` a server dies, whose blocks another one holds as well."""
    training = Training(
        text.rows, text.labels, settings, _WORKERS, _SERVERS, replicas=1 + kill
    )

    def say(done: Pass) -> None:
        if kill and done.number == _KILLED:
            training.store.remove_server("server 1", dead=True)

    return training.run(say)


def claims_of(found: dict[str, Trained], killed: Trained, least: float) -> list[Claim]:
    """Claims about filters: results that stay, and traffic that they leave out.

    Args:
      found: {case: outcome}.
      killed: the outcome of the last case with a server that dies.
      least: the objective of another solver.
    """
    plain, filtered = found[_KEYS_AND_NUMBERS], found[_FILTERED]
    excess = filtered.passes[-1].objective / least - 1
    later = [done.pushed for done in filtered.passes[_FIRST_PASSES:]]
    lossless = [found[name].weights for name in (_CACHED, _COMPRESSED)]
    sent = [result.sent for result in found.values()]
    return [
        Claim(
            "the objective with all filters is within 1e-3 of liblinear's",
            "",
            f"{excess:+.1e}",
            excess <= _EXCESS,
        ),
        Claim(
            f"keys that are pushed after {_FIRST_PASSES} passes, with the KKT filter",
            "",
            f"{np.mean(later):.1%}, at most {_MOST_PUSHED:.0%}",
            bool(np.mean(later) <= _MOST_PUSHED),
        ),
        Claim(
            "key caching and compression change no bit of the weights",
            "keys are sent once, compression is lossless (section 3.3)",
            "the same weights",
            all(np.array_equal(plain.weights, weights) for weights in lossless),
        ),
        Claim(
            "every filter sends less than those before it",
            "",
            " > ".join(f"{x / 1e6:.1f}" for x in sent) + " MB",
            all(b < a for a, b in zip(sent, sent[1:], strict=False)),
        ),
        Claim(
            "a server dies in mid-training: the same weights, bit for bit",
            "replicas hold what was acknowledged (section 4.3)",
            f"after pass {_KILLED} of {len(killed.passes)}",
            np.array_equal(killed.weights, filtered.weights),
        ),
    ]


def _run(setting: Setting) -> Result:
    rows, bits = (4000, 14) if setting.quick else (0, 18)
    blocks, passes = (16, 50) if setting.quick else (64, 20)
    text = hashed_text.load(hashed_text.STANDARD_LIBRARY, bits, rows)
    plain = Settings(
        l1=1.0,
        passes=passes,
        blocks=blocks,
        delay=2,
        key_caching=False,
        compression="",
        significant=None,
    )
    cases, found = _cases(plain), {}
    for index, (name, settings) in enumerate(cases.items()):
        setting.progress(name, index / 6)
        found[name] = _train(text, settings)
    setting.progress("a server dies", 4 / 6)
    killed = _train(text, cases[_FILTERED], kill=True)
    setting.progress("liblinear", 5 / 6)
    solver = reference.LIBLINEAR
    least = reference.minimum(solver, text.rows, text.labels, plain.l1, 1e-4)

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for name, result in found.items():
            sent = [done.sent / 1e6 for done in result.passes]
            excess = [done.objective / least - 1 for done in result.passes]
            axes.plot(sent, excess, "o-", markersize=3, label=name)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="MB sent in both directions",
            ylabel="objective over the least, minus 1",
        )
        axes.legend(title="filters")

    table = [
        (
            name,
            f"{result.sent / 1e6:,.1f}",
            f"{result.passes[-1].objective:,.2f}",
            f"{result.passes[-1].nonzeros:,}",
        )
        for name, result in found.items()
    ]
    numbers: dict[str, Any] = {
        name: [dataclasses.asdict(done) for done in result.passes]
        for name, result in found.items()
    }
    return Result(
        ("filters", "MB sent", "objective", "weights that are not zero"),
        (*table, ("liblinear", "", f"{least:,.2f}", "")),
        tuple(claims_of(found, killed, least)),
        {"data": text.name, "passes": numbers, "liblinear": least},
        draw,
    )


PAPER = Paper(
    name="parameter_server",
    title="The parameter server: bytes that its filters leave out",
    source="Li et al., OSDI 2014, sections 3.3, 4.3 and 5.1; Li et al., NeurIPS 2014 "
    "(delayed block proximal gradient)",
    shows="objective of sparse logistic regression on hashed text over the bytes sent, "
    "with one filter more in each curve",
    run=_run,
)
