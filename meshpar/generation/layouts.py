"""Layouts of generation: how the axes of a layout split prefill, decoding and cache.

Weights are split as in training, so that a model is sampled where it lies:
- `tensor` splits heads, mlp and vocabulary, and the heads of the cache. If the heads of
  keys and values do not divide over it, it splits the length of the cache.
- `data`, `fsdp` and `expert` split the rows of the cache. Prefill gathers weights over
  `fsdp` as training does. Decoding has few tokens, so it moves those instead: each
  device computes with its part of the embed dim, and partial sums are reduced.
- `context` splits the length of the cache.
- `pipe` has no pipeline to fill with one token: its devices do what those of `fsdp` do.
- `offload=parameters` streams the layers' weights from host memory for every token.

Source: Pope et al., Efficiently Scaling Transformer Inference, arXiv:2211.05102,
  section 3.2 (weights that stay, and weights that are gathered).
"""

import dataclasses
from typing import NamedTuple

from meshpar.layouts.axes import BATCH_AXES, GATHERED_AXES, PIPE, in_use, ways_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.offload import NONE, PARAMETERS
from meshpar.layouts.rules import ACTIVATION_RULES

_KEPT = ("min_shard_size", "paths", "allow")
"""Options that say how weights are split, and not how a step trains."""


class GenerationLayouts(NamedTuple):
    """Two layouts of the same weights and the same cache.

    Attributes:
      prefill: for blocks of tokens.
      decode: for one token of every sequence.
    """

    prefill: Layout
    decode: Layout


def generation_layouts(layout: Layout, kv_heads: int) -> GenerationLayouts:
    """The layouts of prefill and decoding.

    Args:
      layout: of training, or any other.
      kv_heads: heads of the cache; 0 if its arrays name none.
    """
    rules = layout.activation_rules
    length, heads = rules["cache_length"], {}
    params = dict(layout.params)
    axes = in_use(ACTIVATION_RULES["kv_heads"], layout.sizes)
    if kv_heads and axes:
        ways = ways_of(axes, layout.sizes)
        if kv_heads % ways or not set(axes) <= set(rules["kv_heads"]):
            params["kv_heads"], heads = None, _both("kv_heads", ())
            length = (*length, *axes)
    shared = {
        **_both("length", ()),
        **_both("residual_length", ()),
        **heads,
        "cache_length": length,
    }
    sizes = layout.sizes
    (gathered,) = GATHERED_AXES
    sizes[gathered] *= sizes.pop(PIPE)
    whole = Layout(
        **sizes,
        axes=layout.axes,
        params=params,
        activations=layout.activations,
        offload=PARAMETERS if PARAMETERS in layout.offloaded else NONE,
        **{name: getattr(layout, name) for name in _KEPT},
    )
    kept = tuple(axis for axis in BATCH_AXES if axis not in GATHERED_AXES)
    embed = tuple(a for a in whole.param_rules["embed"] if a in GATHERED_AXES)
    # New tokens are parts of the cache's rows, so that they need not move to them.
    shared["cache_batch"] = (*kept, *GATHERED_AXES)
    prefill = shared | _both("batch", shared["cache_batch"])
    decode = shared | _both("batch", kept) | _both("embed", embed)
    return GenerationLayouts(_with_rules(whole, prefill), _with_rules(whole, decode))


def _with_rules(layout: Layout, rules: dict[str, tuple[str, ...]]) -> Layout:
    """The layout with the rules of activations that have an effect."""
    sizes, own = layout.sizes, layout.activation_rules
    changed = {
        dim: axes
        for dim, axes in rules.items()
        if in_use(axes, sizes) != in_use(own[dim], sizes)
    }
    activations = dict(layout.activations) | changed
    return dataclasses.replace(layout, activations=activations)


def _both(dim: str, axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """A rule for a dim of activations, under both of its names."""
    return {dim: axes, f"activation_{dim}": axes}
