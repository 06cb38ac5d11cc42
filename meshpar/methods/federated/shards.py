"""Data owned by clients, islands or replicas: each row has one owner.

A split is a list of index arrays, one for each owner. Rows of an owner may be like all
others (`iid`), of few labels (`by_label`), or mixed by a Dirichlet draw (`dirichlet`).

Source: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017, arXiv:1602.05629,
  section 3 (IID, and two shards of one label each); Yurochkin et al., ICML 2019,
  arXiv:1905.12022, section 4, and Hsu, Qi, Brown, arXiv:1909.06335 (Dirichlet draws).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meshpar.errors import MeshparError

Shards = Sequence[np.ndarray]
"""The rows of each owner, as indices."""


def _check(rows: int, owners: int) -> None:
    """Raises MeshparError unless every owner can have a row."""
    if not isinstance(owners, int) or not 1 <= owners <= rows:
        raise MeshparError(f"{owners!r} owners of {rows} rows: use 1 to {rows}")


def check_owners(shards: Shards) -> None:
    """Raises MeshparError unless there are owners, and each of them has a row."""
    empty = [i for i, rows in enumerate(shards) if not len(rows)]
    if empty or not len(shards):
        raise MeshparError(
            f"{len(shards)} owners, {len(empty)} of them without rows (the first: "
            f"{empty[:3]}): give at least one owner, and a row to each"
        )


def iid(rows: int, owners: int, seed: int = 0) -> list[np.ndarray]:
    """Shuffles the rows, and gives every owner an equal part, give or take one.

    Args:
      rows: number of rows.
      owners: number of owners.
      seed: of the shuffle.

    Raises:
      MeshparError: fewer rows than owners.
    """
    _check(rows, owners)
    return np.array_split(np.random.default_rng(seed).permutation(rows), owners)


def by_label(
    labels: np.ndarray, owners: int, parts_each: int = 2, seed: int = 0
) -> list[np.ndarray]:
    """Sorts the rows by label, cuts them into equal parts, and deals these out.

    An owner of two parts has rows of two labels, or of few more where a part reaches
    from one label into the next.

    Args:
      labels: [rows].
      owners: number of owners.
      parts_each: parts of an owner.
      seed: of the order of rows within a label, and of the deal.

    Raises:
      MeshparError: fewer rows than parts.
    """
    labels = np.asarray(labels)
    if not isinstance(parts_each, int) or parts_each < 1:
        raise MeshparError(f"parts_each={parts_each!r}: use a whole number >= 1")
    _check(len(labels), owners)
    _check(len(labels), owners * parts_each)
    draws = np.random.default_rng(seed)
    mixed = draws.permutation(len(labels))
    parts = np.array_split(
        mixed[np.argsort(labels[mixed], kind="stable")], owners * parts_each
    )
    dealt = draws.permutation(len(parts)).reshape(owners, parts_each)
    return [np.concatenate([parts[i] for i in mine]) for mine in dealt]


def dirichlet(
    labels: np.ndarray, owners: int, alpha: float, seed: int = 0
) -> list[np.ndarray]:
    """Divides the rows of each label by shares from a Dirichlet distribution.

    Owners have unequal numbers of rows. A small alpha gives each label to few owners; a
    large one comes near to `iid`. An owner that got no row takes one of the largest.

    Args:
      labels: [rows].
      owners: number of owners.
      alpha: concentration, above 0.
      seed: of the draws.

    Raises:
      MeshparError: fewer rows than owners, or another alpha.
    """
    labels = np.asarray(labels)
    _check(len(labels), owners)
    if not 0 < alpha < float("inf"):
        raise MeshparError(f"alpha={alpha!r}: use a number above 0")
    draws, mine = np.random.default_rng(seed), [[] for _ in range(owners)]
    for label in np.unique(labels):
        rows = draws.permutation(np.flatnonzero(labels == label))
        shares = draws.dirichlet(np.full(owners, float(alpha)))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for owned, part in zip(mine, np.split(rows, cuts), strict=True):
            owned.extend(part)
    for owned in mine:
        if not owned:
            owned.append(max(mine, key=len).pop())
    return [np.array(owned, np.int64) for owned in mine]


def passes(rows: np.ndarray, count: int, draws: np.random.Generator) -> np.ndarray:
    """`count` of an owner's rows: all of them in each pass, shuffled anew."""
    number = -(-count // len(rows))
    return np.concatenate([draws.permutation(rows) for _ in range(number)])[:count]


def batches(
    samples: Mapping[str, np.ndarray], shards: Shards, batch_size: int, seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Batches without end whose i-th part has rows of owner i alone.

    Replicas of local SGD train on their own part of every batch, and so do islands with
    `own_data`. A small owner begins its next pass before a large one.

    Args:
      samples: {name: array [rows, ...]}.
      shards: rows of each owner.
      batch_size: rows of all parts together.
      seed: of the shuffles.

    Raises:
      MeshparError: parts of unequal size, or an owner without rows.
    """
    check_owners(shards)
    if batch_size % len(shards) or batch_size < 1:
        raise MeshparError(
            f"batch_size={batch_size} for {len(shards)} owners: use a multiple of them"
        )
    return _batches(samples, shards, batch_size // len(shards), seed)


def _batches(
    samples: Mapping[str, np.ndarray], shards: Shards, each: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    draws = [np.random.default_rng([seed, owner]) for owner in range(len(shards))]
    left = [np.zeros(0, np.int64) for _ in shards]
    while True:
        for owner, rows in enumerate(shards):
            while len(left[owner]) < each:
                more = draws[owner].permutation(rows)
                left[owner] = np.concatenate([left[owner], more])
        taken = np.concatenate([rows[:each] for rows in left])
        left = [rows[each:] for rows in left]
        yield {name: x[taken] for name, x in samples.items()}
