"""`generator`: (model, layout) -> programs that continue prompts."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.errors import LayoutError, MeshparError
from meshpar.generation.generate import Generator
from meshpar.generation.layouts import generation_layouts
from meshpar.generation.programs import GenerationPrograms
from meshpar.layouts.axes import BATCH_AXES, in_use, ways_of
from meshpar.layouts.host_leaves import with_host_leaves
from meshpar.layouts.layout import Layout, parse
from meshpar.layouts.offload import PARAMETERS
from meshpar.layouts.param import STACKED_DIM, Param, follows_load
from meshpar.layouts.refusals.combination import Combination
from meshpar.layouts.refusals.of_generation import OF_GENERATION
from meshpar.layouts.refusals.reasons import check
from meshpar.layouts.resolve import make_plan
from meshpar.lowering.jit import JitLowering
from meshpar.lowering.program import Program
from meshpar.mesh.mesh import make_mesh
from meshpar.models.cached import CachedModel
from meshpar.models.model import Model

_BLOCK = 256
"""Most tokens of a sequence that prefill runs at once."""


def generator(
    model: Model,
    layout: Layout | str,
    *,
    max_length: int,
    batch_size: int = 0,
    cached: CachedModel | None = None,
    devices: Sequence[jax.Device] | None = None,
    compute_dtype: Any = None,
) -> Generator:
    """Makes the programs that continue prompts with a model under a layout.

    Args:
      model: from `from_nnx` or `from_linen`.
      layout: a Layout or its string; that of training will do. `generation.layouts`
        says what each axis splits.
      max_length: most tokens of a sequence, prompt included, that the model sees.
      batch_size: sequences at once; by default as few as the layout can split.
      cached: the model with a cache, unless it gives one itself.
      devices: devices to fill; all by default.
      compute_dtype: dtype of weights and cache; that of the parameters by default.

    Returns:
      The generator; nothing is compiled yet.

    Raises:
      LayoutError: a layout under which the model cannot generate.
      MeshparError: a length or a batch out of range.
    """
    layout = parse(layout) if isinstance(layout, str) else layout
    cached = cached or model.cached
    traits = dataclasses.replace(model, cached=cached).traits
    check(Combination(layout, traits), OF_GENERATION)
    if max_length < 2:
        raise MeshparError(f"max_length={max_length}: use 2 or more")
    if cached.max_length and max_length > cached.max_length:
        raise MeshparError(
            f"max_length={max_length}: the model has {cached.max_length} positions; "
            f"use {cached.max_length}, longer texts go on from their last half"
        )
    model = _in_dtype(model, compute_dtype)
    dtype = compute_dtype or _float_dtype(model)
    layouts = generation_layouts(layout, _kv_heads(cached, dtype))
    batch_size = _checked_batch(batch_size, layouts.prefill)
    mesh = make_mesh(layouts.prefill, devices)
    plan = make_plan(layouts.prefill, model.params, {})
    if layouts.prefill.offloaded:
        plan = with_host_leaves(plan, {}, _layers(model))
    lowering = JitLowering(model, None, plan, mesh, None, None, frozenset())
    program = Program(lowering, None)
    block = min(_BLOCK, max_length)
    axes = in_use(layouts.decode.activation_rules["cache_length"], mesh.shape)
    unit = math.lcm(block, ways_of(axes, mesh.shape))
    programs = GenerationPrograms(
        cached,
        layouts,
        mesh,
        program.abstract_params,
        batch_size,
        slots=-(-max_length // unit) * unit,
        block=block,
        dtype=dtype,
    )
    return Generator(program, programs, max_length)


def _in_dtype(model: Model, dtype: Any) -> Model:
    """The model with weights in another dtype; None leaves them as they are."""
    if dtype is None:
        return model

    def cast(param: Param) -> Param:
        floating = jnp.issubdtype(param.dtype, jnp.floating)
        if not floating or param.is_state or follows_load(param.names):
            return param
        return dataclasses.replace(param, dtype=dtype)

    params = {path: cast(param) for path, param in model.params.items()}

    def init(key: Array) -> Params:
        fresh = model.init(key)
        return {path: x.astype(params[path].dtype) for path, x in fresh.items()}

    return dataclasses.replace(model, params=params, init=init)


def _layers(model: Model) -> frozenset[str]:
    """Paths of the layers' matrices, which `offload=parameters` streams.

    Vectors such as the scales of norms are small, and the TPU compiler cannot slice a
    row of bfloat16 in host memory.

    Raises:
      LayoutError: there are none.
    """
    stacks = {
        path
        for path, x in model.params.items()
        if (x.names or ())[:1] == (STACKED_DIM,) and len(x.shape) > 2
    }
    if not stacks:
        raise LayoutError(
            f"offload={PARAMETERS} streams weights whose first dim is named "
            f"{STACKED_DIM!r}, and the model has none: leave it out"
        )
    return frozenset(stacks)


def _float_dtype(model: Model) -> Any:
    """The dtype that the model's parameters have together."""
    kinds = {p.dtype for p in model.params.values() if not p.is_state}
    return jnp.result_type(*kinds)


def _kv_heads(cached: CachedModel, dtype: Any) -> int:
    """Heads of the arrays of a cache; 0 if they name none."""
    shapes = jax.eval_shape(functools.partial(cached.init, 1, 1, dtype))
    heads = {
        x.shape[names.index("kv_heads")]
        for path, x in shapes.items()
        if (names := cached.names(path, x.ndim)) and "kv_heads" in names
    }
    return math.gcd(*heads)


def _checked_batch(batch_size: int, layout: Layout) -> int:
    """The batch size, or the smallest that the layout can split.

    Raises:
      LayoutError: it does not divide over the axes that split the cache's rows.
    """
    axes = in_use(BATCH_AXES, layout.sizes)
    ways = ways_of(axes, layout.sizes)
    if batch_size < 0 or batch_size % ways:
        raise LayoutError(
            f"batch_size={batch_size} does not divide over {'*'.join(axes) or 'one'}="
            f"{ways}; use a multiple of {ways}, or tensor in place of these axes"
        )
    return batch_size or ways
