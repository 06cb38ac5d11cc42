"""Lowering: (model, optimizer, layout, batch) -> one compiled SPMD training program.

`lower` checks everything that can be checked without compiling; the `TrainProgram` that
it returns compiles when it is first used.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.errors import LayoutError, nearest
from meshpar.layouts.axes import BATCH_AXES, REPLICA
from meshpar.layouts.layout import Layout, parse
from meshpar.layouts.resolve import make_plan
from meshpar.local_sgd.mode import LocalSGD
from meshpar.local_sgd.program import make_program
from meshpar.lowering.auto import pick_lowering
from meshpar.lowering.base import Lowering, model_scope
from meshpar.lowering.jit import JitLowering
from meshpar.lowering.program import TrainProgram
from meshpar.lowering.shard_map import ShardMapLowering, reason_unsupported
from meshpar.lowering.state import TrainState
from meshpar.mesh.mesh import make_mesh
from meshpar.models.model import Model
from meshpar.pipeline.layer_order import LayerOrder
from meshpar.pipeline.lowering import PipelineLowering
from meshpar.pipeline.pipedream import PipeDreamLowering
from meshpar.pipeline.spec import make_spec

LOWERINGS: dict[str, type[Lowering]] = {
    lowering.name: lowering for lowering in (JitLowering, ShardMapLowering)
}
"""How gradients come about: by the compiler, or written by us."""


def _abstract_batch(batch: Any, layout: Layout, mesh: Mesh) -> tuple[Any, Any]:
    """The global batch, and the part of one replica."""
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise ValueError("the batch is empty: give at least one array [batch, ...]")
    if any(not x.shape or x.shape[0] != leaves[0].shape[0] for x in leaves):
        shapes = [tuple(x.shape) for x in leaves]
        raise ValueError(f"batch leaves {shapes}: all need the same leading batch dim")
    layout.check_batch_size(leaves[0].shape[0])

    def rows(x: Any, axes: tuple[str, ...], parts: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (x.shape[0] // parts, *x.shape[1:]),
            jax.dtypes.canonicalize_dtype(x.dtype),
            sharding=NamedSharding(mesh, PartitionSpec(axes)),
        )

    axes, replicas = BATCH_AXES, layout.replica
    apart = (REPLICA, *axes) if replicas > 1 else axes
    return (
        jax.tree.map(lambda x: rows(x, apart, 1), batch),
        jax.tree.map(lambda x: rows(x, axes, replicas), batch),
    )


def _check_trace(model: Model, layout: Layout, mesh: Mesh, batch: Any) -> None:
    """Traces the loss once and holds the layout to what the model named."""
    params = {
        p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in model.params.items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(mesh), model_scope(layout, mesh) as scope:
        jax.eval_shape(lambda *a: model.loss(*a), params, batch, key)
        if layout.pipe > 1:
            x = jax.eval_shape(model.layered.embed, params, batch, key)
            kinds = {leaf.dtype for leaf in jax.tree.leaves(x)}
            if odd := [d for d in kinds if not jnp.issubdtype(d, jnp.floating)]:
                raise LayoutError(
                    f"pipe={layout.pipe} sends what `embed` returns from stage to "
                    f"stage, and gradients of it back, but it holds {odd[0]}: return "
                    "floating-point activations alone"
                )
    for name, _ in layout.activations:
        if name not in scope.names_used:
            known = nearest(name, (n for n in scope.names_used if n))
            raise LayoutError(
                f"rule activations.{name} matches no dim that the model constrains "
                f"({known})"
            )
    if layout.splits_vocabulary and len(scope.vocabulary_used) < 2:
        raise LayoutError(
            "vocab=pipe: the model has to use vocabulary.lookup for its embedding and "
            "vocabulary.token_losses for its loss (meshpar.vocabulary)"
        )
    if layout.remat != "none" and not scope.remat_used:
        raise LayoutError(
            f"remat={layout.remat}: the model has no rematerialization point; wrap "
            "its layer in layouts.remat(layer)"
        )


def _check_mode(mode: LocalSGD | None, layout: Layout, lowering: str) -> None:
    replicas = layout.replica
    if mode is None and replicas > 1:
        raise LayoutError(
            f"replica={replicas} lets replicas differ, and nothing would synchronize "
            f"them: give mode=LocalSGD(...) (--optimizer_mode=local_sgd), or use "
            f"data={replicas}"
        )
    if mode is not None and replicas == 1:
        raise LayoutError(
            "mode=LocalSGD synchronizes replicas, and the layout has one: add "
            "replica=N, or leave the mode out"
        )
    if mode is not None and lowering == "auto":
        raise LayoutError(
            "lowering=auto compares whole steps, of which local SGD has several: use "
            "shard_map or jit"
        )


def lower(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout | str,
    batch: Any,
    *,
    devices: Sequence[jax.Device] | None = None,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    lowering: str = "",
    mode: LocalSGD | None = None,
) -> TrainProgram:
    """Lowers training of a model under a layout to one SPMD program.

    Args:
      model: from `from_nnx` or `from_linen`.
      optimizer: any optax transformation; it runs on shards, so it must work
        elementwise or on means over a whole tensor (clip with `clip_norm`).
      layout: a Layout or its string.
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...], the global shapes.
      devices: devices to fill; all by default.
      clip_norm: largest global gradient norm; larger gradients are scaled down.
      compute_dtype: dtype to which parameters are cast for the loss (bfloat16 over
        float32 master weights); None computes in the parameters' own dtype.
      lowering: "shard_map" (explicit collectives, for layered model), "jit" (the
        compiler's), or "auto" to compile both and take the better program; by default
        the explicit one wherever it is possible.
      mode: how replicas that train apart are synchronized, for layouts with
        replica=R; every replica trains on its part of the batch.

    Raises:
      LayoutError: a layout that the devices, the model or the batch cannot honour.
    """
    known = ("auto", *LOWERINGS)
    if lowering and lowering not in known:
        raise LayoutError(f"lowering={lowering!r} ({nearest(lowering, known)})")
    layout = parse(layout) if isinstance(layout, str) else layout
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm}: use a number above 0, or None")
    if why_not := reason_unsupported(model, layout):
        if lowering == "shard_map":
            raise LayoutError(f"lowering=shard_map: {why_not}; use lowering=jit")
    _check_mode(mode, layout, lowering)
    if layout.prefetch and (why_not or lowering == "jit"):
        raise LayoutError(
            f"prefetch={layout.prefetch[0]}: the compiler schedules the gathers of "
            "lowering=jit; leave it out, or use lowering=shard_map with a layered model"
        )
    made, order, why = None, None, ""
    if layout.pipe > 1:
        if why_not or lowering == "jit":
            raise LayoutError(
                f"pipe={layout.pipe} needs lowering=shard_map: "
                f"{why_not or 'the compiler makes no pipeline'}"
            )
        layered = model.layered
        if not layered.evaluates:
            raise LayoutError(
                f"pipe={layout.pipe} evaluates by the stages of the model, but it has "
                "an evaluation_loss_fn of its own; leave that out"
            )
        made = make_spec(layout, layered.depth)
        why = made.why
        if made.schedule.asynchronous and layout.replica > 1:
            raise LayoutError(
                f"replica={layout.replica} with schedule={layout.schedule}: replicas "
                "are synchronized between steps of a pipeline that waits; use 1f1b"
            )
        if made.partition.moves and layout.replica > 1:
            raise LayoutError(
                f"replica={layout.replica} with a pipeline whose layers are stored in "
                "another order (several chunks per stage, or an uneven depth) is not "
                "supported; use virtual_stages=1 and a depth that pipe divides"
            )
        if made.partition.moves:
            order = LayerOrder(made.partition, layered.prefix)
            model = order.stored(model)
    mesh = make_mesh(layout, devices)
    abstract_batch, step_batch = _abstract_batch(batch, layout, mesh)
    params = {
        p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in model.params.items()
    }
    optimizer_state = jax.eval_shape(optimizer.init, params)
    if order is not None:
        order.check_optimizer(optimizer_state, params)
    plan = make_plan(layout, model.params, optimizer_state, compute_dtype)
    _check_trace(model, layout, mesh, step_batch)

    def with_sharding(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    abstract_state = TrainState(
        with_sharding(scalar, PartitionSpec()),
        with_sharding(scalar.update(dtype=jnp.uint32), PartitionSpec()),
        {path: with_sharding(leaf, plan.specs[path]) for path, leaf in params.items()},
        jax.tree.map(with_sharding, optimizer_state, plan.optimizer_specs),
    )
    names = [lowering or ("jit" if why_not else "shard_map")]
    if lowering == "auto":
        names = ["jit"] if why_not else list(LOWERINGS)
    kinds = [LOWERINGS[name] for name in names]
    if made is not None:
        kinds = [PipeDreamLowering if made.schedule.asynchronous else PipelineLowering]
    parts = model, optimizer, plan, mesh, clip_norm, compute_dtype
    lowerings = [kind(*parts) for kind in kinds]
    if mode is not None:
        (one,) = lowerings
        return make_program(one, mode, abstract_state, abstract_batch, step_batch, why)
    programs = [
        TrainProgram(one, abstract_state, abstract_batch, why, order)
        for one in lowerings
    ]
    if len(programs) == 1:
        return programs[0]
    program, why = pick_lowering(programs)
    object.__setattr__(program, "why_auto", why)  # It is compiled: keep it.
    return program
