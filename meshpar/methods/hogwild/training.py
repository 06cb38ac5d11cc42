"""Hogwild: SGD by several processes on shared weights, without any lock.

Every process reads and writes the same weights in shared memory while the others do.
An update reads some weights, adds to them and writes them back, so an update of another
process in between is lost. With sparse rows two processes seldom touch the same weight.

The problem is logistic regression with a quadratic penalty. The penalty of a weight is
spread over the rows that hold its feature, so that an update changes these weights
alone.

Source: Recht, Re, Wright, Niu, Hogwild!, arXiv:1106.5730.
"""

import dataclasses
import math
import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing import connection, synchronize

import numpy as np
import scipy.sparse as sp

from meshpar.errors import MeshparError
from meshpar.methods.hogwild.shared_arrays import SharedArray, attach, share

ROWS_BETWEEN_LOOKS = 256
"""Rows after which a worker looks whether its parent still lives."""


class WorkerLostError(RuntimeError):
    """A worker ended before its work was done; what it shared has been removed."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of Hogwild.

    Attributes:
      processes: number of processes, which share the rows evenly.
      passes: over all rows; each pass has another order.
      learning_rate: size of a step in the first pass.
      decay: factor of the size of a step after each pass.
      l2: weight of half the squared norm of the weights beside the sum of the losses.
      seed: of the order of the rows.
    """

    processes: int = 2
    passes: int = 10
    learning_rate: float = 0.1
    decay: float = 0.9
    l2: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("processes", "passes"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise MeshparError(f"{name}={count}: use a whole number, at least 1")
        for name in ("learning_rate", "decay"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise MeshparError(f"{name}={value}: use a number above 0")
        if not 0 <= self.l2 < math.inf:
            raise MeshparError(f"l2={self.l2}: use a number, at least 0")


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of Hogwild.

    Attributes:
      weights: float64 [features].
      lost: share of the updates, by absolute value, that other processes overwrote.
      seconds: of the slowest process, without the start of the processes.
    """

    weights: np.ndarray
    lost: float
    seconds: float


def objective(
    rows: sp.csr_array, labels: np.ndarray, weights: np.ndarray, l2: float
) -> float:
    """Sum of the logistic losses and `l2` / 2 times the squared norm of the weights.

    Args:
      rows: float [rows, features].
      labels: 1 or -1, [rows].
      weights: float [features].
      l2: as in `Settings`.
    """
    losses = np.logaddexp(0, -labels * (rows @ weights))
    return float(losses.sum() + l2 / 2 * (weights @ weights))


def train(rows: sp.csr_array, labels: np.ndarray, settings: Settings) -> Result:
    """Trains with several processes and returns the weights.

    The processes are spawned, so a script that calls this guards its own start with
    `if __name__ == "__main__"`.

    Args:
      rows: float [rows, features]; no row may hold a feature twice.
      labels: 1 or -1, [rows].
      settings: number of processes, passes and steps.

    Raises:
      MeshparError: labels that do not fit the rows, too few rows, or too little shared
        memory.
      WorkerLostError: a process was killed or failed.
    """
    num_rows, num_features = rows.shape
    if labels.shape != (num_rows,) or not np.isin(labels, (-1, 1)).all():
        raise MeshparError(
            f"labels of shape {labels.shape} for {num_rows} rows: give a label of 1 or "
            "-1 for each row"
        )
    if num_rows < settings.processes:
        raise MeshparError(
            f"processes={settings.processes} for {num_rows} rows: use at most one "
            "process per row"
        )
    counts = np.bincount(rows.indices, minlength=num_features)
    arrays = {
        "weights": np.zeros(num_features),
        "starts": rows.indptr,
        "columns": rows.indices,
        "values": rows.data,
        "labels": labels.astype(rows.dtype),
        "penalties": settings.l2 / np.maximum(counts, 1),
        "totals": np.zeros((settings.processes, num_features)),
        "sizes": np.zeros(settings.processes),
        "seconds": np.zeros(settings.processes),
    }
    if settings.processes == 1:
        _train_rows(arrays, settings, rank=0)
        return _result(arrays)
    with share(arrays) as (shared, segments):
        _run_workers(segments, settings)
        return _result(shared)


def _result(arrays: Mapping[str, np.ndarray]) -> Result:
    weights = arrays["weights"].copy()
    missing = arrays["totals"].sum(axis=0) - weights
    size = max(float(arrays["sizes"].sum()), np.finfo(float).tiny)
    lost = float(np.abs(missing).sum()) / size
    return Result(weights, lost, float(arrays["seconds"].max()))


def _run_workers(segments: Mapping[str, SharedArray], settings: Settings) -> None:
    """Runs all workers to their end; ends the others as soon as one of them fails."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(settings.processes)
    workers = [
        context.Process(target=_work, args=(segments, settings, rank, barrier))
        for rank in range(settings.processes)
    ]
    try:
        for worker in workers:
            worker.start()
        running = {worker.sentinel: worker for worker in workers}
        while running:
            for sentinel in connection.wait(list(running)):
                worker = running.pop(sentinel)
                worker.join()
                if worker.exitcode:
                    raise WorkerLostError(
                        f"{worker.name} of {settings.processes} ended with code "
                        f"{worker.exitcode}; its part of the rows was not trained on: "
                        "run the same command again"
                    )
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        for worker in workers:
            if worker.pid is not None:
                worker.join()


def _work(
    segments: Mapping[str, SharedArray],
    settings: Settings,
    rank: int,
    barrier: synchronize.Barrier,
) -> None:
    """Trains on the rows of one process, once all processes have started."""
    with attach(segments) as shared:
        barrier.wait()
        _train_rows(shared, settings, rank)


def _train_rows(
    shared: Mapping[str, np.ndarray], settings: Settings, rank: int
) -> None:
    """The loop of one process: reads and changes the shared weights of each row.

    Its updates are also added up in `totals`, which no other process writes: what is
    missing from the weights at the end was lost.
    """
    parent = multiprocessing.parent_process()
    weights, penalties = shared["weights"], shared["penalties"]
    columns_of, values_of = shared["columns"], shared["values"]
    starts, labels = shared["starts"].tolist(), shared["labels"].tolist()
    total = np.zeros_like(weights)
    rng = np.random.default_rng((settings.seed, rank))
    own, size = np.arange(rank, len(labels), settings.processes), 0.0
    start = time.perf_counter()
    for number in range(settings.passes):
        step = settings.learning_rate * settings.decay**number
        for i, row in enumerate(rng.permutation(own).tolist()):
            if i % ROWS_BETWEEN_LOOKS == 0 and parent and not parent.is_alive():
                return
            part = slice(starts[row], starts[row + 1])
            columns, values, label = columns_of[part], values_of[part], labels[row]
            read = weights[columns]
            margin = label * float(values @ read)
            slope = -label / (1 + math.exp(min(margin, 700.0)))
            update = -step * (slope * values + penalties[columns] * read)
            weights[columns] += update
            total[columns] += update
            size += float(np.abs(update).sum())
    shared["totals"][rank] = total
    shared["sizes"][rank] = size
    shared["seconds"][rank] = time.perf_counter() - start
