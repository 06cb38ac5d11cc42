"""Layouts: axis sizes and named-dim rules that say how a model is parallelized.

A mesh has *axes* (``data``, ``fsdp``, ``tensor``), a tensor has *dims* with names
(``embed``, ``mlp``, ``heads``, ...). A `Layout` gives the size of every axis and maps
dim names to axes, once for parameters and once for activations. It round-trips through
one string::

    layouts.parse("data=2,fsdp=2,tensor=2,zero=3,microbatches=4,remat=full")

Models call `layouts.constrain` and `layouts.remat`, which are in `scope`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

from meshpar.errors import LayoutError
from meshpar.layouts.axes import (
    AXES,
    BATCH_AXES,
    BATCH_DIMS,
    DATA,
    PIPE,
    REPLICA,
    TENSOR,
    TOKEN_AXES,
    check_fields,
    in_use,
)
from meshpar.layouts.context_modes import ALLGATHER, check_context_mode
from meshpar.layouts.grammar import REGEXES, check_regex, read_items, write_items
from meshpar.layouts.layer_uses import FEATURES, canonical_layers, splits_rows
from meshpar.layouts.offload import NONE, canonical_offload, offloaded_parts
from meshpar.layouts.pipeline_options import (
    AUTO,
    PIPELINE_OPTIONS,
    RESIDUALS,
    UNUSED,
    check_pipeline_options,
)
from meshpar.layouts.refusals.combination import Combination
from meshpar.layouts.refusals.of_layouts import OF_LAYOUTS
from meshpar.layouts.refusals.reasons import check
from meshpar.layouts.remat import canonical_remat, keeps_matmuls
from meshpar.layouts.rules import (
    ACTIVATION_RULES,
    PARAM_RULES,
    Names,
    Rule,
    as_rules,
    check_axes,
)
from meshpar.layouts.token_order import TOKEN_ORDERS, check_token_order, resolved_order
from meshpar.schedules.zero_bubble import ZERO_BUBBLE

_MAX_SIZE = 2**20
"""Largest size of an axis, and most microbatches and virtual stages."""

_LEAST = {
    **dict.fromkeys(AXES, 1),
    **dict.fromkeys(("microbatches", "virtual_stages", "context_heads"), 1),
    "scan_unroll": 1,
    "min_shard_size": 0,
}
"""{field that is a whole number: its least value}."""


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Axis sizes, options and rules of one parallel layout.

    Two layouts are equal if their strings are: ``Layout(fsdp=2, zero=3)`` is
    ``Layout(fsdp=2)``.

    Attributes:
      replica: number of replicas that train apart and synchronize now and then; needs
        `lower(mode=LocalSGD(...))`.
      pipe: number of pipeline stages, which split the layers.
      data: size of the axis that splits the batch and replicates parameters.
      fsdp: size of the axis that splits the batch and shards training state (ZeRO).
      expert: size of the axis that splits the batch, and inside mixtures of experts
        the experts.
      context: size of the axis that splits the length of sequences.
      tensor: size of the axis that splits heads, mlp and vocab (Megatron).
      zero: training state that `fsdp` shards: 1 optimizer state, 2 + gradients, 3 +
        parameters. None means 3, or 2 in a pipeline, where zero=3 would gather the
        weights again in every tick, or 1 where a schedule fills the bubble with weight
        gradients. `zero_level` is the level in force.
      microbatches: gradient-accumulation steps per training step; a pipeline has
        several of them in flight.
      schedule: pipeline schedule: "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2",
        "zb_v", "dualpipe_v", "pipedream" (asynchronous), a name given to
        `schedules.register`, or "auto": interleaved if `virtual_stages` fit the model,
        else 1f1b.
      virtual_stages: chunks of layers per stage (interleaved schedules).
      partition: number of layers of each chunk in the order of the model, such as
        "3/3/2"; equal numbers by default.
      vocab: stages of a pipeline that run embedding and head: "edge" the first and the
        last, "pipe" all, each with a slice of the vocabulary; "auto" all where the
        model allows it and the vocabulary is large.
      save: activations that a stage keeps for the backward pass: "inputs" keeps its
        input and runs the stage again, "residuals" keeps those that `remat` allows;
        "auto" does so where these are few (neither `none` nor `dots`), so that no layer
        runs forward three times.
      tick_loop: form of a pipeline's program: "phases" is a straight loop for each run
        of equal ticks; "uniform" is one loop with conditionals, which compiles faster.
      remat: rematerialization of each layer: "none", "dots", "attention", "full",
        "experts" or "names:A+B" (`layouts.remat`); "12*full+10*none" gives the first 12
        layers and the last 10 policies of their own.
      layers: what the layers use `tensor` for: "tensor" splits their features, "fsdp"
        gives its devices rows of their own and gathers weights; "8*tensor+24*fsdp"
        gives the first 8 layers and the last 24 uses of their own.
      scan_unroll: layers that a round of the loop over them runs; with all of them
        there is no loop, and what layers save is not copied into stacks.
      offload: what lives in host memory: "none", or any of "optimizer", "parameters"
        and "activations", joined by "+".
      context_mode: attention over a split length: "allgather" gathers keys and values,
        "ulysses" splits heads instead, "ring" sends keys and values around.
      context_order: which tokens of a sequence each device has: "contiguous" a part of
        it, "zigzag" an early and a late part, "striped" every n-th token, or "auto":
        zigzag, and contiguous for ulysses. `token_order` is the order in force.
      context_heads: neighbours on a ring that split heads as ulysses does.
      min_shard_size: parameters with fewer elements stay whole over `fsdp`.
      axes: {name that a model has for a mesh axis: axis, axes or None}, for models that
        state a PartitionSpec of a mesh of their own.
      params: rules {dim name: axis, axes or None} that override `PARAM_RULES`.
      activations: rules that override `ACTIVATION_RULES`.
      paths: (regex, dim names) pairs that name the dims of unnamed parameters.
      prefetch: regexes of parameters of the layers; zero=3 gathers them one layer
        ahead, while the layer before them computes.
      allow: regexes of parameters whose rules may be dropped where they do not fit;
        "idle_devices" allows devices beside the layout, "slow_links" any axis over the
        links between slices.

    Raises:
      LayoutError: a size, option or rule that is out of range or does not exist, or
        options that do not go together (`refusals.OF_LAYOUTS`).
    """

    replica: int = 1
    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: int | None = None
    microbatches: int = 1
    schedule: str = "auto"
    virtual_stages: int = 1
    partition: str = ""
    vocab: str = AUTO
    save: str = AUTO
    tick_loop: str = "phases"
    remat: str = "none"
    layers: str = FEATURES
    scan_unroll: int = 1
    offload: str = NONE
    context_mode: str = ALLGATHER
    context_order: str = TOKEN_ORDERS[0]
    context_heads: int = 1
    min_shard_size: int = 0
    axes: Mapping[str, Rule] | tuple = ()
    params: Mapping[str, Rule] | tuple = ()
    activations: Mapping[str, Rule] | tuple = ()
    paths: Mapping[str, Names] | tuple = ()
    prefetch: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __post_init__(self):
        self._check_kinds()
        check_pipeline_options({name: getattr(self, name) for name in PIPELINE_OPTIONS})
        check_context_mode(self.context_mode)
        check_token_order(self.context_order)
        canonical = {
            "remat": canonical_remat(self.remat),
            "layers": canonical_layers(self.layers),
            "offload": canonical_offload(self.offload),
        }
        if self.pipe == 1:
            used = {name: getattr(self, name) for name in UNUSED}
            canonical |= {n: AUTO if x == UNUSED[n] else x for n, x in used.items()}
        for name, value in (canonical | self._canonical_rules()).items():
            object.__setattr__(self, name, value)
        check(Combination(self), OF_LAYOUTS)

    def unchecked(self, changes: dict[str, Any]) -> "Layout":
        """A copy with other fields, {name: canonical value}, which nothing checks."""
        copy, own = object.__new__(type(self)), vars(self)
        vars(copy).update({name: own[name] for name in DEFAULTS} | changes)
        return copy

    def _check_kinds(self) -> None:
        """Raises LayoutError for a size out of range, or a text that is none."""
        for name, low in _LEAST.items():
            size = getattr(self, name)
            whole = isinstance(size, int) and not isinstance(size, bool)
            if not whole or size < low:
                raise LayoutError(
                    f"{name}={size!r}: use a whole number of at least {low}"
                )
            if low and size > _MAX_SIZE:
                raise LayoutError(f"{name}={size}: use at most {_MAX_SIZE:,}")
        for name, default in DEFAULTS.items():
            if isinstance(default, str) and not isinstance(getattr(self, name), str):
                raise LayoutError(
                    f"{name}={getattr(self, name)!r}: use a text, such as {default!r}"
                )
        if self.zero not in (None, 1, 2, 3):
            raise LayoutError(f"zero={self.zero!r}: use 1, 2 or 3 (leave fsdp=1 for 0)")

    def _canonical_rules(self) -> dict[str, tuple]:
        """Rules and regexes as tuples, checked; pairs of `paths` keep their order."""
        paths = self.paths.items() if isinstance(self.paths, Mapping) else self.paths
        paths = tuple((regex, tuple(names)) for regex, names in paths)
        regexes: dict[str, tuple[str, ...]] = {}
        for kind in REGEXES:
            value = getattr(self, kind)
            regexes[kind] = (value,) if isinstance(value, str) else tuple(value)
        for regex in (*dict(paths), *itertools.chain(*regexes.values())):
            check_regex(regex)
        check_axes(axes := as_rules(self.axes))
        return {
            "axes": axes,
            "params": as_rules(self.params),
            "activations": as_rules(self.activations),
            "paths": paths,
            **regexes,
        }

    @property
    def zero_level(self) -> int:
        """The ZeRO level in force: `zero`, or the default for this layout.

        Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
        """
        if self.zero is not None:
            return self.zero
        if self.pipe == 1 or self.fsdp == 1:
            return 3
        may_diverge = self.schedule in ZERO_BUBBLE and not self.moves_in_stages
        return 1 if may_diverge else 2

    @property
    def moves_in_stages(self) -> bool:
        """Whether all stages of a pipeline have to run the same operations of a tick.

        Operations with collectives need it, but for those of ZeRO, and so does one loop
        of all ticks.
        """
        in_layers = max(self.expert, self.context, self.tensor) > 1
        return in_layers or self.splits_vocabulary or self.tick_loop == "uniform"

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts of training that live in host memory."""
        return offloaded_parts(self.offload)

    @property
    def token_order(self) -> str:
        """The order in force of the tokens that `context` splits."""
        return resolved_order(self.context, self.context_mode, self.context_order)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis, outer to inner."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        """Number of devices that this layout fills."""
        return math.prod(self.sizes.values())

    @property
    def num_token_shards(self) -> int:
        """Number of shards of one replica's batch, over all dims of its leaves."""
        return math.prod(getattr(self, axis) for axis in TOKEN_AXES)

    def batch_spec(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that split each dim of a batch leaf; () leaves a dim whole.

        Args:
          rank: number of dims of the leaf: [batch, length, ...], or fewer.

        Returns:
          One tuple of axes per dim, whatever the sizes of the axes.
        """
        axes = tuple(BATCH_DIMS.values())[:rank]
        return axes + ((),) * (rank - len(axes))

    @property
    def splits_vocabulary(self) -> bool:
        """Whether every stage of a pipeline holds a slice of the vocabulary."""
        return self.vocab == PIPE

    @property
    def saves_residuals(self) -> bool:
        """Whether stages keep what `remat` allows, and not their inputs alone.

        If each updates by itself (`schedule=pipedream`), they keep their inputs.
        """
        if self.save == AUTO:
            return not keeps_matmuls(self.remat)
        return self.save == RESIDUALS

    @property
    def param_rules(self) -> dict[str, tuple[str, ...]]:
        """{dim name: mesh axes} for parameters, defaults included."""
        rules = PARAM_RULES | dict(self.axes) | dict(self.params)
        if self.splits_vocabulary:
            rules["vocab"] = (PIPE, *rules["vocab"])
        return rules

    @property
    def activation_rules(self) -> dict[str, tuple[str, ...]]:
        """{dim name: mesh axes} for activations, defaults included."""
        return ACTIVATION_RULES | dict(self.axes) | dict(self.activations)

    @property
    def _batch_factors(self) -> dict[str, int]:
        """{axis or option: parts into which it splits a batch}."""
        also = (TENSOR,) if splits_rows(self.layers) else ()
        axes = in_use((REPLICA, *BATCH_AXES, *also), self.sizes)
        factors = {axis: getattr(self, axis) for axis in axes}
        return factors | {"microbatches": self.microbatches}

    @property
    def batch_unit(self) -> int:
        """The number whose multiples are sizes of batches."""
        return math.prod(self._batch_factors.values())

    def check_batch_size(self, batch_size: int) -> None:
        """Raises LayoutError unless the batch divides over devices and microbatches."""
        factors, unit = self._batch_factors, self.batch_unit
        if batch_size < 1 or batch_size % unit:
            near = max(unit, round(batch_size / unit) * unit)
            names, counts = "*".join(factors), "*".join(map(str, factors.values()))
            raise LayoutError(
                f"batch={batch_size} does not divide over {names}={counts}={unit}; use "
                f"a multiple of {unit} (the nearest is {near}), or a smaller layout"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        values: dict[str, Any] = {a: n for a, n in self.sizes.items() if n > 1}
        values = values or {DATA: 1}
        if self.fsdp > 1:
            values["zero"] = self.zero_level
        for name in _OPTIONS:
            if (value := getattr(self, name)) != DEFAULTS[name]:
                values[name] = value
        return write_items(values)


def parse(text: str) -> Layout:
    """Reads a layout string such as ``"data=2,fsdp=4,zero=2"``.

    Items are ``axis=size``, ``option=value``, ``axes.NAME=AXIS[+AXIS]|none``,
    ``params.DIM=...``, ``activations.DIM=...``, ``paths.REGEX=DIM/none/DIM``,
    ``prefetch=REGEX`` and ``allow=REGEX``; a regex with other characters than letters,
    digits and ``_/*.^$-`` needs JSON quotes. ``parse(str(layout)) == layout``.

    Raises:
      LayoutError: an item that is malformed, unknown or given twice.
    """
    return Layout(**read_items(text, DEFAULTS))


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Layout)}
"""{name: default} of every field of a layout."""

check_fields(tuple(DEFAULTS)[: tuple(DEFAULTS).index("zero")])

_OPTIONS = tuple(name for name in DEFAULTS if name not in (*AXES, "zero"))
