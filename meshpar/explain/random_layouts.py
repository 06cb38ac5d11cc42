"""Random layouts, and whether each trains the same model as one device.

Every layout that is drawn is equal, refused with a reason, or wrong. A new option of a
layout is one line in `OPTIONS` or `PIPELINE`.
"""

import dataclasses
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshpar.errors import MeshparError
from meshpar.explain.judge import reason_no_judge
from meshpar.explain.verify import Group, judged, record, verify
from meshpar.layouts.axes import CONTEXT, DATA, FSDP, PIPE, TENSOR
from meshpar.layouts.context_modes import CONTEXT_MODES, ULYSSES
from meshpar.layouts.grammar import write_items
from meshpar.layouts.layer_uses import FEATURES, ROWS
from meshpar.layouts.layout import DEFAULTS, Layout, parse
from meshpar.layouts.offload import ACTIVATIONS, NONE, OFFLOADS, OPTIMIZER
from meshpar.layouts.pipeline_options import CHOICES
from meshpar.layouts.refusals.combination import Combination
from meshpar.layouts.refusals.of_layouts import OF_LAYOUTS
from meshpar.layouts.refusals.reasons import reasons
from meshpar.layouts.remat import REMAT_POLICIES
from meshpar.layouts.token_order import AUTO, TOKEN_ORDERS
from meshpar.lowering.jit import JitLowering
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.lowering.train_program import TrainProgram
from meshpar.schedules.published import PUBLISHED

DRAWN_AXES = (PIPE, DATA, FSDP, CONTEXT, TENSOR)
"""Axes among which devices are divided; replicas train apart on purpose."""

DRAWN_LOWERINGS = (JitLowering.name, ShardMapLowering.name)
"""Lowerings that are asked for, beside the default."""

OPTIONS: dict[str, tuple] = {
    "microbatches": (1, 2, 4),
    "remat": ("none", *REMAT_POLICIES),
    "min_shard_size": (0, 0, 64),
}
"""{option: values} of every layout."""

SHARDED: dict[str, tuple] = {"zero": (1, 2, 3)}
"""{option: values} of layouts with fsdp."""

SPLIT = ("context_mode", "context_order", "context_heads")
"""Options of layouts with context, which depend on one another."""

UNPIPED: dict[str, tuple] = {
    "offload": (*(NONE,) * 6, *OFFLOADS, f"{OPTIMIZER}+{ACTIVATIONS}"),
    "layers": (FEATURES, ROWS),
    "scan_unroll": (1, 1, 2, 8),
}
"""{option: values} of which a layout refuses some beside its other options."""

PIPELINE: dict[str, tuple] = {
    "schedule": ("auto", *PUBLISHED),
    "virtual_stages": (1, 1, 2),
    **CHOICES,
}
"""{option: values} of layouts with pipe."""

EQUAL, REFUSED, WRONG = "equal", "refused", "WRONG"


@dataclasses.dataclass(frozen=True)
class Draw:
    """A layout and the lowering that is asked for; "" for the default.

    Attributes:
      layout: its string.
      lowering: its name.
      more: what else was drawn, for reports.
    """

    layout: str
    lowering: str = ""
    more: str = ""

    def __str__(self) -> str:
        lowering = f"lowering={self.lowering}" if self.lowering else ""
        return " ".join(filter(None, (self.layout, lowering, self.more)))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one draw.

    Attributes:
      draw: the layout.
      verdict: `EQUAL`, `REFUSED` or `WRONG`.
      reason: why it was refused, or what is wrong; "" if equal.
    """

    draw: Draw
    verdict: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.draw}" + (self.reason and f": {self.reason}")


def draw_layouts(
    num: int, num_devices: int, seed: int = 0, axes: Sequence[str] = DRAWN_AXES
) -> list[Draw]:
    """Draws layouts from the grammar; not every one of them can be honoured.

    Args:
      num: number of layouts; two may be equal.
      num_devices: largest number of devices of a layout.
      seed: of the draws.
      axes: axes among which devices are divided, such as those that a model of your own
        can use.
    """
    rng = random.Random(seed)
    return [_draw(rng, num_devices, axes) for _ in range(num)]


def _draw(rng: random.Random, num_devices: int, axes: Sequence[str]) -> Draw:
    values: dict[str, Any] = dict.fromkeys((*DRAWN_AXES, *axes), 1)
    filled = rng.choice((num_devices,) * 3 + (rng.randint(1, num_devices),))
    for factor in _prime_factors(filled):
        values[rng.choice(axes)] *= factor
    options = dict(OPTIONS)
    options |= SHARDED if values[FSDP] > 1 else {}
    options |= _split_options(rng, values[CONTEXT]) if values[CONTEXT] > 1 else {}
    options |= PIPELINE if values[PIPE] > 1 else {}
    values |= {name: rng.choice(choices) for name, choices in options.items()}
    for name, choices in UNPIPED.items():
        values[name] = _pick(rng, _allowed(values, name, choices))
    given = {k: x for k, x in values.items() if x != DEFAULTS[k]} or {DATA: 1}
    lowerings = ("",) if values[PIPE] > 1 else ("", *DRAWN_LOWERINGS)
    return Draw(write_items(given), rng.choice(lowerings))


def _split_options(rng: random.Random, context: int) -> dict[str, tuple]:
    """{option: values} of a layout that splits sequences."""
    mode = rng.choice(CONTEXT_MODES)
    orders = (AUTO,) if mode == ULYSSES else TOKEN_ORDERS
    heads = _allowed({CONTEXT: context, "context_mode": mode}, "context_heads", (1, 2))
    return dict(zip(SPLIT, ((mode,), orders, heads), strict=True))


def _allowed(values: dict[str, Any], name: str, choices: Sequence) -> list:
    """The values of an option that do not conflict with the layout's other options."""
    drawn = Combination(Layout()).altered(values)
    refused = {
        value
        for value in set(choices)
        if any(reasons(drawn.altered({name: value}), OF_LAYOUTS))
    }
    return [value for value in choices if value not in refused]


def _pick(rng: random.Random, choices: Sequence) -> Any:
    """One of the choices; nothing is drawn where there is one."""
    return rng.choice(choices) if len(set(choices)) > 1 else choices[0]


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor


def verify_layouts(
    lower_layout: Callable[[Layout, str], TrainProgram],
    draws: Sequence[Draw],
    batches: Sequence[Any],
    *,
    seed: int = 0,
    tolerance: float = 1e-5,
    by_microbatches: bool = False,
) -> Iterator[Outcome]:
    """Compares layouts with a plain loop, which is compiled and trained once.

    Args:
      lower_layout: (layout, lowering) -> the program, on as many devices as the layout
        fills: `meshpar.lower` with a model, an optimizer and options of your own.
      draws: the layouts.
      batches: host batches, one per step.
      seed: seed of every run.
      tolerance: largest relative error that counts as rounding.
      by_microbatches: whether the loss depends on the number of microbatches, as one
        that balances experts does: then one device trains once for every such number.

    Yields:
      The outcome of every layout, in order.
    """
    references: dict[int, list[list[Group]]] = {}
    for draw in draws:
        try:
            program = lower_layout(parse(draw.layout), draw.lowering)
            microbatches = program.layout.microbatches if by_microbatches else 1
            if microbatches not in references:
                if microbatches > 1 or reason_no_judge(program):
                    alone = lower_layout(Layout(microbatches=microbatches), "")
                    references[microbatches] = list(record(alone, batches, seed))
                else:
                    references[microbatches] = list(judged(program, batches, seed))
            report = verify(program, references[microbatches], batches, seed, tolerance)
        except MeshparError as error:
            yield Outcome(draw, REFUSED, _first_lines(error))
        except Exception as error:
            traceback.print_exc()
            yield Outcome(draw, WRONG, f"{type(error).__name__}: {error}")
        else:
            yield Outcome(draw, EQUAL if report.ok else WRONG, report.problem)


def _first_lines(error: Exception) -> str:
    """The first line of an error, and the first problem below it, as one line."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2])
