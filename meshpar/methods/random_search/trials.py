"""Trials of hyperparameters: many small trainings in one program, on an axis of trials.

Each device of the mesh axis `trial` trains an equal share of the trials, which are
vectorized. Trials share the batches and nothing else: the compiled program has no
collective, and every trial equals a run of its own.

Source: Bergstra, Bengio, Random Search for Hyper-Parameter Optimization, JMLR 2012.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.contracts import hlo
from meshpar.contracts.collective import Collective
from meshpar.errors import MeshparError
from meshpar.lowering.optimizer import Optimizer, optimizer_of
from meshpar.lowering.state import TrainState
from meshpar.models.model import Model

TRIAL = "trial"
"""The mesh axis of trials; no layout has it, as nothing moves along it."""

Values = dict[str, Any]
"""{name of a hyperparameter: its value, or [trials] values}."""


def grid(**values: Sequence[float]) -> Values:
    """Every combination of the values of each hyperparameter, {name: [trials]}."""
    columns = np.meshgrid(*values.values(), indexing="ij")
    return {name: x.ravel() for name, x in zip(values, columns, strict=True)}


def random(trials: int, seed: int = 0, **ranges: tuple[float, float]) -> Values:
    """Values drawn evenly on a log scale, {name: [trials]}.

    Args:
      trials: number of trials.
      seed: of the draws.
      **ranges: name=(smallest, largest), both positive.

    Raises:
      MeshparError: a range that is empty or not positive.
    """
    rng, values = np.random.default_rng(seed), {}
    for name, (low, high) in ranges.items():
        if not 0 < low <= high:
            raise MeshparError(f"{name}=({low}, {high}): use 0 < smallest <= largest")
        values[name] = np.exp(rng.uniform(np.log(low), np.log(high), trials))
    return values


def count(values: Mapping[str, Sequence[Any]]) -> int:
    """The number of trials that values are of.

    Args:
      values: {name: [trials]}.

    Raises:
      MeshparError: no values, or another number of values of each hyperparameter.
    """
    lengths = {name: len(x) for name, x in values.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise MeshparError(
            f"values of {lengths} trials: give as many values of each hyperparameter, "
            "one per trial"
        )
    return next(iter(lengths.values()))


@dataclasses.dataclass(frozen=True, eq=False)
class Trials:
    """One program that trains a model once per trial.

    Attributes:
      model: of every trial; its variables that are no parameters must not change.
      make_optimizer: values of one trial, scalars by name -> an optax transformation
        of {path: array}.
      values: {name: [trials]}, such as those of `grid` or `random`.
      batch: pytree of arrays or ShapeDtypeStructs, the batch of all trials.
      devices: over which trials are spread; all by default.

    Raises:
      MeshparError: values of unequal lengths, or trials that the devices do not divide.
    """

    model: Model
    make_optimizer: Callable[[Values], optax.GradientTransformation]
    values: Mapping[str, Any]
    batch: Any
    devices: Sequence[jax.Device] | None = None

    def __post_init__(self):
        if self.num_trials % self.mesh.size:
            raise MeshparError(
                f"{self.num_trials} trials on {self.mesh.size} devices: use a multiple "
                "of the devices, or fewer devices"
            )

    @property
    def num_trials(self) -> int:
        """The number of trials."""
        return count(self.values)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices along the axis of trials."""
        devices = jax.devices() if self.devices is None else self.devices
        kinds = (jax.sharding.AxisType.Auto,)
        return Mesh(np.array(devices), (TRIAL,), axis_types=kinds)

    def init(self, seed: int = 0) -> TrainState:
        """The states of all trials, [trials, ...]; all start from the same weights."""

        def one(values: Values) -> TrainState:
            params = self.model.init(jax.random.key(seed))
            start = self._optimizer(values).init(self._trained(params))
            return TrainState(jnp.int32(0), jnp.uint32(seed), params, start)

        sharding = NamedSharding(self.mesh, PartitionSpec(TRIAL))
        init = jax.jit(jax.vmap(one, axis_name=TRIAL), out_shardings=sharding)
        return init(self._values)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Array]:
        """One step of every trial: (states, losses [trials]); `state` is donated."""
        return self.compiled(self._values, state, self._placed(batch))

    def evaluate(self, state: TrainState, batch: Any) -> Array:
        """Losses [trials] of any batch in evaluation mode."""
        return self._evaluate(state.params, self._placed(batch))

    @functools.cached_property
    def _evaluate(self) -> Callable[[Params, Any], Array]:
        own = PartitionSpec(TRIAL)
        losses = jax.vmap(lambda p, b: self.model.evaluation_loss(p, b).loss, (0, None))
        specs = dict(in_specs=(own, PartitionSpec()), out_specs=own)
        return jax.jit(jax.shard_map(losses, mesh=self.mesh, **specs))

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step of all trials."""
        over_trials = jax.vmap(self._one_step, (0, 0, None))
        own, shared = PartitionSpec(TRIAL), PartitionSpec()
        step = jax.shard_map(
            over_trials,
            mesh=self.mesh,
            in_specs=(own, own, shared),
            out_specs=(own, own),
        )
        whole = NamedSharding(self.mesh, shared)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), self.batch
        )
        state = jax.eval_shape(self.init)
        sharding = NamedSharding(self.mesh, own)
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
        )
        jitted = jax.jit(step, donate_argnums=1)
        return jitted.lower(self._values, state, batch).compile()

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of the compiled step."""
        return hlo.parse_hlo(self.compiled.as_text(), dict(self.mesh.shape))

    def violations(self) -> list[str]:
        """The collectives that the compiled step should not have."""
        return [
            f"{c.kind} over {'*'.join(c.axes)}: trials share nothing"
            for c in self.collectives
        ]

    @functools.cached_property
    def _values(self) -> Values:
        sharding = NamedSharding(self.mesh, PartitionSpec(TRIAL))
        values = {k: np.asarray(x, np.float32) for k, x in self.values.items()}
        return jax.device_put(values, sharding)

    def _placed(self, batch: Any) -> Any:
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec()))

    def _trained(self, params: Params) -> Params:
        return {
            path: x for path, x in params.items() if self.model.params[path].trained
        }

    def _optimizer(self, values: Values) -> Optimizer:
        """The optimizer of one trial; it sees the model's own tree."""
        return optimizer_of(self.model, self.make_optimizer(values))

    def _one_step(
        self, values: Values, state: TrainState, batch: Any
    ) -> tuple[TrainState, Array]:
        """One step of one trial, equal to that of a separate run."""
        trained = self._trained(state.params)

        def loss_fn(part: Params) -> Array:
            result = self.model.loss(state.params | part, batch, state.key())
            if result.state:
                raise MeshparError(
                    f"the model changes {', '.join(result.state)} while it trains; "
                    "trials keep no running state"
                )
            return result.loss

        loss, grads = jax.value_and_grad(loss_fn)(trained)
        updates, optimizer_state = self._optimizer(values).update(
            grads, state.optimizer_state, trained, loss
        )
        params = state.params | optax.apply_updates(trained, updates)
        return state.after_step(params, optimizer_state), loss
