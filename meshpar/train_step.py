"""Lowering: (model, optimizer, layout, batch) -> one compiled SPMD training program.

`lower` checks everything that can be checked without compiling; the `TrainProgram` that
it returns compiles when it is first used.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar import choose, compiled, explicit, layouts, traffic
from meshpar.automatic import Automatic
from meshpar.compiled import Collective
from meshpar.contract import Contract
from meshpar.errors import LayoutError, nearest
from meshpar.explicit import Explicit
from meshpar.flax_models import Model, Params
from meshpar.layer_order import LayerOrder
from meshpar.layouts import Layout
from meshpar.lowering import Lowering, Metrics, TrainState, model_scope
from meshpar.mesh import make_mesh
from meshpar.pipedream import PipeDream
from meshpar.pipelined import Pipelined, arrange
from meshpar.plan import Plan, make_plan

LOWERINGS: dict[str, type[Lowering]] = {
    lowering.name: lowering for lowering in (Automatic, Explicit)
}
"""How gradients come about: by the compiler, or written by us."""


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """A model lowered under a layout; made by `lower`.

    Attributes:
      lowering: the pure functions of the step.
      abstract_state: the training state as ShapeDtypeStructs with shardings.
      abstract_batch: the batch, likewise.
      why_lowering: why this lowering, where lowering="auto" chose it.
      layer_order: how a pipeline stores the layers, where not in the model's order.
    """

    lowering: Lowering
    abstract_state: TrainState
    abstract_batch: Any
    why_lowering: str = ""
    layer_order: LayerOrder | None = None

    @property
    def model(self) -> Model:
        """The model."""
        return self.lowering.model

    @property
    def plan(self) -> Plan:
        """Spec, reason and bytes of every leaf."""
        return self.lowering.plan

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.plan.layout

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.lowering.mesh

    def init(self, seed: int = 0) -> TrainState:
        """Makes a fresh state: the same numbers whatever the layout."""
        return self._init(np.uint32(seed))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Runs one training step; `state` is donated.

        Args:
          state: the state; do not use it afterwards.
          batch: device arrays from `place_batch`, or this process's rows of it.

        Returns:
          The next state, and metrics: loss, grad_norm (before clipping) and the
          scalars of the model's aux, all means over the batch.
        """
        return self.compiled(state, self._placed(batch))

    def gradients(self, state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        """Returns metrics and gradients {path: array}, before clipping.

        Layers stand in the order of the model.
        """
        return self._gradients(state, self._placed(batch))

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Returns the loss and aux of the model in evaluation mode."""
        return self._evaluate(state, self._placed(batch))

    def in_model_order(self, state: TrainState) -> TrainState:
        """The state with layers in the order of the model, the same in all layouts.

        A pipeline may store them in another order; otherwise it is the state itself.
        """
        if self.layer_order is None:
            return state
        return self._reorder(self.layer_order.in_model_order, self.portable_state)(
            state
        )

    def as_stored(self, state: TrainState) -> TrainState:
        """The inverse of `in_model_order`."""
        if self.layer_order is None:
            return state
        return self._reorder(self.layer_order.as_stored, self.abstract_state)(state)

    @property
    def portable_state(self) -> TrainState:
        """What `in_model_order` returns, as ShapeDtypeStructs with shardings."""
        if self.layer_order is None:
            return self.abstract_state
        return self.layer_order.abstract_in_model_order(self.abstract_state)

    def _reorder(self, fn: Callable, like: TrainState) -> Callable:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
        return jax.jit(fn, out_shardings=shardings)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The training step as StableHLO, before it is compiled."""
        with jax.set_mesh(self.mesh):
            return jax.jit(
                self._traced(self.lowering.train_step),
                donate_argnums=0,
                out_shardings=(self._state_shardings, self._whole),
            ).lower(self.abstract_state, self.abstract_batch)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled training step.

        Raises:
          MeshparError: it could deadlock.
        """
        made = self.lowered.compile()
        self.lowering.check_compiled(self._collectives_of(made))
        return made

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of the compiled training step."""
        return self._collectives_of(self.compiled)

    def _collectives_of(self, made: jax.stages.Compiled) -> list[Collective]:
        return compiled.read(made.as_text(), dict(self.mesh.shape))

    @functools.cached_property
    def contract(self) -> Contract:
        """The collectives that this layout and lowering declare for one step."""
        with jax.set_mesh(self.mesh):
            traced = self._traced(self.lowering.gradients)
            shapes = jax.eval_shape(traced, self.abstract_state, self.abstract_batch)
        metrics = set(shapes[0]) | {"weight"}
        return traffic.declare(self.lowering, self.abstract_batch, len(metrics))

    def violations(self) -> list[str]:
        """What the compiled training step does against its contract."""
        return self.contract.violations(self.collectives)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the lowered step: equal on all processes that may run together."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()[:16]

    @functools.cached_property
    def batch_rows(self) -> np.ndarray:
        """Rows of the global batch that this process's devices hold, ascending."""
        first = jax.tree.leaves(self.abstract_batch)[0]
        index_map = first.sharding.addressable_devices_indices_map(first.shape)
        rows = {
            row
            for index in index_map.values()
            for row in range(*index[0].indices(first.shape[0]))
        }
        return np.array(sorted(rows))

    def place_batch(self, batch: Any) -> Any:
        """Puts this process's rows of a batch onto its devices.

        Args:
          batch: pytree of host arrays [len(batch_rows), ...]; in a single process
            those are all rows.

        Returns:
          The global batch as arrays sharded over data and fsdp.
        """
        rows = self.batch_rows

        def place(target: jax.ShapeDtypeStruct, x: Any) -> jax.Array:
            x = np.asarray(x)
            if x.shape != (len(rows), *target.shape[1:]) or x.dtype != target.dtype:
                raise ValueError(
                    f"batch leaf {x.dtype}{list(x.shape)}: the program was lowered for "
                    f"{target.dtype}{[len(rows), *target.shape[1:]]} on this process"
                )

            def shard(index: tuple[slice, ...]) -> np.ndarray:
                wanted = np.arange(*index[0].indices(target.shape[0]))
                return x[np.searchsorted(rows, wanted)]

            return jax.make_array_from_callback(target.shape, target.sharding, shard)

        return jax.tree.map(place, self.abstract_batch, batch)

    def _placed(self, batch: Any) -> Any:
        if isinstance(jax.tree.leaves(batch)[0], jax.Array):
            return batch
        return self.place_batch(batch)

    @functools.cached_property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def _state_shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @functools.cached_property
    def _init(self) -> Callable[[Any], TrainState]:
        optimizer, model = self.lowering.optimizer, self.model

        def init(seed: jax.Array) -> TrainState:
            params = model.init(jax.random.key(seed))
            step = jnp.zeros((), jnp.int32)
            return TrainState(step, seed, params, optimizer.init(params))

        # Runs once: on CPUs optimized code for it takes longer to make than it saves.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        return jax.jit(
            init, out_shardings=self._state_shardings, compiler_options=options
        )

    @functools.cached_property
    def _gradients(self) -> Callable:
        order = self.layer_order
        like = self.portable_state.params
        shardings = {path: leaf.sharding for path, leaf in like.items()}

        def gradients(state: TrainState, batch: Any) -> tuple[Metrics, Params]:
            metrics, gradients = self.lowering.gradients(state, batch)
            return metrics, order.in_model_order(gradients) if order else gradients

        return self._jit(gradients, (self._whole, shardings))

    @functools.cached_property
    def _evaluate(self) -> Callable:
        return self._jit(self.lowering.evaluate, self._whole)

    def _jit(self, fn: Callable, out_shardings: Any) -> Callable:
        jitted = jax.jit(self._traced(fn), out_shardings=out_shardings)

        def call(state: TrainState, batch: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return jitted(state, batch)

        return call

    def _traced(self, fn: Callable) -> Callable:
        def traced(state: TrainState, batch: Any) -> Any:
            with model_scope(self.layout, self.mesh):
                return fn(state, batch)

        return traced


def _abstract_batch(batch: Any, layout: Layout, mesh: Mesh) -> Any:
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise ValueError("the batch is empty: give at least one array [batch, ...]")
    if any(not x.shape or x.shape[0] != leaves[0].shape[0] for x in leaves):
        shapes = [tuple(x.shape) for x in leaves]
        raise ValueError(f"batch leaves {shapes}: all need the same leading batch dim")
    layout.check_batch_size(leaves[0].shape[0])
    sharding = NamedSharding(mesh, PartitionSpec(layouts.BATCH_AXES))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding
        ),
        batch,
    )


def _check_trace(model: Model, layout: Layout, mesh: Mesh, batch: Any) -> None:
    """Traces the loss once and holds the layout to what the model named."""
    params = {
        p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in model.params.items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(mesh), model_scope(layout, mesh) as scope:
        jax.eval_shape(lambda *a: model.loss(*a), params, batch, key)
    for name, _ in layout.activations:
        if name not in scope.names_used:
            known = nearest(name, (n for n in scope.names_used if n))
            raise LayoutError(
                f"rule activations.{name} matches no dim that the model constrains "
                f"({known})"
            )
    if layout.vocab == "pipe" and len(scope.vocabulary_used) < 2:
        raise LayoutError(
            "vocab=pipe: the model has to use vocabulary.lookup for its embedding and "
            "vocabulary.token_losses for its loss (meshpar.vocabulary)"
        )
    if layout.remat != "none" and not scope.remat_used:
        raise LayoutError(
            f"remat={layout.remat}: the model has no rematerialization point; wrap "
            "its layer in layouts.remat(layer)"
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
      lowering: "shard_map" (explicit collectives, for staged models), "jit" (the
        compiler's), or "auto" to compile both and take the better program; by default
        the explicit one wherever it is possible.

    Raises:
      LayoutError: a layout that the devices, the model or the batch cannot honour.
    """
    known = ("auto", *LOWERINGS)
    if lowering and lowering not in known:
        raise LayoutError(f"lowering={lowering!r} ({nearest(lowering, known)})")
    layout = layouts.parse(layout) if isinstance(layout, str) else layout
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm}: use a number above 0, or None")
    if why_not := explicit.why_not(model, layout):
        if lowering == "shard_map":
            raise LayoutError(f"lowering=shard_map: {why_not}; use lowering=jit")
    if layout.prefetch and (why_not or lowering == "jit"):
        raise LayoutError(
            f"prefetch={layout.prefetch[0]}: the compiler schedules the gathers of "
            "lowering=jit; leave it out, or use lowering=shard_map with a staged model"
        )
    order = None
    if layout.pipe > 1:
        if why_not or lowering == "jit":
            raise LayoutError(
                f"pipe={layout.pipe} needs lowering=shard_map: "
                f"{why_not or 'the compiler makes no pipeline'}"
            )
        staged = model.staged
        parts = arrange(layout, staged.depth).partition
        if parts.moves:
            order = LayerOrder(parts, staged.prefix)
            model = order.stored(model)
    mesh = make_mesh(layout, devices)
    abstract_batch = _abstract_batch(batch, layout, mesh)
    params = {
        p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in model.params.items()
    }
    optimizer_state = jax.eval_shape(optimizer.init, params)
    if order is not None:
        order.check_optimizer(optimizer_state, params)
    plan = make_plan(layout, model.params, optimizer_state, compute_dtype)
    _check_trace(model, layout, mesh, abstract_batch)

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
    if layout.pipe > 1:
        names = ["pipedream" if layout.schedule == "pipedream" else "pipeline"]
    kinds = LOWERINGS | {"pipeline": Pipelined, "pipedream": PipeDream}
    parts = model, optimizer, plan, mesh, clip_norm, compute_dtype
    programs = [
        TrainProgram(
            kinds[name](*parts), abstract_state, abstract_batch, layer_order=order
        )
        for name in names
    ]
    if len(programs) == 1:
        return programs[0]
    program, why = choose.best(programs)
    object.__setattr__(program, "why_lowering", why)  # It is compiled: keep it.
    return program
