"""`TrainProgram`: the compiled training step, its contract and portable states."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array, Params, abstract
from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import Contract
from meshpar.contracts.host_transfers import host_violations
from meshpar.errors import MeshparError
from meshpar.lowering.base import Lowering
from meshpar.lowering.ema import ema_weights
from meshpar.lowering.given_optimizer import (
    OwnOptimizerState,
    check_one_optimizer,
    steps_done,
)
from meshpar.lowering.given_params import (
    flat_params,
    place,
    place_params,
    stacked_params,
    updated,
)
from meshpar.lowering.in_trace import is_traced, not_in_trace, step_in_trace
from meshpar.lowering.inspection import Inspection, bytes_per_device, inspect_step
from meshpar.lowering.portable import PortableState, StoredOrder
from meshpar.lowering.program import Program
from meshpar.lowering.state import Metrics, TrainState, check_alive
from meshpar.models.model import STEP
from meshpar.models.model_scope import model_scope


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainProgram(Program):
    """A model and an optimizer under a layout: one compiled SPMD training program.

    Attributes:
      abstract_state: the training state as ShapeDtypeStructs with shardings.
      inspection: the training step, lowered, compiled and read back.
      why_auto: the choice of lowering=auto or schedule=auto, and its reason.
    """

    abstract_state: TrainState
    inspection: Inspection
    why_auto: str = ""

    def init(self, seed: int = 0, params: Any = None) -> TrainState:
        """Makes a fresh state: the same numbers whatever the layout.

        Args:
          seed: seed of the run, and of the parameters unless they are given.
          params: parameters to start from: nested or flat, with the module's own paths
            or with those of the model; by default those of the module that the model
            was made of, if it was given as an instance. Every parameter; variables that
            are none, such as running statistics, may be left out. Each array goes
            straight to its shards.

        Raises:
          MeshparError: a given parameter is missing, unknown or of another shape.
        """
        params = self.model.given if params is None else params
        given = {} if params is None else self._placed_params(params)
        with self._on_mesh(given):
            return self.init_function(np.uint32(seed), given)

    def _placed_params(self, params: Any) -> Params:
        like, order = self.abstract_params, self.layer_order
        like = order.abstract_in_model_order(like) if order else like
        return place_params(stacked_params(self.model, like, params), like)

    def _init_params_from(self, seed: Array, given: Params) -> Params:
        """Fresh parameters with the given ones in their places, as stored."""
        order = self.layer_order
        given = order.as_stored(given) if order else given
        if given.keys() >= self.model.params.keys():
            return given
        return self.model.init(jax.random.key(seed)) | given

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Runs one training step; `state` is donated.

        Inside a `jax.jit` or `jax.lax.scan` of your own it is a part of that program,
        which compiles anew, and you donate the state.

        Args:
          state: the state; do not use it afterwards.
          batch: device arrays from `place_batch`, or this process's rows of it.

        Returns:
          The next state, and metrics of the batch: loss, grad_norm (before clipping)
          and those of the model's aux, each by its kind. The weight of a mean is
          reported as "NAME/weight", that of the loss as "weight".

        Raises:
          MeshparError: the state was given to a step before; or inside a trace, state
            or batch are not as the program has them, or its steps are no part of
            another program.
        """
        check_alive(state)
        batch = self._placed(batch)
        if is_traced((state, batch)):
            self._check_in_trace()
            traced = self.inspection.traced
            wanted = self.abstract_state, self.abstract_batch
            return step_in_trace(traced, self.mesh, wanted, state, batch)
        return self.compiled(state, batch)

    def _check_in_trace(self) -> None:
        """Refuses modes as well, which run other programs from step to step."""
        if self.mode_text:
            why = f"{self.mode_text}: the host chooses what each step runs"
            raise MeshparError(not_in_trace(why))
        super()._check_in_trace()

    def gradients(self, state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        """Metrics and gradients {path: array}, before clipping.

        Layers stand in the order of the model.
        """
        check_alive(state)
        return self._gradients(state, self._placed(batch))

    def evaluate(
        self, state: TrainState, batch: Any, rows: int | None = None
    ) -> Metrics:
        """Loss and aux of the model in evaluation mode, of any number of rows.

        Args:
          state: the state.
          batch: as in `evaluate_params`.
          rows: as in `evaluate_params`.
        """
        return self.evaluate_params(state.params, batch, rows)

    def weights(self, state: TrainState) -> Params:
        """The weights that `evaluate` uses, {path in the module: array}.

        Layers have paths of their own, such as "layers/0/up/kernel", in the order of
        the module, whatever the layout.
        """
        check_alive(state.params)
        params, order = self.evaluated_params(state), self.layer_order
        params = order.in_model_order(params) if order else params
        return self.model_rows.unstacked(params)

    def update(self, module: Any, state: TrainState, optimizer: Any = None) -> Any:
        """Puts the weights that `evaluate` uses into the user's own model.

        Args:
          module: an NNX module, which is changed in place, or the variables of a Linen
            module, nested, with or without the collection "params".
          state: of this program.
          optimizer: the optimizer of the user's loop, which gets its state too: an
            `nnx.Optimizer`, which is changed in place, or an optax state.

        Returns:
          The module, or new variables of the same structure; with an optimizer
          (module, optimizer or new optax state), which `take` takes.

        Raises:
          MeshparError: it has other variables than the model, or the optimizer is
            another one.
        """
        check_one_optimizer(optimizer, self.mode_text)
        check_alive(state)
        weights = jax.device_get(self.weights(state))
        module = updated(module, {p: x for p, x in weights.items() if p != STEP})
        if optimizer is None:
            return module
        own = jax.device_get(self.in_model_order(state).optimizer_state)
        step = int(state.step)
        return module, self._own_optimizer_state.put(optimizer, own, step)

    def take(
        self,
        module: Any,
        optimizer: Any = None,
        *,
        seed: int = 0,
        step: int | None = None,
    ) -> TrainState:
        """Makes a state of the user's own model and optimizer: inverse of `update`.

        Training goes on where a loop of the user's own stands. What is given stays as
        it is.

        Args:
          module: an NNX module or its state, or the variables of a Linen module.
            Variables that are no parameters may be left out.
          optimizer: the optimizer of the loop, of the transformation that `lower` got:
            an `nnx.Optimizer`, or an optax state of the module's parameters; by default
            a fresh state.
          seed: seed of the run, on which random numbers such as those of dropout
            depend.
          step: steps done, on which they depend too; by default those that an
            `nnx.Optimizer` counts, else 0.

        Raises:
          MeshparError: a parameter or a part of the optimizer state is missing, unknown
            or of another shape.
        """
        check_one_optimizer(optimizer, self.mode_text)
        check_alive((flat_params(module), optimizer))
        step = np.int32(steps_done(optimizer) if step is None else step)
        state, like = self.in_model_order(self.init(seed, module)), self.portable_state
        if optimizer is not None:
            state = state._replace(optimizer_state=None)  # Memory for the given one.
            own = self._own_optimizer_state.stacked(optimizer)
            own = jax.tree.map(place, own, like.optimizer_state)
            state = state._replace(optimizer_state=own)
        params = state.params
        if STEP in params:
            count = like.params[STEP]
            params = {**params, STEP: place(np.full(count.shape, step), count)}
        state = state._replace(step=place(step, like.step), params=params)
        return self.as_stored(state)

    @functools.cached_property
    def _own_optimizer_state(self) -> OwnOptimizerState:
        """The optimizer state as a loop of the module's own tensors has it."""
        trained = abstract(self.plan.trained(self.portable_state.params))
        optimizer, rows = self.lowering.optimizer, self.model_rows
        return OwnOptimizerState.of(optimizer, self.model, trained, rows)

    def evaluated_params(self, state: TrainState) -> Params:
        """The weights that `evaluate` uses, as `evaluate_params` takes them."""
        return state.params

    def ema_weights(self, state: TrainState) -> Params:
        """The average that `meshpar.with_ema` keeps, for `evaluate_params`.

        Raises:
          MeshparError: the optimizer keeps none.
        """
        return state.params | ema_weights(state)

    @functools.cached_property
    def _metric_kinds(self) -> dict[str, type]:
        """The kinds of the metrics of steps and evaluations.

        Raises:
          MeshparError: a name has two kinds.
        """
        key = jax.eval_shape(lambda: jax.random.key(0))
        training = self._kinds_of(self.model.loss, key)
        evaluation = super()._metric_kinds
        for name, kind in training.items():
            if evaluation.get(name, kind) is not kind:
                raise MeshparError(
                    f"aux[{name!r}] is a meshpar.{kind.__name__} in training and a "
                    f"meshpar.{evaluation[name].__name__} in evaluation; give it one "
                    "kind, or two names"
                )
        return evaluation | training

    def close(self) -> None:
        """Ends threads and processes of a mode; the program is not used any more."""

    @property
    def lowered(self) -> jax.stages.Lowered:
        """The training step as StableHLO, before it is compiled."""
        return self.inspection.lowered

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled training step.

        Raises:
          MeshparError: it could deadlock.
        """
        return self.inspection.compiled

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of the compiled training step."""
        return self.inspection.collectives

    @property
    def fingerprint(self) -> str:
        """Hash of the lowered step: equal on all processes that may run together."""
        return self.inspection.fingerprint

    @functools.cached_property
    def contract(self) -> Contract:
        """The collectives that one step writes, what compilers add, and its state."""
        written = self.inspection.written_terms
        state = self.lowering.plan.bytes_per_device()
        return Contract(
            (*written, *self.lowering.bounds(self.step_batch, written)),
            {kind: state[kind] for kind in ("parameters", "optimizer")},
            tuple(self.lowering.host_transfers(self.step_batch)),
        )

    def state_bytes(self, compiled: jax.stages.Compiled) -> dict[str, int]:
        """Bytes of weights and optimizer that a compiled step hands on, per device."""
        state, shardings = self.abstract_state, compiled.output_shardings[0]
        return {
            "parameters": bytes_per_device(state.params, shardings.params),
            "optimizer": bytes_per_device(
                state.optimizer_state, shardings.optimizer_state
            ),
        }

    @property
    def step_batch(self) -> Any:
        """The abstract batch that `lowering` sees in one step."""
        return self.abstract_batch

    def violations(self) -> list[str]:
        """Where the compiled training step breaks its contract, or its formula."""
        return [
            *self.contract.violations(self.collectives),
            *self.lowering.formula_violations(self.inspection.written),
            *self.contract.state_violations(self.state_bytes(self.compiled)),
            *host_violations(self.contract.host, self.inspection.host_transfers),
            *self.inspection.order_violations,
        ]

    @property
    def busiest(self) -> tuple[Contract, list[Collective]]:
        """Declared and found, of the step that moves most."""
        return self.contract, self.collectives

    @property
    def mode_text(self) -> str:
        """How replicas are synchronized; "" in synchronous training."""
        return ""

    @property
    def reason_not_equal(self) -> str:
        """Why training does not equal one device on purpose; "" if it does."""
        return self.lowering.reason_not_equal

    @functools.cached_property
    def _portable(self) -> PortableState:
        return PortableState(self.abstract_state, self.layer_order)

    @property
    def portable_state(self) -> TrainState:
        """The result of `in_model_order`, as ShapeDtypeStructs with shardings."""
        return self._portable.abstract_portable

    def in_model_order(self, state: TrainState) -> TrainState:
        """The state with layers in the order of the model, the same in all layouts."""
        check_alive(state)
        return self._portable.in_model_order(state)

    def as_stored(self, state: TrainState, extra: Any = None) -> TrainState:
        """The inverse of `in_model_order`, with the result of `extra_state`, if any."""
        del extra
        return self._portable.as_stored(state)

    def extra_state(self, state: TrainState) -> Any:
        """The part of a state that only this layout and mode can use; None without."""
        del state

    def extra_numbers(self, extra: Any) -> Any:
        """The result of `extra_state` as a tree of arrays of numbers."""
        return extra

    @property
    def abstract_extra(self) -> Any:
        """The result of `extra_state`, as ShapeDtypeStructs with shardings."""
        return None

    @property
    def extra_identity(self) -> str:
        """The mode to which `extra_state` belongs."""
        return ""

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """The shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @functools.cached_property
    def init_function(self) -> Callable[[Any, Params], TrainState]:
        optimizer = self.lowering.optimizer

        def init(seed: Array, given: Params) -> TrainState:
            params = self._init_params_from(seed, given)
            step = jnp.zeros((), jnp.int32)
            optimizer_state = optimizer.init(self.plan.trained(params))
            return TrainState(step, seed, params, optimizer_state)

        return jax.jit(
            init,
            out_shardings=self.state_shardings,
            compiler_options=self._init_options,
        )

    @functools.cached_property
    def _gradients(self) -> Callable:
        order = self.layer_order
        like = self.plan.trained(self.portable_state.params)
        shardings = {path: leaf.sharding for path, leaf in like.items()}

        def gradients(state: TrainState, batch: Any) -> tuple[Metrics, Params]:
            totals, grads, _ = self.lowering.gradients(state, batch)
            grads = order.in_model_order(grads) if order else grads
            return totals.reported(), grads

        return self._jit(gradients, (self._whole, shardings))


def make_train_program(
    lowering: Lowering,
    abstract_state: TrainState,
    abstract_batch: Any,
    layer_order: StoredOrder | None = None,
    why_auto: str = "",
) -> TrainProgram:
    """Makes the training program of a lowering; nothing is compiled yet.

    Args:
      lowering: the pure functions of one step.
      abstract_state: ShapeDtypeStructs with shardings.
      abstract_batch: the global batch, with shardings.
      layer_order: how the layers are stored.
      why_auto: the choice of schedule=auto, and its reason.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        with model_scope(lowering.layout, lowering.mesh):
            state, totals = lowering.train_step(state, batch)
            return state, totals.reported()

    return TrainProgram(
        lowering,
        abstract_batch,
        layer_order,
        abstract_state=abstract_state,
        inspection=inspect_step(lowering, step, abstract_state, abstract_batch),
        why_auto=why_auto,
    )
