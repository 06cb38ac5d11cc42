"""Plain loops that judge PipeDream: recurrences, all partitions, events of workers.

Written from the papers' formulas; they import no method.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Weights = list[np.ndarray]
Age = Callable[[int, int], int]
"""(stage, minibatch) -> updates of the stage that its weights have seen."""


def gradients(weights: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """Of mean((h_n - y)^2), with h_i+1 = tanh(h_i w_i), by hand."""
    h = [x]
    for w in weights:
        h.append(np.tanh(h[-1] @ w))
    found, back = [], 2 * (h[-1] - y) / y.size
    for i in reversed(range(len(weights))):
        back = back * (1 - h[i + 1] ** 2)
        found.append(h[i].T @ back)
        back = back @ weights[i].T
    return found[::-1]


def delayed(
    start: Weights,
    minibatches: Sequence[Mapping[str, np.ndarray]],
    rate: float,
    age: Age,
    per_update: Sequence[int],
) -> Weights:
    """SGD in which stage s updates after every per_update[s] minibatches.

    Args:
      start: a matrix for each stage.
      minibatches: in order, each with x and y.
      rate: of SGD.
      age: the version of each stage that a minibatch meets, in both passes.
      per_update: minibatches whose mean gradient is an update of each stage.
    """
    versions, waiting = [[w] for w in start], [[] for _ in start]
    for t, rows in enumerate(minibatches):
        met = [versions[s][age(s, t)] for s in range(len(start))]
        for s, grad in enumerate(gradients(met, rows["x"], rows["y"])):
            waiting[s].append(grad)
            if len(waiting[s]) == per_update[s]:
                step = rate * sum(waiting[s]) / per_update[s]
                versions[s].append(versions[s][-1] - step)
                waiting[s] = []
    return [v[-1] for v in versions]


def best_seconds(
    layers: Sequence[tuple[float, float, float]], machines: int, bandwidth: float
) -> float:
    """Seconds per minibatch of the best pipeline, of all that there are.

    Args:
      layers: (seconds, bytes of activations, bytes of weights) of each.
      machines: all of which are used.
      bandwidth: of the links.
    """
    least = np.inf
    for cuts in _subsets(range(1, len(layers))):
        edges = [0, *cuts, len(layers)]
        runs = [layers[a:b] for a, b in itertools.pairwise(edges)]
        links = [2 * run[-1][1] / bandwidth for run in runs[:-1]]
        for counts in itertools.product(range(1, machines + 1), repeat=len(runs)):
            if sum(counts) != machines:
                continue
            pace = list(links)
            for run, m in zip(runs, counts, strict=True):
                # A ring sends (m-1)/m of the weights twice, beside m minibatches.
                ring = 2 * sum(x[2] for x in run) * (m - 1) / m / bandwidth
                pace += [sum(x[0] for x in run) / m, ring / m]
            least = min(least, max(pace))
    return float(least)


def _subsets(items: Sequence[int]) -> list[tuple[int, ...]]:
    sizes = range(len(items) + 1)
    return [s for size in sizes for s in itertools.combinations(items, size)]


def period(
    orders: Mapping[tuple[int, int], Sequence[tuple[str, int]]],
    seconds: Sequence[float],
    num: int,
) -> float:
    """Seconds per minibatch in the steady state of workers that run in an order.

    Links take no time. A forward pass takes a third of a stage's seconds.

    Args:
      orders: {(stage, replica): (F or B, minibatch) in order}.
      seconds: of F and B of a stage together.
      num: minibatches.
    """
    end: dict[tuple[str, int, int], float] = {}
    free, left = dict.fromkeys(orders, 0.0), {w: list(ops) for w, ops in orders.items()}
    last = len(seconds) - 1
    while any(left.values()):
        for worker, ops in left.items():
            stage = worker[0]
            while ops:
                kind, m = ops[0]
                if kind == "F":
                    before = ("F", stage - 1, m) if stage else None
                else:
                    before = ("B", stage + 1, m) if stage < last else ("F", stage, m)
                if before and before not in end:
                    break
                start = max(free[worker], end[before] if before else 0.0)
                share = 1 / 3 if kind == "F" else 2 / 3
                free[worker] = end[kind, stage, m] = start + share * seconds[stage]
                ops.pop(0)
    done = sorted(end["B", 0, m] for m in range(num))
    first, final = num // 3, 2 * num // 3
    return (done[final] - done[first]) / (final - first)
