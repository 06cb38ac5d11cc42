"""Refusals of a layout by itself, whatever trains under it."""

from collections.abc import Iterable

from meshpar.layouts.axes import CONTEXT, DATA, EXPERT, FSDP, PIPE, REPLICA, TENSOR
from meshpar.layouts.context_modes import RING, ULYSSES
from meshpar.layouts.mixes import terms
from meshpar.layouts.offload import PARAMETERS
from meshpar.layouts.pipeline_options import PIPELINE_OPTIONS
from meshpar.layouts.refusals.combination import Combination
from meshpar.layouts.refusals.refusal import (
    ROW_LAYERS,
    Changes,
    Refusal,
    both,
    kept_resident,
    leaves_out,
    left_out,
    offloads,
    policies_by_layer,
    row_layers,
    sizes,
)
from meshpar.layouts.token_order import CONTIGUOUS

_SPLIT_OPTIONS = "context_mode", "context_order", "context_heads"
"""Options of sequences that `context` splits."""


def _one_by_one(c: Combination) -> Iterable[Changes]:
    """The devices of `fsdp` from those of `data`; without `zero` otherwise."""
    if c.layout.data > 1:
        yield {FSDP: c.layout.data, DATA: 1}
    yield left_out(c, "zero")


def _ring_heads(c: Combination) -> str:
    """Neighbours that split heads and leave no ring."""
    size, heads = c.layout.context, c.layout.context_heads
    if heads == 1 or c.layout.context_mode != RING or size == 1:
        return ""
    broken = size % heads or heads == size
    return both(c.settings("context_heads"), [f"{CONTEXT}={size}"]) if broken else ""


OF_LAYOUTS: tuple[Refusal, ...] = (
    Refusal(
        "zero=1, zero=2",
        f"{FSDP}=1",
        lambda c: both(
            c.settings("zero") if c.layout.zero in (1, 2) else (),
            [f"{FSDP}=1"] if c.layout.fsdp == 1 else (),
        ),
        f"the axis {FSDP} shards training state, and has one device",
        f"use {FSDP}=N in place of {DATA}=N, or leave zero out",
        _one_by_one,
    ),
    Refusal(
        ", ".join(PIPELINE_OPTIONS),
        f"{PIPE}=1",
        lambda c: both(
            c.settings(*PIPELINE_OPTIONS), [f"{PIPE}=1"] if c.layout.pipe == 1 else ()
        ),
        "this is an option of pipelines",
        f"add {PIPE}=N, or leave it out",
        leaves_out(*PIPELINE_OPTIONS),
    ),
    Refusal(
        ", ".join(_SPLIT_OPTIONS),
        f"{CONTEXT}=1",
        lambda c: both(
            c.settings(*_SPLIT_OPTIONS),
            [f"{CONTEXT}=1"] if c.layout.context == 1 else (),
        ),
        f"this is an option of sequences that {CONTEXT} splits",
        f"add {CONTEXT}=N, or leave it out",
        leaves_out(*_SPLIT_OPTIONS),
    ),
    Refusal(
        "context_heads",
        f"another context_mode than {RING}",
        lambda c: both(
            c.settings("context_heads") if c.layout.context > 1 else (),
            [f"context_mode={m}" for m in [c.layout.context_mode] if m != RING],
        ),
        "this is an option of rings",
        f"use context_mode={RING}, or leave context_heads out",
        lambda c: [{"context_mode": RING}, left_out(c, "context_heads")],
    ),
    Refusal(
        "context_heads",
        f"{CONTEXT}=N",
        _ring_heads,
        "with so many neighbours no ring of devices is left",
        f"use a smaller divisor of {CONTEXT}, or context_mode={ULYSSES}",
        lambda c: [
            {"context_mode": ULYSSES, "context_heads": 1},
            left_out(c, "context_heads"),
        ],
    ),
    Refusal(
        "context_order",
        f"context_mode={ULYSSES}",
        lambda c: both(
            c.settings("context_order") if c.layout.context_order != CONTIGUOUS else (),
            c.settings("context_mode") if c.layout.context_mode == ULYSSES else (),
        ),
        "every device has whole sequences there, and equal work in any order",
        "leave context_order out",
        leaves_out("context_order"),
    ),
    Refusal(
        "remat by layer",
        f"{PIPE}=N",
        lambda c: both(policies_by_layer(c), sizes(c, PIPE)),
        "all stages run one loop over their layers, which has one policy",
        "use one policy for all layers",
        lambda c: [{"remat": max(terms(c.layout.remat), key=lambda term: term[1])[0]}],
    ),
    Refusal(
        "offload",
        f"{PIPE}=N",
        lambda c: both(c.settings("offload"), sizes(c, PIPE)),
        "it moves one layer after the other, and stages split the layers",
        "leave one of the two out",
        leaves_out("offload"),
    ),
    Refusal(
        "offload",
        f"{REPLICA}=N",
        lambda c: both(c.settings("offload"), sizes(c, REPLICA)),
        "every replica keeps its state on its devices",
        "leave one of the two out",
        leaves_out("offload"),
    ),
    Refusal(
        f"offload={PARAMETERS}",
        "zero=1, zero=2",
        lambda c: both(
            offloads(c, PARAMETERS),
            [f"zero={c.layout.zero_level}"] if c.layout.zero_level < 3 else (),
        ),
        "it brings weights to the device layer by layer, and below zero=3 the device "
        "holds all of them",
        f"use zero=3, or leave {PARAMETERS} out",
        kept_resident,
    ),
    Refusal(
        ROW_LAYERS,
        f"{TENSOR}=1",
        lambda c: both(row_layers(c), [f"{TENSOR}=1"] if c.layout.tensor == 1 else ()),
        f"it says what layers use the axis {TENSOR} for, which has one device",
        f"add {TENSOR}=N, or leave layers out",
        leaves_out("layers"),
    ),
    Refusal(
        ROW_LAYERS,
        f"{PIPE}=N, {EXPERT}=N, {CONTEXT}=N",
        lambda c: both(row_layers(c), sizes(c, PIPE, EXPERT, CONTEXT)),
        f"beside these axes every layer splits its features over {TENSOR}",
        "leave layers out",
        leaves_out("layers"),
    ),
    Refusal(
        ROW_LAYERS,
        "zero=1, zero=2",
        lambda c: both(
            row_layers(c),
            [f"zero={c.layout.zero_level}"] if c.layout.zero_level < 3 else (),
        ),
        "such layers gather their weights one layer at a time, which only zero=3 does",
        "use zero=3, or leave layers out",
        lambda c: [{"zero": 3}, left_out(c, "layers")],
    ),
    Refusal(
        ROW_LAYERS,
        "offload",
        lambda c: both(row_layers(c), c.settings("offload")),
        "layers that split rows keep everything in the device's memory",
        "leave one of them out",
        lambda c: [left_out(c, "layers"), left_out(c, "offload")],
    ),
    Refusal(
        "scan_unroll",
        f"{PIPE}=N, {ROW_LAYERS}",
        lambda c: both(c.settings("scan_unroll"), [*sizes(c, PIPE), *row_layers(c)]),
        "loops over the layers of a stage, and over layers that split rows, are not "
        "unrolled",
        "leave scan_unroll out",
        leaves_out("scan_unroll"),
    ),
    Refusal(
        "prefetch",
        f"{FSDP}=1, zero=1, zero=2",
        lambda c: both(
            c.settings("prefetch"),
            [f"{FSDP}={c.layout.fsdp},zero={c.layout.zero_level}"]
            if c.layout.zero_level < 3 or c.layout.fsdp == 1
            else (),
        ),
        "it gathers weights one layer ahead, and only zero=3 gathers them layer by "
        "layer",
        f"use {FSDP}=N,zero=3, or leave prefetch out",
        lambda c: [{"zero": 3}] * (c.layout.fsdp > 1) + [left_out(c, "prefetch")],
    ),
)
"""What a layout refuses by itself, whatever trains under it."""
