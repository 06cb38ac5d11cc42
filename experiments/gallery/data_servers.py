"""Reads each row once an epoch, while readers join, leave and die.

A system of data servers has processes that read, shuffle and hand out batches. Here
there are none: sample i of a run is a function of (data, seed, i), so every process
reads its own rows of each batch, and the position of the run is one number (grain
shuffles and reads ahead). Readers live in one process for this figure; they share
nothing but the number.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np

from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.runs.data import Place
from meshpar.runs.data_forms import as_data

_ROWS, _BATCH = 960, 48
_EPOCHS, _STEPS = 2, 2 * _ROWS // _BATCH
_READERS = (1, 2, 3, 4, 6)
_SAVED_EVERY = 4
"""Steps from one checkpoint to the next."""


class Source(Sequence):
    """Rows that are their own numbers; notes which of them are read."""

    def __init__(self):
        self.read: list[int] = []

    def __len__(self) -> int:
        return _ROWS

    def __getitem__(self, i: int) -> np.int64:
        self.read.append(int(i))
        return np.int64(i)


class Turn(NamedTuple):
    """The readers of some steps.

    Attributes:
      readers: how many there are.
      start: the first step.
      stop: the step before which they change, or one of them dies.
    """

    readers: int
    start: int
    stop: int


def turns(changes: int, seed: int) -> list[Turn]:
    """Numbers of readers that change at drawn steps.

    Half of the changes are deaths: the others go back to the last checkpoint.
    """
    draws = np.random.default_rng([seed, changes])
    stops = np.sort(draws.choice(np.arange(1, _STEPS), changes, replace=False))
    found, start = [], 0
    for index, stop in enumerate([*stops.tolist(), _STEPS]):
        readers = int(draws.choice(_READERS))
        found.append(Turn(readers, start, stop))
        start = stop if index % 2 else stop - stop % _SAVED_EVERY
    return found


def own_rows(readers: int, reader: int) -> np.ndarray:
    """The rows of a batch that a reader holds."""
    return np.array_split(np.arange(_BATCH), readers)[reader]


def batches(plan: Sequence[Turn], seed: int) -> list[np.ndarray]:
    """The batches of all steps, as the library's readers give them."""
    found: list[Any] = [None] * _STEPS
    for readers, start, stop in plan:
        parts = [
            as_data(Source()).training_batches(
                Place(_BATCH, own_rows(readers, reader), seed, start * _BATCH)
            )
            for reader in range(readers)
        ]
        for step in range(start, stop):
            found[step] = np.concatenate([next(part) for part in parts])
    return found


def shards(plan: Sequence[Turn], seed: int) -> list[np.ndarray]:
    """The usual alternative: each reader shuffles a shard of the files that it owns.

    The shards are dealt out anew when the number of readers changes, and each reader
    begins its own from the start.
    """

    def order(readers: int, reader: int) -> Iterator[int]:
        own, draws = np.arange(reader, _ROWS, readers), np.random.default_rng(seed)
        while True:
            yield from draws.permutation(own).tolist()

    found: list[Any] = [None] * _STEPS
    for readers, start, stop in plan:
        parts = [order(readers, reader) for reader in range(readers)]
        for step in range(start, stop):
            rows = [
                [next(part) for _ in own_rows(readers, reader)]
                for reader, part in enumerate(parts)
            ]
            found[step] = np.concatenate(rows)
    return found


def read_once(found: Sequence[np.ndarray]) -> float:
    """Share of the rows of all epochs that are read exactly once in their epoch."""
    epochs = np.concatenate(found).reshape(_EPOCHS, _ROWS)
    counts = [np.bincount(rows, minlength=_ROWS) for rows in epochs]
    return float(np.mean(np.array(counts) == 1))


def shares_read(readers: int) -> list[float]:
    """Share of the rows that each reader takes from the source in an epoch."""
    found = []
    for reader in range(readers):
        source = Source()
        place = Place(_BATCH, own_rows(readers, reader), 0, 0)
        part = as_data(source).training_batches(place)
        before = len(source.read)
        for _ in range(_ROWS // _BATCH):
            next(part)
        found.append((len(source.read) - before) / _ROWS)
    return found


Found = dict[int, list[float]]
"""{number of changes: share of rows that are read once, by seed}."""


def claims_of(once: Found, sharded: Found, same: bool) -> tuple[Claim, ...]:
    """Claims about rows and readers.

    Args:
      once: of the library's readers.
      sharded: of shards that are dealt out.
      same: whether all batches are those of a single reader.
    """
    alone = sharded[0]
    worst = min(min(x) for x in once.values())
    changed = [float(np.mean(x)) for n, x in sharded.items() if n]
    shares = shares_read(4)
    return (
        Claim(
            "each row is read exactly once an epoch, while readers join, leave and die",
            "at most once after a failure (tf.data service)",
            f"{worst:.0%} of the rows at least, up to {max(once)} changes",
            worst == 1.0,
        ),
        Claim(
            "the batches are those of one reader, bit for bit",
            "",
            f"{_STEPS} batches of each run",
            same,
        ),
        Claim(
            "a reader of four reads a quarter of the rows, and what is read ahead",
            "",
            ", ".join(f"{share:.1%}" for share in shares),
            all(0.25 <= share < 0.4 for share in shares),
        ),
        Claim(
            "shards that are dealt out anew lose rows and repeat others",
            "",
            f"{np.mean(alone):.0%} read once without a change, "
            + ", ".join(f"{x:.0%}" for x in changed)
            + " with more of them",
            min(alone) == 1.0 and all(x < 1 for x in changed) and changed[-1] < 0.7,
        ),
    )


def _run(setting: Setting) -> Result:
    changes = (0, 1, 4) if setting.quick else (0, 1, 2, 4, 8, 12)
    seeds = range(3 if setting.quick else 6)
    once: Found = {n: [] for n in changes}
    sharded: Found = {n: [] for n in changes}
    same = True
    read: dict[str, tuple[Found, Callable[..., list[np.ndarray]]]] = {
        "position": (once, batches),
        "shards": (sharded, shards),
    }
    for index, seed in enumerate(seeds):
        setting.progress(f"seed {seed}", index / len(seeds))
        alone = batches([Turn(1, 0, _STEPS)], seed)
        for number in changes:
            plan = turns(number, seed)
            for shares, reader in read.values():
                found = reader(plan, seed)
                shares[number].append(read_once(found))
                if reader is batches:
                    same &= all(map(np.array_equal, found, alone))

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        labels = {"position": "one position, own rows", "shards": "a shard per reader"}
        for name, (shares, _) in read.items():
            means = [100 * float(np.mean(x)) for x in shares.values()]
            errors = [100 * float(np.std(x)) for x in shares.values()]
            axes.errorbar(list(shares), means, errors, fmt="o-", label=labels[name])
        axes.set(xlabel="changes of the readers in two epochs")
        axes.set(ylabel="rows read exactly once an epoch, %", ylim=(0, 105))
        axes.legend()

    table = [
        (str(n), f"{np.mean(once[n]):.1%}", f"{np.mean(sharded[n]):.1%}")
        for n in changes
    ]
    return Result(
        ("changes of readers", "read once: one position", "read once: shards"),
        tuple(table),
        claims_of(once, sharded, same),
        {"position": once, "shards": sharded},
        draw,
    )


PAPER = Paper(
    name="data_servers",
    title="Data for readers that come and go",
    source="Audibert et al., tf.data service, SoCC 2023, arXiv:2210.14826",
    shows="share of the rows that are read exactly once in their epoch, over the "
    "number of times that readers join, leave or die",
    run=_run,
)
