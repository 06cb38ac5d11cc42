"""The space of layouts: every combination of axes and options worth predicting.

The space follows the axes of a mesh and the options of a layout. It is pruned by what a
layout, a model and a machine refuse themselves: nothing here repeats their rules, but
for bounds that keep the space small.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshpar.errors import LayoutError
from meshpar.layouts.axes import (
    AXES,
    BATCH_AXES,
    CONTEXT,
    DATA,
    EXPERT,
    FSDP,
    PIPE,
    RECORDS,
    TENSOR,
    ways_of,
)
from meshpar.layouts.context_modes import ALLGATHER, ULYSSES
from meshpar.layouts.layer_uses import FEATURES, ROWS
from meshpar.layouts.layout import DEFAULTS, Layout
from meshpar.layouts.offload import ACTIVATIONS, OPTIMIZER, PARAMETERS
from meshpar.layouts.pipeline_options import AUTO, EDGE, RESIDUALS
from meshpar.layouts.remat import keeps_matmuls
from meshpar.layouts.wanted import Wanted
from meshpar.models.model import Model
from meshpar.planner.facts import UsedNames

MOST_TENSOR = 16
"""Most devices over `tensor`: more of them than one host's have slow links between."""

LONG = 8192
"""Tokens of a sequence from which its length is split."""

_MICROBATCHES = 1, 2, 4, 8
"""Microbatches without a pipeline, and per stage with one."""

_CHUNKS = 2, 4
"""Chunks of layers per stage of interleaved schedules."""

_OF_LAYERS = "remat", "layers"
"""Options by which layers may run in their own ways."""

_beside_layers = operator.attrgetter(*(n for n in DEFAULTS if n not in _OF_LAYERS))

_MAY_STAY_WHOLE = ("vocab",)
"""Dims that `tensor` leaves whole where it does not divide them: embedding and head are
a small part of a large model's compute."""

_OFFLOADS = tuple(
    "+".join(parts)
    for parts in ((OPTIMIZER,), (OPTIMIZER, ACTIVATIONS), (OPTIMIZER, PARAMETERS))
)
"""Values of `offload=` that are tried where nothing less fits."""


def layouts(
    num_devices: int,
    model: Model,
    rows: int,
    length: int,
    wanted: Wanted,
    used: Callable[[], UsedNames] = UsedNames,
    unrolls: bool = False,
) -> Iterator[Layout]:
    """Generates layouts that fill all devices and that are valid by themselves.

    Args:
      num_devices: devices to fill.
      model: the model. Without layers it has no pipeline, and its layouts have no
        options that the model may not follow: microbatches, remat, context.
      rows: of the batch.
      length: of its sequences.
      wanted: what the user asks for.
      used: gives the names that the model uses; called where a layout depends on them.
      unrolls: whether layers without a loop are tried, too.
    """
    layered = model.layered
    names = {name for p in model.params.values() for name in p.names or ()}
    names |= {
        name
        for kind in ("axes", "params", "paths")
        for rule in wanted.required.get(kind, {}).values()
        for name in rule or ()
    }
    most = dict.fromkeys(AXES, 1) | {
        PIPE: layered.depth if layered else 1,
        DATA: rows,
        FSDP: rows,
        EXPERT: rows if names & _dims(EXPERT) else 1,
        CONTEXT: num_devices if layered and length >= LONG else 1,
        TENSOR: MOST_TENSOR if names & _dims(TENSOR) else 1,
    }
    most |= {axis: num_devices for axis in most if axis in wanted.required}
    most |= {axis: 1 for axis in most if axis in wanted.forbidden}
    unrolled = [1, layered.depth] if layered and unrolls else [1]
    seen = set()
    for sizes in _sizes(num_devices, most):
        rules: dict[str, dict[str, Any]] = {}
        if whole := _undivided(model, wanted.required.get(TENSOR, sizes[TENSOR])):
            rules["params"] = dict.fromkeys(whole)
            rules["activations"] = dict.fromkeys(whole & used().dims)
        rules = {
            kind: own | wanted.required.get(kind, {}) for kind, own in rules.items()
        }
        tried, remat = _zero_levels(sizes), [DEFAULTS["remat"]]
        if layered:
            tried = _options(sizes, rows, used, unrolled)
            remat = used().policies(sizes[EXPERT] > 1)
        for options in tried:
            # What is required stands in for what the space would try.
            fields = {**sizes, **options, **wanted.required, **rules}
            policies = [required] if (required := fields.pop("remat", "")) else remat
            for layout in _of_policies(fields, policies):
                free = "save" not in wanted.required and layout.save == RESIDUALS
                if free and not keeps_matmuls(layout.remat):
                    layout = layout.unchecked({"save": AUTO})  # It does the same.
                if layout in seen or math.prod(layout.sizes.values()) != num_devices:
                    continue
                seen.add(layout)
                if wanted.keeps(layout):
                    yield layout


def _of_policies(fields: dict[str, Any], remat: Sequence[str]) -> Iterator[Layout]:
    """Generates the layouts with these fields that are valid, one for each policy.

    They follow each other, since they share most costs. The first is checked for all:
    no refusal looks at which policy of `remat` it is.
    """
    try:
        first = Layout(**fields, remat=remat[0])
    except LayoutError:
        return
    yield first
    yield from (first.unchecked({"remat": policy}) for policy in remat[1:])


def beside_layers(layout: Layout) -> tuple[Any, ...]:
    """A key of all fields of a layout except those that may differ between layers."""
    return _beside_layers(layout)


def offloaded(layouts: Sequence[Layout], wanted: Wanted) -> Iterator[Layout]:
    """Generates copies of layouts that keep parts of training in host memory.

    A copy needs less memory of the device than its layout, and is never faster: it is
    worth predicting where the layout does not fit. Those that keep the same parts
    follow each other: they share most costs if they differ in `remat` alone.
    """
    resident = [layout for layout in layouts if not layout.offloaded]
    alike = [list(group) for _, group in itertools.groupby(resident, _beside_remat)]
    for offload, (first, *others) in itertools.product(_OFFLOADS, alike):
        try:  # As in `_of_policies`, one is checked for all.
            copy = dataclasses.replace(first, offload=offload)
        except LayoutError:
            continue
        copies = (copy, *(x.unchecked({"offload": copy.offload}) for x in others))
        yield from filter(wanted.keeps, copies)


def _beside_remat(layout: Layout) -> tuple[Any, ...]:
    return beside_layers(layout), layout.layers


def _dims(axis: str) -> set[str]:
    """Names of dims of parameters that an axis splits by default.

    That of the axis is one: rules for paths may give it to a dim.
    """
    return {axis, *(dim for a in RECORDS if a.name == axis for dim in a.param_dims)}


def _undivided(model: Model, ways: int) -> frozenset[str]:
    """Dims whose sizes this number of ways does not divide, and that may stay whole."""
    return frozenset(
        name
        for param in model.params.values()
        for name, size in zip(param.names or (), param.shape, strict=False)
        if name in _MAY_STAY_WHOLE and size % ways
    )


def _sizes(num_devices: int, most: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Generates all sizes of axes, {axis: size}, that fill the devices."""
    axes = list(most)

    def fill(index: int, left: int) -> Iterator[tuple[int, ...]]:
        if index == len(axes) - 1:
            if left <= most[axes[index]]:
                yield (left,)
            return
        for size in range(1, min(left, most[axes[index]]) + 1):
            if left % size == 0:
                for rest in fill(index + 1, left // size):
                    yield (size, *rest)

    for chosen in fill(0, num_devices):
        yield dict(zip(axes, chosen, strict=True))


def _options(
    sizes: Mapping[str, int],
    rows: int,
    used: Callable[[], UsedNames],
    unrolled: list[int],
) -> Iterator[dict[str, Any]]:
    """Generates the options to try with sizes of axes, but for `remat`."""
    split = ways_of(BATCH_AXES, sizes)
    stages = sizes[PIPE]
    counts = [stages * n if stages > 1 else n for n in _MICROBATCHES]
    tried: dict[str, list[Any]] = {
        "zero": [1, 2, 3] if sizes[FSDP] > 1 else [None],
        "microbatches": [n for n in counts if rows % (n * split) == 0],
        "scan_unroll": unrolled,
    }
    if sizes[CONTEXT] > 1:
        tried["context_mode"] = [ALLGATHER, ULYSSES]
    uses = [FEATURES, ROWS] if _is_possible(**sizes, layers=ROWS) else [FEATURES]
    for values in itertools.product(
        _combinations(tried), _pipelines(stages, used().vocabulary), uses
    ):
        yield values[0] | values[1] | {"layers": values[2]}


def _is_possible(**fields: Any) -> bool:
    """Whether a layout is valid by itself."""
    try:
        Layout(**fields)
    except LayoutError:
        return False
    return True


def _zero_levels(sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Generates ZeRO levels to try for a model without layers.

    zero=1 moves what zero=2 moves there, and holds more.
    """
    for level in (2, 3) if sizes[FSDP] > 1 else (None,):
        yield {"zero": level}


def _pipelines(stages: int, shares: bool) -> list[dict[str, Any]]:
    """Options of a pipeline to try with a number of stages.

    Args:
      stages: of the pipeline.
      shares: whether the model can split its vocabulary over them.
    """
    if stages == 1:
        return [{}]
    chunks = [{"schedule": "interleaved", "virtual_stages": v} for v in _CHUNKS]
    alone = [{"schedule": "gpipe"}, {"schedule": "zb_h1"}]
    fused = [{"schedule": "1f1b"}, *chunks]
    once = {"schedule": "1f1b", "save": RESIDUALS}
    if not shares:
        return [*fused, *alone, once]
    return [
        *({"vocab": EDGE, **options} for options in (*fused, *alone)),
        *({"vocab": PIPE, **options} for options in (*fused, once)),
    ]


def _combinations(tried: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*tried.values()):
        yield dict(zip(tried, values, strict=True))
