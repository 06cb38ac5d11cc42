"""Federated averaging (FedAvg): rounds of local epochs, averaged by numbers of rows.

In a round some clients are drawn. Each of them starts from the server's weights, makes
`epochs` passes over its own rows, and pushes the difference. The server adds the mean
of the differences, weighted by the clients' rows. One epoch in one batch is FedSGD.

The server is a store of `meshpar.islands` in rounds, and a client is an island of it
that pushes weights. Clients train one after another, by one program of any layout.

Source: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017, arXiv:1602.05629,
  algorithm 1; Reddi et al., ICLR 2021, arXiv:2003.00295 (optimizers of the server).
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np

from meshpar.arrays import Params
from meshpar.islands import BSP, Islands, Payload, Store, updates
from meshpar.islands.algorithms import make_island
from meshpar.islands.island_program import island_program
from meshpar.lowering.train_program import TrainProgram
from meshpar.methods.federated.shards import Shards, check_owners, passes
from meshpar.replicated import num_rows
from meshpar.settings import Number, check, real

_MODE = Islands(algorithm="diloco", consistency=BSP())


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of federated averaging.

    Attributes:
      fraction: C, share of the clients that train in a round; at least one does.
      epochs: E, passes over a client's rows in a round.
      seed: of the clients that are drawn, and of the order of their rows.
    """

    fraction: Annotated[float, real(0, 1)] = 0.1
    epochs: Annotated[int, Number(1, 2**16, "passes")] = 1
    seed: int = 0

    def __post_init__(self):
        check(self, "federated averaging: ", but=["seed"])


class FederatedAveraging:
    """Clients that own their rows, and a server that averages their weights.

    Attributes:
      store: the server, one range with a clock for each client.
      rounds: rounds that are done.
    """

    def __init__(
        self,
        program: TrainProgram,
        samples: Mapping[str, np.ndarray],
        shards: Shards,
        settings: Settings = Settings(),
        *,
        params: Any = None,
        update: Any = None,
    ):
        """Makes the server and its clients.

        Args:
          program: trains one client; its batch size is B, and a client starts each
            round with a new state of its optimizer.
          samples: {name: array [rows, ...]} of all clients.
          shards: rows of each client, such as those of `shards.dirichlet`.
          settings: settings of the rounds.
          params: weights to start from; by default those of the seed.
          update: of the server, as `Store` takes it, for the mean of start - end; by
            default the mean of the clients' weights.

        Raises:
          MeshparError: no client, or one without rows.
        """
        check_owners(shards)
        self.rounds = 0
        self._shards, self._settings = list(shards), settings
        self._samples = dict(samples)
        self._batch = num_rows(program.abstract_batch)
        self._program = program
        self._state = program.init(settings.seed, params)
        leaves = jax.tree.leaves(jax.device_get(self._state))
        self._start = list(map(np.asarray, leaves))
        self._island = island_program(program, _MODE)
        (part,) = self._island.vector.slices(1)
        self._name = part.range.name
        server = updates.sgd(1.0) if update is None else update
        self.store = Store([part.range], _MODE.consistency, server)
        self.store.set_values(self._name, self._island.vector.pack(self._state.params))
        for client in range(len(shards)):
            self.store.join(str(client))

    def chosen(self, number: int) -> list[int]:
        """The clients that train in a round."""
        count = max(1, round(self._settings.fraction * len(self._shards)))
        draws = np.random.default_rng([self._settings.seed, 1, number])
        return sorted(draws.permutation(len(self._shards))[:count].tolist())

    def rows(self, number: int, client: int) -> np.ndarray:
        """The rows of a client's batches in a round, [steps, B].

        All batches have B rows: where B does not divide the rows of a client, the last
        batch of the round goes on into one more pass.
        """
        own, size = self._shards[client], self._batch
        steps = -(-self._settings.epochs * len(own) // size)
        draws = np.random.default_rng([self._settings.seed, 2, number, client])
        return passes(own, steps * size, draws).reshape(steps, size)

    def round(self) -> dict[str, float]:
        """Makes a round; returns means of the metrics over the clients' batches."""
        chosen, found = self.chosen(self.rounds), []
        center_N = self._center()
        for client in range(len(self._shards)):
            payload = None
            if client in chosen:
                island = make_island(self._island, _MODE, self._start)
                island.fetched(center_N)
                for rows in self.rows(self.rounds, client):
                    batch = {name: x[rows] for name, x in self._samples.items()}
                    found.append(island.train(batch))
                pushed_N = island.contribution(center_N)
                weight = float(len(self._shards[client]))
                payload = Payload((None, pushed_N), weight=weight)
            self.store.push(self._name, str(client), self.rounds, payload)
        self.rounds += 1
        return {name: float(np.mean([x[name] for x in found])) for name in found[0]}

    @property
    def params(self) -> Params:
        """The server's weights, {path: array}."""
        return {**self._state.params, **self._island.vector.unpack(self._center())}

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Metrics of the server's weights on a batch of B rows."""
        return self._program.evaluate_params(self.params, batch)

    def _center(self) -> np.ndarray:
        return np.array(self.store.pull(self._name).values)
