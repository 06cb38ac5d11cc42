"""Prints the support matrix: which strategies go together, and why others do not.

    python -m experiments.support

Rows are strategies, columns are features of a layout. A cell is "yes" or the number of
the record of `meshpar.layouts.refusals` that refuses the two together. Below stands the
whole table of refusals by feature, one line for each cause. Sizes of a model play no
part.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from meshpar.commands import command_line
from meshpar.layouts.axes import CONTEXT, DATA, EXPERT, FSDP, PIPE, REPLICA, TENSOR
from meshpar.layouts.layer_uses import ROWS
from meshpar.layouts.layout import parse
from meshpar.layouts.offload import OFFLOADS
from meshpar.layouts.refusals import OF_TRAINING, REFUSALS
from meshpar.layouts.refusals.combination import (
    JIT,
    SHARD_MAP,
    Combination,
    ModelTraits,
)
from meshpar.layouts.refusals.reasons import Reason, UnsupportedError, check
from meshpar.layouts.refusals.refusal import Refusal
from meshpar.local_sgd.mode import LocalSGD
from meshpar.pipeline.spec import pipeline_traits
from meshpar.schedules.published import PUBLISHED

_DEPTH = 8
_PIPELINE = f"{PIPE}=2,microbatches=8"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One row of the matrix.

    Attributes:
      name: for people.
      layout: what the row adds to a layout string.
      lowering: the lowering that it asks for; "" for the default.
      layered: whether the model has layers.
      partition: an uneven partition of its stages.
    """

    name: str
    layout: str = ""
    lowering: str = ""
    layered: bool = True
    partition: str = "5/3"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One column of the matrix.

    Attributes:
      name: as in a layout string, or for people.
      layout: what the column adds to a layout string.
      clips: whether gradients are clipped by their norm.
      replicas: whether replicas train apart (local SGD).
    """

    name: str
    layout: str = ""
    clips: bool = False
    replicas: bool = False


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the matrix.

    Attributes:
      strategy: its row.
      feature: its column.
      layout: the small layout that is tried.
      reasons: why it is refused; () where the two go together.
    """

    strategy: Strategy
    feature: Feature
    layout: str
    reasons: tuple[Reason, ...]


def _schedule_rows() -> Iterator[Strategy]:
    for name in PUBLISHED:
        row = Strategy(f"schedule={name}", f"{_PIPELINE},schedule={name}")
        if name == "interleaved":
            layout = f"{row.layout},virtual_stages=2"
            row = dataclasses.replace(row, layout=layout, partition="3/2/2/1")
        yield row


STRATEGIES: tuple[Strategy, ...] = (
    Strategy("jit, any model", lowering=JIT, layered=False),
    Strategy("jit, model with layers", lowering=JIT),
    Strategy("shard_map", lowering=SHARD_MAP),
    *_schedule_rows(),
)

FEATURES: tuple[Feature, ...] = (
    Feature(f"{DATA}=N", f"{DATA}=2"),
    *(Feature(f"zero={level}", f"{FSDP}=2,zero={level}") for level in (1, 2, 3)),
    Feature(f"{EXPERT}=N", f"{EXPERT}=2"),
    Feature(f"{CONTEXT}=N", f"{CONTEXT}=2"),
    Feature(f"{TENSOR}=N", f"{TENSOR}=2"),
    Feature("microbatches=M", "microbatches=8"),
    Feature("remat", "remat=full"),
    Feature("remat by layer", "remat=3*full+5*none"),
    Feature(f"layers={ROWS}", f"{TENSOR}=2,layers={ROWS}"),
    Feature("prefetch", f"{FSDP}=2,zero=3,prefetch=mlp"),
    *(Feature(f"offload={part}", f"offload={part}") for part in OFFLOADS),
    Feature("virtual_stages", "virtual_stages=2"),
    Feature("partition", "partition={partition}"),
    Feature(f"vocab={PIPE}", f"vocab={PIPE}"),
    Feature("save=residuals", "save=residuals"),
    Feature("tick_loop=uniform", "tick_loop=uniform"),
    Feature("clip_norm", clips=True),
    Feature("local SGD", f"{REPLICA}=2", replicas=True),
)


def support_cells() -> list[Cell]:
    """All cells, row by row."""
    return [_cell(s, feature) for s in STRATEGIES for feature in FEATURES]


def _cell(strategy: Strategy, feature: Feature) -> Cell:
    items: dict[str, str] = {}
    added = feature.layout.format(partition=strategy.partition)
    for text in (strategy.layout, added):
        items |= dict(item.split("=", 1) for item in text.split(",") if item)
    text = ",".join(f"{key}={value}" for key, value in items.items()) or f"{DATA}=1"
    try:
        check(_combination(strategy, feature, text), OF_TRAINING)
    except UnsupportedError as error:
        return Cell(strategy, feature, text, error.reasons)
    return Cell(strategy, feature, text, ())


def _combination(strategy: Strategy, feature: Feature, layout: str) -> Combination:
    """The two together.

    Raises:
      UnsupportedError: the layout itself refuses them.
    """
    return Combination(
        parse(layout),
        ModelTraits(_DEPTH if strategy.layered else 0),
        strategy.lowering,
        LocalSGD().traits if feature.replicas else None,
        1.0 if feature.clips else None,
        functools.partial(pipeline_traits, depth=_DEPTH),
    )


_GROUPS = {
    "Generation": r"generation",
    "Replicas and islands": r"replica|\bmode\b",
    "Sequences that context splits": r"^context_",
    "Pipelines": r"schedule|virtual_stages|^pipe=N \|",
    "Layers": r"layer",
    "Training state": r"zero|offload|prefetch",
    "Lowerings": r"",
}
"""{group of refusals: regex of the features in them}; the first that fits counts."""


def refusals_by_group() -> dict[str, list[Refusal]]:
    """The table of refusals by the feature that is asked for, the plain ones first."""
    groups: dict[str, list[Refusal]] = {group: [] for group in reversed(_GROUPS)}
    for one in REFUSALS:
        said = f"{one.feature} | {one.beside}"
        group = next(g for g, regex in _GROUPS.items() if re.search(regex, said))
        groups[group].append(one)
    return groups


def support_table() -> str:
    """The matrix as Markdown; its numbers point to the table of refusals below it."""
    cells = support_cells()
    lines = [
        "| | " + " | ".join(f"`{feature.name}`" for feature in FEATURES) + " |",
        "|---" * (len(FEATURES) + 1) + "|",
    ]
    for row, strategy in enumerate(STRATEGIES):
        start = row * len(FEATURES)
        marks = [
            f"no ({', '.join(map(_number, cell.reasons))})" if cell.reasons else "yes"
            for cell in cells[start : start + len(FEATURES)]
        ]
        lines.append(f"| {strategy.name} | " + " | ".join(marks) + " |")
    numbers = itertools.count(1)
    for group, refusals in refusals_by_group().items():
        lines += ["", f"**{group}**", "", "| | asked for | with | why not | remedy |"]
        lines.append("|---" * 5 + "|")
        for one in refusals:
            texts = str(next(numbers)), one.feature, one.beside, one.why, one.remedy
            lines.append(f"| {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


def _number(reason: Reason) -> str:
    """The number of a reason's record in the table of refusals."""
    in_order = [one for group in refusals_by_group().values() for one in group]
    return str(in_order.index(reason.refusal) + 1)


def main(_: Sequence[str]) -> int:
    """Prints the matrix, and returns the exit code."""
    print(support_table())
    return 0


if __name__ == "__main__":
    command_line.run(main)
