"""`lower`: (model, optimizer, layout, batch) -> one compiled SPMD training program.

This file knows every strategy: lowerings, runners of pipelines and optimizer modes meet
here and nowhere else. `lower` checks everything that can be checked without compiling;
the program that it returns compiles when it is first used.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from meshpar.arrays import abstract
from meshpar.errors import LayoutError, nearest, shown
from meshpar.islands.lowering import make_program as make_islands_program
from meshpar.islands.mode import Islands
from meshpar.layouts.axes import PIPE
from meshpar.layouts.layer_uses import splits_rows
from meshpar.layouts.layout import Layout, parse
from meshpar.layouts.plan import Plan
from meshpar.layouts.refusals.combination import AUTO, Combination
from meshpar.layouts.refusals.of_training import OF_TRAINING
from meshpar.layouts.refusals.reasons import check, possible_lowerings
from meshpar.layouts.resolve import make_plan
from meshpar.layouts.rules import as_axes
from meshpar.local_sgd.mode import LocalSGD
from meshpar.local_sgd.program import make_program as make_local_program
from meshpar.lowering.arguments import check_arguments, check_leaves
from meshpar.lowering.auto import pick_lowering
from meshpar.lowering.base import Lowering
from meshpar.lowering.batches import abstract_batches
from meshpar.lowering.chunked_update import offloaded_plan
from meshpar.lowering.frame import Frame
from meshpar.lowering.jit import JitLowering
from meshpar.lowering.mode import Mode
from meshpar.lowering.optimizer import Optimizer, optimizer_of
from meshpar.lowering.scan import ScanRunner
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.lowering.state import abstract_state
from meshpar.lowering.train_program import TrainProgram, make_train_program
from meshpar.mesh.mesh import make_mesh
from meshpar.models import whole_model
from meshpar.models.model import Model
from meshpar.models.model_checks import CheckedParts, check_parts, check_step
from meshpar.models.model_scope import model_scope, on_one_device
from meshpar.models.row_dims import RowDims, row_dims
from meshpar.pipeline.layer_order import LayerOrder
from meshpar.pipeline.pipedream import PipeDreamRunner
from meshpar.pipeline.runner import PipelineRunner
from meshpar.pipeline.spec import PipelineSpec, make_spec, pipeline_traits
from meshpar.replicated import num_rows

LOWERINGS: dict[str, type[Lowering]] = {
    lowering.name: lowering for lowering in (JitLowering, ShardMapLowering)
}
"""Lowerings by name: jit (XLA inserts the collectives), shard_map (we write them)."""

MODES: dict[type, Callable[..., TrainProgram]] = {LocalSGD: make_local_program}
"""Optimizer modes of one program, and the functions that make it from its lowering."""

MODES_OF_MANY: dict[type, Callable[..., TrainProgram]] = {Islands: make_islands_program}
"""Optimizer modes of several programs, and the functions that make these."""


def lower(
    model: Model,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    layout: Layout | str,
    batch: Any,
    *,
    devices: Sequence[jax.Device] | None = None,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    lowering: str = "",
    mode: Mode | None = None,
    axis_names: Mapping[str, str | Iterable[str]] | None = None,
) -> TrainProgram:
    """Lowers training of a model under a layout to one SPMD program.

    Args:
      model: from `from_nnx` or `from_linen`.
      optimizer: an optax transformation; it sees the model's nested dicts, and the
        loss as its extra argument `value`.
      layout: a Layout or its string.
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...], the global shapes.
      devices: devices to fill; all by default.
      clip_norm: largest global gradient norm; larger gradients are scaled down.
      compute_dtype: dtype to which parameters are cast for the loss (bfloat16 over
        float32 master weights); None computes in the parameters' own dtype.
      lowering: "shard_map" (explicit collectives), "jit" (the compiler's), or "auto"
        to compile both and take the better program; by default shard_map for models
        with layers, wherever it is possible. Models without layers run under
        "shard_map" over data and fsdp if asked to, and if their loss is a mean over
        rows.
      mode: how replicas that train apart are synchronized, for layouts with
        replica=R (`LocalSGD`); or islands, each under the layout (`Islands`). Each
        trains on its part of the batch.
      axis_names: {mesh axis: the name, or names, that the model has for it}, for models
        that state a PartitionSpec of a mesh of their own: {"tensor": "tp"} is the same
        as `axes.tp=tensor` in the layout.

    Returns:
      The program; nothing is compiled yet, except with lowering="auto".

    Raises:
      LayoutError: a layout that the devices, the model or the batch cannot honour, or
        a loss or metric that the parts of a split batch cannot give.
      ValueError: an argument of the wrong kind or out of range, batch leaves without a
        common leading dim, or an optimizer that needs what training does not give it.
    """
    layout = _with_names(layout, axis_names)
    check_arguments(model, optimizer, layout, clip_norm, compute_dtype)
    check_leaves(batch)
    rest, why = (batch, devices, clip_norm, compute_dtype, lowering, mode), ""
    if may_split_vocabulary(model, layout) and _uses_vocabulary(model, batch, devices):
        split = dataclasses.replace(layout, vocab=PIPE)
        try:
            return _lower(model, optimizer, split, *rest)
        except (LayoutError, ValueError) as error:  # Of the head, by us or by jax.
            why = f"vocab=auto took edge ({shown(str(error), 300)})"
    return _lower(model, optimizer, layout, *rest, why)


def _lower(
    model: Model,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    layout: Layout,
    batch: Any,
    devices: Sequence[jax.Device] | None,
    clip_norm: float | None,
    compute_dtype: Any,
    lowering: str,
    mode: Mode | None,
    why: str = "",
) -> TrainProgram:
    """`lower` under a layout as it stands; `why` says what `auto` has chosen."""
    combined = combination(model, layout, lowering, mode, clip_norm)
    check(combined, OF_TRAINING, functools.partial(_fits, model, batch))
    model = _layered(model, lowering)
    if make_programs := MODES_OF_MANY.get(type(mode)):
        one = functools.partial(lower, model, optimizer, layout, clip_norm=clip_norm)
        one = functools.partial(one, compute_dtype=compute_dtype, lowering=lowering)
        return make_programs(one, mode, batch, devices, layout.num_devices)
    spec, order = None, None
    if layout.pipe > 1:
        spec = make_spec(layout, model.layered.depth)
        if spec.partition.moves:
            order = LayerOrder(spec.partition, model.layered.prefix)
            model = order.stored(model)
    mesh = make_mesh(layout, devices)
    abstract_batch, step_batch = abstract_batches(batch, layout, mesh)
    params = abstract(model.params)
    trained = {path: params[path] for path, p in model.params.items() if p.trained}
    optimizer = optimizer_of(model, optimizer)
    if order is not None:
        order.check_optimizer(optimizer, trained)
    plan = make_plan(layout, model.params, optimizer.abstract_state, compute_dtype)
    if layout.offloaded:
        plan = offloaded_plan(plan, model, optimizer)
    names = _lowering_names(combined)
    why = "; ".join(filter(None, (spec.why if spec else "", why)))
    by_hand = ShardMapLowering.name in names
    state = abstract_state(params, optimizer.abstract_state, plan, mesh)
    parts = LoweringArguments(model, optimizer, plan, mesh, clip_norm, compute_dtype)
    with jax.set_mesh(mesh):
        checked = check_parts(model, layout, mesh, by_hand, abstract_batch)
        dims = None
        if splits_rows(layout.layers):
            why_split = f"layers={layout.layers}"
            dims = row_dims(model.layered, params, abstract_batch, why_split)
    lowerings = [make_lowering(name, parts, spec, checked, dims) for name in names]
    if mode is not None:
        make = MODES[type(mode)]
        only = make(lowerings[0], mode, state, abstract_batch, step_batch, why)
        return _checked(only)
    programs = [
        _checked(make_train_program(candidate, state, abstract_batch, order, why))
        for candidate in lowerings
    ]
    return programs[0] if len(programs) == 1 else pick_lowering(programs)


def _with_names(
    layout: Layout | str, axis_names: Mapping[str, str | Iterable[str]] | None
) -> Layout:
    """The layout, with the names that the model has for mesh axes."""
    layout = parse(layout) if isinstance(layout, str) else layout
    if not axis_names or not isinstance(layout, Layout):
        return layout
    return dataclasses.replace(layout, axes=dict(layout.axes) | as_axes(axis_names))


LARGE_VOCABULARY = 2**14
"""Tokens of a vocabulary from which on its head takes longer than to share it out.

Stages that share the head add up its input and its gradient, 4 numbers a token and dim;
alone, the last one multiplies 6 times the vocabulary for each of them.
"""


def may_split_vocabulary(model: Model, layout: Layout) -> bool:
    """Whether vocab=auto tries to split embedding and head over the stages."""
    if layout.pipe == 1 or layout.vocab != AUTO or model.layered is None:
        return False
    sizes = (
        size
        for param in model.layered.split(model.params)[0].values()
        for name, size in zip(param.names or (), param.shape, strict=False)
        if name == "vocab"
    )
    return max(sizes, default=0) >= LARGE_VOCABULARY


def _uses_vocabulary(
    model: Model, batch: Any, devices: Sequence[jax.Device] | None
) -> bool:
    """Whether embedding and loss use `ops.vocabulary`, from a trace of both."""
    layout, layered = Layout(), model.layered
    mesh = make_mesh(layout, (devices or jax.devices())[:1])
    shared = layered.split(abstract(model.params))[0]

    def ends(shared: Any, batch: Any) -> Any:
        key = jax.random.key(0)
        x = layered.embed(shared, batch, key)
        return layered.head_loss(shared, x, batch, key).loss

    with on_one_device(layout, mesh) as scope:
        jax.eval_shape(ends, shared, batch)
    return len(scope.vocabulary_used) > 1


def _checked(program: TrainProgram) -> TrainProgram:
    """A program whose step is traced, and whose layout fits the names used in it."""
    with model_scope(program.layout, program.mesh) as scope:
        jaxpr = program.inspection.traced.jaxpr
    by_hand = isinstance(program.lowering, ShardMapLowering)
    check_step(program.model, scope, jaxpr, by_hand)
    return program


def _layered(model: Model, lowering: str) -> Model:
    """The model, as one head if it has no layers and shard_map is asked for."""
    if model.layered is not None or lowering != ShardMapLowering.name:
        return model
    return whole_model.as_one_head(model)


def _lowering_names(combined: Combination) -> list[str]:
    """Names of the lowerings to make; several of them are to be compared."""
    possible = possible_lowerings(combined, OF_TRAINING)
    if combined.lowering == AUTO:
        return [name for name in LOWERINGS if name in possible]
    return [possible[0]]


class LoweringArguments(NamedTuple):
    """The arguments that every lowering takes, in the order of its fields."""

    model: Model
    optimizer: Optimizer
    plan: Plan
    mesh: Mesh
    clip_norm: float | None
    compute_dtype: Any


def make_lowering(
    name: str,
    parts: LoweringArguments,
    spec: PipelineSpec | None,
    checked: CheckedParts,
    dims: RowDims | None = None,
) -> Lowering:
    """The lowering of a name, with the runner that the pipeline asks for."""
    if name == JitLowering.name:
        return JitLowering(*parts, *checked)
    stage_axes, layered = PipelineRunner.stage_axes if spec else (), parts.model.layered
    frame = Frame(layered, parts.plan, parts.mesh, stage_axes, draws=checked.draws)
    zero = frame.zero()
    if spec is None:
        return ShardMapLowering(*parts, ScanRunner(frame, zero, dims))
    runner = PipelineRunner(frame, zero, spec)
    if spec.schedule.asynchronous:
        return ShardMapLowering(*parts, PipeDreamRunner.of(runner, parts.optimizer))
    return ShardMapLowering(*parts, runner)


def combination(
    model: Model,
    layout: Layout,
    lowering: str = "",
    mode: Mode | None = None,
    clip_norm: float | None = None,
) -> Combination:
    """The arguments of `lower` as facts for the table of refusals.

    It needs no devices, and nothing is traced.

    Args:
      model: the model.
      layout: the layout.
      lowering: as in `lower`.
      mode: as in `lower`.
      clip_norm: as in `lower`.

    Raises:
      LayoutError: a lowering or a mode that does not exist.
    """
    known = (AUTO, *LOWERINGS)
    if lowering and lowering not in known:
        raise LayoutError(f"lowering={lowering!r} ({nearest(lowering, known)})")
    if mode is not None and type(mode) not in (kinds := MODES | MODES_OF_MANY):
        modes = ", ".join(kind.__name__ for kind in kinds)
        raise LayoutError(f"mode={mode!r} is no optimizer mode; known: {modes}")
    traits = mode.traits if mode is not None else None
    pipelines = functools.partial(pipeline_traits, depth=model.traits.depth)
    return Combination(layout, model.traits, lowering, traits, clip_norm, pipelines)


def _fits(model: Model, batch: Any, layout: Layout) -> bool:
    """Whether the sizes of a model and of a batch divide over a layout."""
    try:
        layout.check_batch_size(num_rows(batch))
        make_plan(layout, model.params, {})
    except (LayoutError, IndexError):
        return False
    return True
