"""Mistakes in islands, their store, and methods of clients and servers."""

import numpy as np
from support.planted_papers import Mistake, planted

from experiments.gallery import bosen as bosen_figure
from experiments.gallery import delay_compensation as delay_figure
from experiments.gallery import federated as federated_figure
from experiments.gallery import push_sum as push_sum_figure
from meshpar.islands import (
    Payload,
    algorithms,
    managed,
    range_state,
    simulated_worker,
    updates,
)
from meshpar.methods import push_sum
from meshpar.methods.federated import averaging, shards
from meshpar.runs import samples

# Federated averaging.

FEDERATED = [
    Mistake(
        "federated",
        "all clients count the same, however many rows they have",
        lambda patch: patch.setattr(
            averaging, "Payload", lambda data, weight: Payload(data)
        ),
        "rounds of unequal clients equal algorithm 1",
        federated_figure.recurrence_claims,
    ),
    Mistake(
        "federated",
        "a client starts every round from the first weights",
        planted(
            algorithms.WeightIsland,
            "fetched",
            lambda right: lambda self, center_N: None,
        ),
        "FedSGD with all clients is gradient descent",
        federated_figure.recurrence_claims,
    ),
    Mistake(
        "federated",
        "rows are not sorted by label before they are dealt out",
        planted(
            shards,
            "by_label",
            lambda right: lambda labels, owners, *rest: shards.iid(len(labels), owners),
        ),
        "clients of two labels need more rounds",
    ),
]

# Damping and delay compensation.


def _moved_the_other_way(right):
    return lambda update, strength: right(update, -strength)


def _one_update_staler(right):
    """A push counts itself among the updates that it is late."""

    def contribution(self, *arguments):
        found = right(self, *arguments)
        return found._replace(staleness=found.staleness + 1)

    return contribution


def _keeps_the_first_read(right):
    def train(self, batch):
        kept = self.read_N
        metrics = right(self, batch)
        self.read_N = kept
        return metrics

    return train


DELAYS = [
    Mistake(
        "delay_compensation",
        "the correction has the wrong sign",
        planted(updates, "delay_compensated", _moved_the_other_way),
        "compensated pushes equal their recurrence",
        delay_figure.recurrence_claims,
    ),
    Mistake(
        "delay_compensation",
        "an island sends the first weights that it read along",
        planted(algorithms.GradientIsland, "train", _keeps_the_first_read),
        "compensated pushes equal their recurrence",
        delay_figure.recurrence_claims,
    ),
    Mistake(
        "delay_compensation",
        "a push counts itself among the updates that it is late",
        planted(range_state.RangeState, "_contribution", _one_update_staler),
        "damped pushes equal their recurrence",
        delay_figure.recurrence_claims,
    ),
    Mistake(
        "delay_compensation",
        "damping is the root of the staleness",
        planted(
            updates,
            "staleness_damped",
            lambda right: lambda update, power=1.0: right(update, power / 2),
        ),
        "damped pushes equal their recurrence",
        delay_figure.recurrence_claims,
    ),
]

# Managed communication.


def _forgets_what_waits(right):
    def take(self, update_N, values_N):
        found = right(self, update_N, values_N)
        self.unsent_N[:] = 0
        return found

    return take


def _smallest_first(right):
    def chosen(self, values_N, count):
        waiting = np.flatnonzero(self.unsent_N)
        return waiting[np.argsort(np.abs(self.unsent_N[waiting]))[:count]]

    return chosen


def _one_clock_too_lazy(right):
    def init(self, *arguments, lazy=None, **settings):
        right(self, *arguments, lazy=None if lazy is None else lazy + 1, **settings)

    return init


BOSEN = [
    Mistake(
        "bosen",
        "updates that do not fit into the budget are lost",
        planted(managed.ManagedPushes, "take", _forgets_what_waits),
        "a push keeps to its budget",
        lambda: [bosen_figure.order_claim()],
    ),
    Mistake(
        "bosen",
        "the smallest updates are sent first",
        planted(managed.ManagedPushes, "_chosen", _smallest_first),
        "a push keeps to its budget",
        lambda: [bosen_figure.order_claim()],
    ),
    Mistake(
        "bosen",
        "a lazy read may be one clock older than the bound",
        planted(simulated_worker.SimulatedWorker, "__init__", _one_clock_too_lazy),
        "eager and lazy reads keep the bound",
        bosen_figure.read_claims,
    ),
    Mistake(
        "bosen",
        "the key of a number is not paid for",
        lambda patch: patch.setattr(managed, "KEY_BYTES", 4),
        "a push keeps to its budget",
        lambda: [bosen_figure.order_claim()],
    ),
]

# Data of many readers.


def _forgets_the_position(right):
    def getitem(self, i):
        step, row = divmod(i, len(self._place.rows))
        rows = self._place.rows
        return self._samples[step * self._place.batch_size + int(rows[row])]

    return getitem


class _Drawn:
    """Rows that are drawn, not shuffled."""

    def __init__(self, source, seed):
        self.source, self.seed = source, seed

    def __len__(self):
        return 2**40

    def __getitem__(self, i):
        draws = np.random.default_rng([self.seed, i])
        return self.source[int(draws.integers(len(self.source)))]


def _own_seeds(right):
    def training_batches(self, place):
        return right(self, place._replace(seed=place.seed + int(place.rows[0])))

    return training_batches


READERS = [
    Mistake(
        "data_servers",
        "readers that come later begin with the first rows",
        planted(samples._BatchRows, "__getitem__", _forgets_the_position),
        "each row is read exactly once",
    ),
    Mistake(
        "data_servers",
        "rows are drawn with replacement",
        planted(samples, "shuffled", lambda right: _Drawn),
        "each row is read exactly once",
    ),
    Mistake(
        "data_servers",
        "each reader shuffles by a seed of its own",
        planted(samples.IndexedData, "training_batches", _own_seeds),
        "the batches are those of one reader",
    ),
]

# Push-sum and asynchronous gossip.


def _weights_stay(right):
    """The weight does not travel with the numbers."""

    def mix(x, weight, matrix, axis):
        return right(x, weight, matrix, axis)[0], weight

    return mix


def _shares_of_receivers(right):
    """Rows sum to 1, not columns: a replica weighs what it gets."""

    def out_shares(sends):
        reached = right(sends) > 0
        return reached / reached.sum(1, keepdims=True)

    return out_shares


def _caller_keeps_its_own(right):
    def pairs(sends, seed=0):
        for matrix in right(sends, seed):
            one = np.flatnonzero(matrix.diagonal() == 0.5)[0]
            matrix[one] = np.eye(len(matrix))[one]
            yield matrix

    return pairs


def _pairs_of_the_ring(right):
    return lambda sends, seed=0: right(push_sum.ring(len(sends)), seed)


PUSH_SUM = [
    Mistake(
        "push_sum",
        "the weights of push-sum stay at 1",
        planted(push_sum, "mix", _weights_stay),
        "the compiled program on 8 devices finds the mean",
        push_sum_figure.device_claims,
    ),
    Mistake(
        "push_sum",
        "replicas weigh what they get equally, not what they send",
        planted(push_sum, "out_shares", _shares_of_receivers),
        "a round shrinks the distance",
        lambda: push_sum_figure.rate_claims(push_sum_figure.curves_of((8,))),
    ),
    Mistake(
        "push_sum",
        "the caller of a pair keeps its own number",
        planted(push_sum, "pairs", _caller_keeps_its_own),
        "asynchronous gossip keeps the mean",
        lambda: push_sum_figure.pair_claims(push_sum_figure.squares_of(300)),
    ),
    Mistake(
        "push_sum",
        "every replica calls a neighbour on the ring",
        planted(push_sum, "pairs", _pairs_of_the_ring),
        "a tick shrinks the mean square",
        lambda: push_sum_figure.pair_claims(push_sum_figure.squares_of(300)),
    ),
]

MISTAKES = [*FEDERATED, *DELAYS, *BOSEN, *READERS, *PUSH_SUM]
