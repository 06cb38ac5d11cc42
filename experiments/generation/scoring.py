"""Log-probabilities of the tokens of a text, under the layout of a run."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import meshpar
from experiments.models.attention import Packed
from experiments.recipes.config import Config
from meshpar.arrays import Array, Params
from meshpar.errors import DataError, shown
from meshpar.ops import vocabulary


class Scores(NamedTuple):
    """Scores of some tokens, in the order of the text.

    Attributes:
      tokens: token ids, integer [tokens].
      log_probabilities: of each token after those before it, in nats.
    """

    tokens: np.ndarray
    log_probabilities: np.ndarray

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, in nats per token."""
        return -float(np.mean(self.log_probabilities, dtype=np.float64))


def whole_text(tokens: np.ndarray, config: Config) -> list[dict[str, np.ndarray]]:
    """Batches that predict each token of a text but the first, once.

    Args:
      tokens: the text.
      config: gives length and number of rows; the last rows are padding.

    Raises:
      DataError: fewer than two tokens, or an id that the model does not have.
    """
    length, rows = config.model.length, config.batch_size
    if len(tokens) < 2 or (highest := int(tokens.max())) >= config.model.vocab:
        what = f"{len(tokens)} token(s)" if len(tokens) < 2 else f"token id {highest}"
        raise DataError(
            f"the text has {what}, and the model scores the second token and later "
            f"ones, with ids below {config.model.vocab}; give a text of its kind"
        )
    size = -(-(len(tokens) - 1) // (length * rows)) * length * rows
    targets = np.zeros(size, np.int32)
    targets[: len(tokens) - 1] = tokens[1:]
    inputs = np.zeros(size, np.int32)
    inputs[: len(tokens) - 1] = tokens[:-1]
    weights = (np.arange(size) < len(tokens) - 1).astype(np.float32)
    whole = {"tokens": inputs, "targets": targets, "weights": weights}
    whole = {name: x.reshape(-1, rows, length) for name, x in whole.items()}
    return [
        {name: x[number] for name, x in whole.items()}
        for number in range(size // (length * rows))
    ]


def filled(batch: dict[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """A batch of fewer rows with rows of weight 0 to `num_rows`."""
    ones = np.ones(batch["targets"].shape, np.float32)
    more = num_rows - len(ones)
    whole = {"weights": ones} | batch
    return {name: np.pad(x, ((0, more), (0, 0))) for name, x in whole.items()}


def score(
    program: meshpar.TrainProgram, params: Params, batches: list[dict[str, np.ndarray]]
) -> Iterator[Scores]:
    """Yields the scores of each batch; tokens without weight are left out.

    Args:
      program: of the run.
      params: from `meshpar.runs.stored.read_weights`.
      batches: of a text, or of held-out data.
    """

    def losses(model: Callable, batch: dict[str, Array]) -> Array:
        more = [Packed.of(batch)] if "segments" in batch else []
        return vocabulary.token_losses(model(batch["tokens"], *more), batch["targets"])

    predict = program.predictor(losses)
    whole = jax.sharding.NamedSharding(program.mesh, jax.sharding.PartitionSpec())
    fetch = jax.jit(lambda x: x, out_shardings=whole)
    for batch in batches:
        inputs: dict[str, Any] = {k: x for k, x in batch.items() if k != "weights"}
        rows = {k: x[program.batch_rows] for k, x in inputs.items()}
        losses_BL = np.asarray(fetch(predict(params, rows)))
        counted = batch.get("weights", np.ones(losses_BL.shape)) > 0
        if not np.isfinite(losses_BL[counted]).all():
            raise meshpar.MeshparError(
                f"the loss is not finite: {shown(str(losses_BL))}; the weights are not "
                "those of a trained model"
            )
        yield Scores(batch["targets"][counted], -losses_BL[counted])
