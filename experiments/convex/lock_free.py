"""Runs of Hogwild: sparse rows against dense rows, many processes against one."""

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp

from meshpar.methods.hogwild import training as hogwild

MAX_DENSE_ROWS, DENSE_FEATURES = 4000, 1000


@dataclasses.dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
      data: "sparse" or "dense".
      processes: number of processes.
      objective: after the last pass.
      excess: of the objective over that of one process, relative.
      lost: share of the updates that were overwritten.
      rows_per_second: of all processes together.
    """

    data: str
    processes: int
    objective: float
    excess: float
    lost: float
    rows_per_second: float


def dense_rows(rows: sp.csr_array, seed: int) -> tuple[sp.csr_array, np.ndarray]:
    """Draws dense rows with the mean squared norm of `rows`, and their labels.

    The same size of a step so fits both.
    """
    rng = np.random.default_rng(seed)
    shape = min(rows.shape[0], MAX_DENSE_ROWS), DENSE_FEATURES
    norm = float(rows.data @ rows.data) / rows.shape[0]
    values = rng.normal(size=shape) * np.sqrt(norm / DENSE_FEATURES)
    truth = rng.normal(size=DENSE_FEATURES)
    chances = 1 / (1 + np.exp(-(values @ truth)))
    labels = np.where(rng.random(shape[0]) < chances, 1.0, -1.0)
    return sp.csr_array(values.astype(np.float32)), labels


def compare(
    rows: sp.csr_array,
    labels: np.ndarray,
    settings: hogwild.Settings,
    say: Callable[[Row], None],
) -> list[Row]:
    """Trains by 1, 2, 4, ... processes, up to those of the settings.

    Args:
      rows: float [rows, features].
      labels: 1 or -1, [rows].
      settings: of Hogwild, with the largest number of processes.
      say: called with each run when it is done.
    """
    counts = [1 << i for i in range(settings.processes.bit_length())]
    if counts[-1] != settings.processes:
        counts.append(settings.processes)
    found: list[Row] = []
    problems = {
        "sparse": (rows, labels),
        "dense": dense_rows(rows, settings.seed),
    }
    for name, (x, y) in problems.items():
        one = None
        for count in counts:
            result = hogwild.train(x, y, dataclasses.replace(settings, processes=count))
            value = hogwild.objective(x, y, result.weights, settings.l2)
            one = value if one is None else one
            rate = x.shape[0] * settings.passes / max(result.seconds, 1e-9)
            found.append(Row(name, count, value, value / one - 1, result.lost, rate))
            say(found[-1])
    return found
