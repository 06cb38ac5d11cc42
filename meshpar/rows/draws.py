"""Random numbers that belong to rows, and those that do not.

What is drawn from the key of the loss in the shape [rows, ...] is drawn for each row:
`collectives.shard_keys` gives a row the same numbers in whichever part it is. What is
drawn without rows is one draw for all of them. Keys that a loss makes itself know
nothing of parts, so that no rows may draw from them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshpar import compat
from meshpar.rows.shapes import row_dims
from meshpar.rows.values import (
    IN_BATCH,
    OWN_KEY,
    PLAIN,
    Counted,
    Fixed,
    Key,
    Mixed,
    PerRow,
    counts,
)

BITS, SPLIT, GAMMA, FOLD = (
    *("random_bits", "random_split", "random_gamma", "random_fold_in"),
)
NAMES = frozenset((BITS, SPLIT, GAMMA, FOLD, "random_unwrap"))
"""Primitives that use random keys."""


@dataclasses.dataclass
class Drawn:
    """Sizes of the random arrays that a loss draws from its key.

    Attributes:
      rows: entries per row in the first dim of draws for rows.
      keys: entries per row in the first dim of keys that are split for rows.
      others: {size of the first dim: place} of draws for all rows together.
      other_keys: the same of keys.
    """

    rows: set[int] = dataclasses.field(default_factory=set)
    keys: set[int] = dataclasses.field(default_factory=set)
    others: dict[int, str] = dataclasses.field(default_factory=dict)
    other_keys: dict[int, str] = dataclasses.field(default_factory=dict)

    def note(self, shape: Sequence[int], prime: int, eqn: Any, is_split: bool) -> None:
        """Takes note of one draw, or of one split of a key."""
        if not shape:
            return
        size, rest = divmod(shape[0], prime)
        if not rest:
            (self.keys if is_split else self.rows).add(size)
        else:
            others = self.other_keys if is_split else self.others
            others.setdefault(shape[0], compat.user_line(eqn))


def results(
    eqn: Any, values: Sequence[Any], prime: int, dim: int, drawn: Drawn
) -> list[Any]:
    """The results of a primitive of `NAMES`.

    Args:
      eqn: the equation.
      values: those of its operands, none of them `Mixed`.
      prime: the number of rows.
      dim: the dim of draws that belongs to rows.
      drawn: takes note of the draws.
    """
    key, *rest = values
    out = eqn.outvars[0].aval
    if isinstance(key, Key):
        return [_from_key(eqn, rest, prime, dim, drawn)]
    if isinstance(key, PerRow):
        return [_from_keys_of_rows(eqn, key, rest, prime, drawn)]
    if any(not isinstance(v, PLAIN) for v in rest):
        rows = [v for v in rest if isinstance(v, PerRow)]
        return [rows[0] if rows and eqn.primitive.name == FOLD else _unread(eqn)]
    if counted := next((v for v in values if isinstance(v, Counted)), None):
        return [counted._replace(known=None)]
    new = row_dims(out, prime) and not row_dims(eqn.invars[0].aval, prime)
    return [Counted(OWN_KEY) if new and eqn.primitive.name != FOLD else Fixed()]


def _from_key(eqn: Any, rest: Sequence[Any], prime: int, dim: int, drawn: Drawn) -> Any:
    """A value that is made from the key of the loss."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == FOLD:
        return _folded(rest[0])
    if name == "random_unwrap":
        return Mixed(
            "it reads the words of its random key, which each part has for itself",
            "draw by jax.random from the key itself",
        )
    if any(isinstance(v, Counted) for v in rest):
        return counts(next(v for v in rest if isinstance(v, Counted)))
    if any(not isinstance(v, Fixed) for v in rest):
        if name != GAMMA or not isinstance(rest[0], PerRow) or rest[0].dim != dim:
            return _unread(eqn)
    shape = eqn.params.get("shape", out.shape)
    if name == GAMMA:
        shape = (_size(out.shape),)
    drawn.note(shape, prime, eqn, name != BITS)
    held = row_dims(out, prime)
    if not held and (dim < 1 or len(shape) <= dim):
        return Key() if name == SPLIT else Fixed()
    if held != [dim] or row_dims(eqn.invars[0].aval, prime):
        return Mixed(
            f"it draws random numbers with another {_ORDINALS[dim]} dim than the one "
            "that is split",
            f"draw them with that as the {_ORDINALS[dim]} dim, and move it then",
        )
    return PerRow(dim, out.shape[dim] // prime)


_ORDINALS = ("first", "second")


def _folded(number: Any) -> Any:
    """The key of the loss, folded with a number."""
    if isinstance(number, Counted):
        return counts(number)
    if isinstance(number, PerRow):
        return number._replace(columns=())
    if isinstance(number, Fixed) and not number.degree:
        return Key()
    return Mixed("it folds its random key with a number computed from all rows")


def _from_keys_of_rows(
    eqn: Any, key: PerRow, rest: Sequence[Any], prime: int, drawn: Drawn
) -> Any:
    """A value that is made from keys, one for each row."""
    if counted := next((v for v in rest if isinstance(v, Counted)), None):
        return counts(counted)
    rows = [v for v in rest if isinstance(v, PerRow)]
    same = all((v.dim, v.inner) == (key.dim, key.inner) for v in rows)
    if not same or any(not isinstance(v, Fixed | PerRow) for v in rest):
        return _unread(eqn)
    shape = eqn.params.get("shape", ())
    if row_dims(eqn.outvars[0].aval, prime) != [key.dim]:
        return Mixed("each row draws numbers for all rows", IN_BATCH)
    drawn.note(shape, prime, eqn, eqn.primitive.name != BITS)
    return key._replace(columns=())


def _unread(eqn: Any) -> Mixed:
    return Mixed(f"{eqn.primitive.name} is not followed")


def _size(shape: Sequence[int]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size
