"""A model lowered under a layout: one compiled SPMD training program."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Params
from meshpar.contracts.collective import Collective
from meshpar.contracts.compiler_log import captured_log
from meshpar.contracts.contract import Contract
from meshpar.contracts.hlo import parse_hlo
from meshpar.explain.traffic import declare_collectives
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan
from meshpar.lowering.base import Lowering, model_scope
from meshpar.lowering.state import Metrics, TrainState
from meshpar.mesh.platform import platform_of
from meshpar.mesh.torus import compiler_options
from meshpar.models.model import Model
from meshpar.pipeline.layer_order import LayerOrder


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """A model lowered under a layout; made by `lower`.

    Attributes:
      lowering: the pure functions of the step.
      abstract_state: the training state as ShapeDtypeStructs with shardings.
      abstract_batch: the batch, likewise.
      why_auto: what lowering="auto" or schedule=auto took, and why.
      layer_order: how a pipeline stores the layers, where not in the model's order.
    """

    lowering: Lowering
    abstract_state: TrainState
    abstract_batch: Any
    why_auto: str = ""
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

    def weights(self, state: TrainState) -> Params:
        """The weights that `evaluate` uses, {path: array}."""
        return state.params

    def in_model_order(self, state: TrainState) -> TrainState:
        """The state with layers in the order of the model, the same in all layouts.

        A pipeline may store them in another order; otherwise it is the state itself.
        """
        if self.layer_order is None:
            return state
        return self._reorder(self.layer_order.in_model_order, self.portable_state)(
            state
        )

    def extra_state(self, state: TrainState) -> Any:
        """What only this layout and mode can use of a state; None without any."""
        del state

    @property
    def abstract_extra(self) -> Any:
        """The same as ShapeDtypeStructs with shardings."""
        return None

    @property
    def extra_identity(self) -> str:
        """Which mode `extra_state` belongs to."""
        return ""

    def as_stored(self, state: TrainState, extra: Any = None) -> TrainState:
        """The inverse of `in_model_order`, with what `extra_state` gave, if it did."""
        del extra
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
                out_shardings=(self.state_shardings, self._whole),
                compiler_options=compiler_options(self.mesh),
            ).lower(self.abstract_state, self.abstract_batch)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled training step.

        Raises:
          MeshparError: it could deadlock.
        """
        made = self.lowered.compile()
        self.lowering.check_compiled(self.collectives_of(made))
        return made

    @functools.cached_property
    def compiler_log(self) -> list[str]:
        """What the compiler says of the step; it is compiled now if it is not yet."""
        with captured_log() as log:
            _ = self.compiled
        return log

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of the compiled training step."""
        return self.collectives_of(self.compiled)

    def collectives_of(self, made: jax.stages.Compiled) -> list[Collective]:
        """The collectives of a program compiled for this mesh."""
        return parse_hlo(made.as_text(), dict(self.mesh.shape))

    @functools.cached_property
    def contract(self) -> Contract:
        """The collectives that this layout and lowering declare for one step."""
        with jax.set_mesh(self.mesh):
            traced = self._traced(self.lowering.gradients)
            shapes = jax.eval_shape(traced, self.abstract_state, self.abstract_batch)
        metrics = set(shapes[0]) | {"weight"}
        declared = declare_collectives(self.lowering, self.step_batch, len(metrics))
        state = self.lowering.plan.bytes_per_device()
        kinds = {kind: state[kind] for kind in ("parameters", "optimizer")}
        return dataclasses.replace(declared, state_bytes=kinds)

    def state_bytes(self, made: jax.stages.Compiled) -> dict[str, int]:
        """What a compiled step hands on of weights and optimizer, per device."""

        def held(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> int:
            return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

        held_by_leaf = jax.tree.map(held, self.abstract_state, made.output_shardings[0])
        return {
            "parameters": sum(jax.tree.leaves(held_by_leaf.params)),
            "optimizer": sum(jax.tree.leaves(held_by_leaf.optimizer_state)),
        }

    @property
    def step_batch(self) -> Any:
        """The abstract batch that `lowering` sees in one step."""
        return self.abstract_batch

    def violations(self) -> list[str]:
        """What the compiled training step does against its contract."""
        return [
            *self.contract.violations(self.collectives),
            *self.contract.state_violations(self.state_bytes(self.compiled)),
        ]

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
    def state_shardings(self) -> TrainState:
        """The shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @functools.cached_property
    def _init(self) -> Callable[[Any], TrainState]:
        optimizer, model = self.lowering.optimizer, self.model

        def init(seed: jax.Array) -> TrainState:
            params = model.init(jax.random.key(seed))
            step = jnp.zeros((), jnp.int32)
            return TrainState(step, seed, params, optimizer.init(params))

        # Runs once: on CPUs optimized code for it takes longer to make than it saves.
        unoptimized = {"xla_backend_optimization_level": 0}
        options = unoptimized if platform_of(self.mesh).compiles_slowly else None
        return jax.jit(
            init, out_shardings=self.state_shardings, compiler_options=options
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
        safe: list[Callable] = [] if self.lowering.may_deadlock else [jitted]

        def call(state: TrainState, batch: Any) -> Any:
            with jax.set_mesh(self.mesh):
                if not safe:
                    made = jitted.lower(state, batch).compile()
                    self.lowering.check_compiled(self.collectives_of(made))
                    safe.append(made)
                return safe[0](state, batch)

        return call

    def _traced(self, fn: Callable) -> Callable:
        def traced(state: TrainState, batch: Any) -> Any:
            with model_scope(self.layout, self.mesh):
                return fn(state, batch)

        return traced
