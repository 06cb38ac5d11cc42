"""Mistakes in islands, their store, and methods of clients and servers."""

from support.planted_papers import Mistake, planted

from experiments.gallery import federated as federated_figure
from meshpar.islands import Payload, algorithms
from meshpar.methods.federated import averaging, shards

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

MISTAKES = [*FEDERATED]
