"""Refuses losses, metrics and state that differ once the batch is split into parts.

Microbatches and shards of the batch each compute the loss of their own rows. The loss
of the whole batch is their mean, so a loss has to be a mean over rows, or to come with
a weight; metrics in the same way. Running state has to be a mean over rows, or not to
depend on the batch.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from meshpar import compat
from meshpar.arrays import abstract
from meshpar.errors import LayoutError, MeshparError
from meshpar.jaxprs.live_code import compute_the_same, inputs_read
from meshpar.jaxprs.walk import equations
from meshpar.metrics import LossResult
from meshpar.models.model import Model
from meshpar.models.row_problems import problem_of, reason_no_mean
from meshpar.models.row_values import RowTraces, row_values
from meshpar.replicated import num_rows
from meshpar.rows.draws import Drawn
from meshpar.rows.values import Fixed, Mixed, failed


class Checked(NamedTuple):
    """The findings of the check of a loss.

    Attributes:
      state: {path: how its new value depends on the rows} of the state that training
        changes.
      drawn: what the loss draws from its key; None if it could not be followed.
      reads_key: whether the loss depends on its key.
    """

    state: dict[str, Any]
    drawn: Drawn | None
    reads_key: bool


@dataclasses.dataclass(frozen=True)
class Split:
    """How a batch is split into parts.

    Attributes:
      parts: number of parts.
      why: settings that split it, such as "microbatches=4".
    """

    parts: int
    why: str

    @classmethod
    def by(cls, settings: Mapping[str, int]) -> "Split":
        """The split by settings {name: number of parts}."""
        why = ",".join(f"{name}={number}" for name, number in settings.items())
        return cls(math.prod(settings.values()), why)


_CALLBACKS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}
"""{primitive that calls Python: the function that a user calls}."""


def check_callbacks(closed: Any) -> None:
    """Raises LayoutError if the model calls Python, which jax runs in no shard."""
    for eqn in equations(closed.jaxpr):
        if (name := _CALLBACKS.get(eqn.primitive.name)) is not None:
            place = compat.user_line(eqn)
            raise LayoutError(
                f"the model calls {name}{place and f' at {place}'}, which jax does not "
                "run where each device has a part of the batch or of the layers "
                "(shard_map): leave it out, return the number as a metric "
                "(aux), or look at it under lowering=jit without pipe="
            )


def check_losses(
    model: Model, batch: Any, split: Split, evaluates: bool, on_shards: bool = False
) -> Checked:
    """Checks the losses of a model whose batch is split into parts.

    Args:
      model: the model.
      batch: abstract batch before it is split.
      split: its parts.
      evaluates: whether evaluation splits the batch, too.
      on_shards: whether parts are on devices of their own (shard_map).

    Raises:
      LayoutError: a loss or a metric that the parts cannot give, with the remedy.
    """

    def evaluation_loss(params: Any, batch: Any, _: Any) -> LossResult:
        return model.evaluation_loss(params, batch)

    key = jax.eval_shape(lambda: jax.random.key(0))
    training, evaluation = (
        RowTraces(fn, abstract(model.params), batch, key)
        for fn in (model.loss, evaluation_loss)
    )
    if on_shards:
        check_callbacks(training.of(num_rows(batch))[0])
    found = _check(training, "the loss", split)
    if evaluates and not _same(training, evaluation):
        _check(evaluation, "the evaluation loss", split)
    return found


def _same(first: RowTraces, second: RowTraces) -> bool:
    """Whether two functions compute the same of the whole batch."""
    rows = num_rows(first.batch)
    return compute_the_same(first.of(rows)[0], second.of(rows)[0])


def averaged_state(state: dict[str, Any], split: Split) -> frozenset[str]:
    """Paths of the state whose new value is the mean of the parts' values.

    Other state does not depend on the batch: each part makes the same of it.

    Args:
      state: from `check_losses`.
      split: the parts, which run one after the other.

    Raises:
      LayoutError: state that the parts cannot give.
    """
    for path, value in state.items():
        if reason := reason_no_mean(value):
            raise LayoutError(
                f"the new value of {path} is no mean over rows: {reason}; leave out "
                f"{split.why}, or use a layer that keeps no such state (LayerNorm or "
                "GroupNorm in place of BatchNorm)"
            )
    return frozenset(p for p, value in state.items() if not isinstance(value, Fixed))


def check_draws(drawn: Drawn, rows: int, split: Split) -> None:
    """Checks that sizes tell draws for rows from draws for all rows together.

    Args:
      drawn: from `check_losses`.
      rows: of the batch, before it is split.
      split: its parts.

    Raises:
      LayoutError: a size of both.
    """
    part = rows // split.parts
    for own, others in (drawn.rows, drawn.others), (drawn.keys, drawn.other_keys):
        for size in {per_row * part for per_row in own} & {*others}:
            raise LayoutError(
                f"the loss draws {size} random numbers, or arrays of them, for all "
                f"rows together (at {others[size]}), and {size} for the {part} rows of "
                f"a part ({split.why} splits a batch of {rows} rows into parts): their "
                "sizes do not tell them apart; use parts of another size, or draw for "
                "all rows with another first dim, such as [1, ...]"
            )


def _check(traces: RowTraces, what: str, split: Split) -> Checked:
    drawn: Drawn | None = Drawn()
    whole = num_rows(traces.batch)
    try:
        # One row alone may be written otherwise: its last row is no slice of it.
        part = max(whole // split.parts, 2 if whole > 2 else 1)
        rows = [n for n in (whole, part) if n]
        result = row_values(traces, drawn, rows)
    except Exception as error:
        drawn = None
        if traces.raised(error):
            result = _of_one_part(traces, what, split, error)
        else:
            unknown = failed(error)
            result = jax.tree.map(lambda _: unknown, traces.of(whole)[1])
    if problem := problem_of(result, what):
        raise LayoutError(f"{problem} ({split.why} splits the batch into parts)")
    *_, reads_key = inputs_read(traces.of(whole)[0])
    return Checked(result.state, drawn, reads_key)


def _of_one_part(traces: RowTraces, what: str, split: Split, error: Exception) -> Any:
    """The result for the rows of one part, about which nothing else is known."""
    num = num_rows(traces.batch)
    traces.of(num)  # Its error is no matter of parts.
    try:
        _, shape = traces.of(num // split.parts)
    except MeshparError:
        raise  # It has the cause and the remedy.
    except Exception as error:
        raise LayoutError(
            f"{what} cannot be traced with the {num // split.parts} rows of a part "
            f"({split.why} splits a batch of {num} rows into parts); take sizes from "
            f"the arrays ({type(error).__name__}: {error})"
        ) from error
    reason = (
        "it cannot be traced with another number of rows "
        f"({type(error).__name__}: {error})"
    )
    return jax.tree.map(lambda _: Mixed(reason), shape)
