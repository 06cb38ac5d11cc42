"""Lowering: (model, optimizer, layout, batch) -> one compiled SPMD training program.

The automatic lowering (`jit`): every mesh axis is automatic, training state carries the
shardings of the plan, activations carry the model's constraints, and the compiler
inserts the collectives. ZeRO is a matter of what is sharded over `fsdp`.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar import layouts, microbatch
from meshpar.flax_models import Model, Params
from meshpar.layouts import Layout, LayoutError, nearest
from meshpar.mesh import make_mesh
from meshpar.plan import Plan, make_plan

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that training carries from step to step.

    Attributes:
      step: steps done, int32 scalar.
      seed: seed of the run, uint32 scalar; dropout keys follow from seed and step.
      params: {path: array}.
      optimizer_state: the optax state.
    """

    step: jax.Array
    seed: jax.Array
    params: Params
    optimizer_state: Any


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """A model lowered under a layout; made by `lower`.

    Attributes:
      model: the model.
      layout: the layout.
      mesh: the device mesh.
      plan: spec, reason and bytes of every leaf.
      abstract_state: the training state as ShapeDtypeStructs with shardings.
      abstract_batch: the batch, likewise.
    """

    model: Model
    optimizer: optax.GradientTransformation
    layout: Layout
    mesh: Mesh
    plan: Plan
    abstract_state: TrainState
    abstract_batch: Any
    clip_norm: float | None
    compute_dtype: Any

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
        return self._step(state, self._placed(batch))

    def gradients(self, state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        """Returns metrics and gradients {path: array}, before clipping."""
        return self._gradients(state, self._placed(batch))

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Returns the loss and aux of the model in evaluation mode."""
        return self._evaluate(state, self._placed(batch))

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The training step as StableHLO, before it is compiled."""
        with jax.set_mesh(self.mesh):
            return jax.jit(
                self._traced(self._train_step),
                donate_argnums=0,
                out_shardings=(self._state_shardings, self._whole),
            ).lower(self.abstract_state, self.abstract_batch)

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
        def init(seed: jax.Array) -> TrainState:
            params = self.model.init(jax.random.key(seed))
            return TrainState(
                jnp.zeros((), jnp.int32), seed, params, self.optimizer.init(params)
            )

        return jax.jit(init, out_shardings=self._state_shardings)

    @functools.cached_property
    def _step(self) -> Callable:
        return self.lowered.compile()

    @functools.cached_property
    def _gradients(self) -> Callable:
        shardings = {
            path: NamedSharding(self.mesh, leaf.partition_spec)
            for path, leaf in self.plan.gradients.items()
        }
        return self._jit(self._loss_and_gradients, (self._whole, shardings))

    @functools.cached_property
    def _evaluate(self) -> Callable:
        def evaluate(state: TrainState, batch: Any) -> Metrics:
            loss, aux = self.model.evaluation_loss(self._cast(state.params), batch)
            return {"loss": loss.astype(jnp.float32), **aux}

        return self._jit(evaluate, self._whole)

    def _jit(self, fn: Callable, out_shardings: Any) -> Callable:
        jitted = jax.jit(self._traced(fn), out_shardings=out_shardings)

        def call(state: TrainState, batch: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return jitted(state, batch)

        return call

    def _traced(self, fn: Callable) -> Callable:
        @functools.wraps(fn)
        def traced(state: TrainState, batch: Any) -> Any:
            with _model_scope(self.layout, self.mesh):
                return fn(state, batch)

        return traced

    def _cast(self, params: Params) -> Params:
        if self.compute_dtype is None:
            return params
        return {
            path: x.astype(self.compute_dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for path, x in params.items()
        }

    def _shard(self, tree: Params, specs: dict[str, PartitionSpec]) -> Params:
        return {
            path: jax.lax.with_sharding_constraint(
                x, NamedSharding(self.mesh, specs[path])
            )
            for path, x in tree.items()
        }

    def _loss_and_gradients(
        self, state: TrainState, batch: Any
    ) -> tuple[Metrics, Params]:
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        specs = {path: p.partition_spec for path, p in self.plan.gradients.items()}

        def loss_fn(params: Params, batch: Any, key: jax.Array):
            loss, aux = self.model.loss(self._cast(params), batch, key)
            return loss.astype(jnp.float32), aux

        def one(batch: Any, key: jax.Array) -> tuple[Metrics, Params]:
            with_aux = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, aux), grads = with_aux(state.params, batch, key)
            return {"loss": loss, **aux}, self._shard(grads, specs)

        if self.layout.microbatches == 1:
            return one(batch, key)
        return self._accumulate(one, batch, key, state.params, specs)

    def _accumulate(
        self,
        one: Callable[[Any, jax.Array], tuple[Metrics, Params]],
        batch: Any,
        key: jax.Array,
        params: Params,
        specs: dict[str, PartitionSpec],
    ) -> tuple[Metrics, Params]:
        """Means over microbatches, each weighted by its aux["weight"] (1 without)."""
        num = self.layout.microbatches
        batches = jax.tree.map(
            lambda x, target: jax.lax.with_sharding_constraint(
                x,
                NamedSharding(self.mesh, PartitionSpec(None, *target.sharding.spec)),
            ),
            microbatch.split(batch, num),
            self.abstract_batch,
        )
        first = jax.tree.map(lambda x: x[0], batches)
        metrics, _ = jax.eval_shape(one, first, key)
        weighted = "weight" in metrics

        def body(sums: Any, m_batch: tuple[jax.Array, Any]) -> tuple[Any, None]:
            m, batch = m_batch
            metrics, grads = one(batch, jax.random.fold_in(key, m))
            weight = jnp.float32(metrics.pop("weight", 1.0))
            new = weight, *jax.tree.map(lambda x: weight * x, (metrics, grads))
            total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new)
            return (*total[:2], self._shard(total[2], specs)), None

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32),
            ({k: v for k, v in metrics.items() if k != "weight"}, params),
        )
        sums = jnp.zeros((), jnp.float32), zeros[0], self._shard(zeros[1], specs)
        sums, _ = jax.lax.scan(body, sums, (jnp.arange(num), batches))
        weight, metrics, grads = sums[0], *jax.tree.map(lambda x: x / sums[0], sums[1:])
        grads = {path: g.astype(params[path].dtype) for path, g in grads.items()}
        return metrics | ({"weight": weight} if weighted else {}), grads

    def _train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        metrics, grads = self._loss_and_gradients(state, batch)
        grads = self._shard(grads, self.plan.update_specs)
        grad_norm = optax.tree.norm(grads)
        if self.clip_norm is not None:
            scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(grad_norm, 1e-30))
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        params = self._shard(state.params, self.plan.update_specs)
        updates, optimizer_state = self.optimizer.update(
            grads, state.optimizer_state, params
        )
        params = optax.apply_updates(params, updates)
        new = TrainState(state.step + 1, state.seed, params, optimizer_state)
        return new, metrics | {"grad_norm": grad_norm}


@contextlib.contextmanager
def _model_scope(layout: Layout, mesh: Mesh) -> Iterator[layouts.Scope]:
    """Runs a model under a layout: our `constrain`, and Flax's own logical rules."""
    rules = tuple(layout.activation_rules.items())
    with layouts.use(layout, mesh) as scope, nn.logical_axis_rules(rules):
        yield scope


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
    with jax.set_mesh(mesh), _model_scope(layout, mesh) as scope:
        jax.eval_shape(lambda *a: model.loss(*a), params, batch, jax.random.key(0))
    for name, _ in layout.activations:
        if name not in scope.names_used:
            known = nearest(name, (n for n in scope.names_used if n))
            raise LayoutError(
                f"rule activations.{name} matches no dim that the model constrains "
                f"({known})"
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

    Raises:
      LayoutError: a layout that the devices, the model or the batch cannot honour.
    """
    layout = layouts.parse(layout) if isinstance(layout, str) else layout
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm}: use a number above 0, or None")
    mesh = make_mesh(layout, devices)
    abstract_batch = _abstract_batch(batch, layout, mesh)
    params = {
        p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in model.params.items()
    }
    optimizer_state = jax.eval_shape(optimizer.init, params)
    plan = make_plan(layout, model.params, optimizer_state)
    _check_trace(model, layout, mesh, abstract_batch)

    def with_sharding(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    abstract_state = TrainState(
        with_sharding(scalar, PartitionSpec()),
        with_sharding(scalar.update(dtype=jnp.uint32), PartitionSpec()),
        {
            path: with_sharding(leaf, plan.parameters[path].partition_spec)
            for path, leaf in params.items()
        },
        jax.tree.map(with_sharding, optimizer_state, plan.optimizer_specs),
    )
    return TrainProgram(
        model=model,
        optimizer=optimizer,
        layout=layout,
        mesh=mesh,
        plan=plan,
        abstract_state=abstract_state,
        abstract_batch=abstract_batch,
        clip_norm=clip_norm,
        compute_dtype=compute_dtype,
    )
