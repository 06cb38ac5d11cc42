"""The judge: a plain training loop of the user's own module on one device.

It is the program that a user would write without meshpar: the module as it is given,
`jax.value_and_grad`, an optax update of the module's own tree, `optax.apply_updates`.
It shares nothing with the lowerings: no layer is stacked or cut out, no batch is split,
and nothing is sharded. Programs under layouts are compared with it.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from meshpar.arrays import Array
from meshpar.jaxprs.straight_line import used_inputs
from meshpar.layouts.param import Param, follows_load
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.nesting import NestedState, Nesting
from meshpar.lowering.train_program import TrainProgram
from meshpar.metrics import WEIGHT, Last, LossResult, Mean, loss_result, weight_name
from meshpar.models.model import STEP, PlainModel, Variables
from meshpar.ops.experts.statistics import DEVICE_LOAD
from meshpar.replicated import num_rows

_ROUNDING = 2.0**-22
"""Relative change of weights that is taken for rounding, in float32."""


class LoopStep(NamedTuple):
    """Numbers of one step of the plain loop.

    Attributes:
      evaluation: {name: metric} of the batch in evaluation mode, before the step.
      metrics: {name: metric} of training, with "loss" and "grad_norm".
      gradients: {path: gradient}, before clipping.
      variables: {path: array} after the step.
      optimizer_state: after the step, of the module's own nested dicts.
    """

    evaluation: dict[str, Array]
    metrics: dict[str, Array]
    gradients: Variables
    variables: Variables
    optimizer_state: Any


@dataclasses.dataclass(frozen=True, eq=False)
class PlainLoop:
    """A training loop on one device.

    Attributes:
      model: the module and its loss functions.
      params: {path in the module: Param}.
      keys: {path: keys of the parameter in the module's nested dicts}.
      optimizer: an optax transformation whose update takes value and grad.
      clip_norm: largest global gradient norm, or None.
      compute_dtype: dtype of the parameters inside the loss; None for their own.
    """

    model: PlainModel
    params: Mapping[str, Param]
    keys: Mapping[str, tuple]
    optimizer: optax.GradientTransformationExtraArgs
    clip_norm: float | None = None
    compute_dtype: Any = None

    @classmethod
    def of(cls, program: TrainProgram) -> "PlainLoop":
        """The plain loop that trains a program's model."""
        model, lowering = program.model, program.lowering
        params = LayerRows(model.rows).unstacked(model.params, lambda param, _: param)
        return cls(
            model.plain,
            params,
            {path: model.keys_of(path) for path in params},
            lowering.optimizer.transformation,
            lowering.clip_norm,
            lowering.compute_dtype,
        )

    def run(
        self, variables: Variables, batches: Iterable[Any], moved: bool = False
    ) -> Iterator[LoopStep]:
        """Trains, and yields the numbers of every step.

        Args:
          variables: to start with, as `init` makes them.
          batches: host batches, one per step.
          moved: whether the weights start moved by the rounding of float32.
        """
        if moved:
            variables = jax.tree.map(moved_by_rounding, variables)
        state = self.optimizer.init(self.nested(self.trained(variables)))
        for batch in batches:
            step = self._step(variables, state, batch)
            yield jax.device_get(step)
            variables, state = step.variables, step.optimizer_state

    def init(self, seed: int) -> Variables:
        """The variables of a fresh module."""
        variables = self.model.init(jax.random.key(seed))
        return {**variables, STEP: jnp.int32(0)} if STEP in self.params else variables

    def trained(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of parameters that are trained."""
        return {p: x for p, x in variables.items() if self.params[p].trained}

    def nested(self, params: Mapping[str, Any]) -> dict:
        """The module's nested dicts; {path: array} for masks that only fit those."""
        if not self._takes_nested:
            return dict(params)
        return traverse_util.unflatten_dict({self.keys[p]: params[p] for p in params})

    def flat(self, tree: dict) -> dict[str, Any]:
        """{path: array} of the result of `nested`."""
        if not self._takes_nested:
            return tree
        flat = traverse_util.flatten_dict(tree)
        return {p: flat[self.keys[p]] for p in self.trained(self.params)}

    @functools.cached_property
    def _takes_nested(self) -> bool:
        params = self.trained(self.params)
        shapes = {
            self.keys[p]: jax.ShapeDtypeStruct(x.shape, x.dtype)
            for p, x in params.items()
        }
        try:
            jax.eval_shape(self.optimizer.init, traverse_util.unflatten_dict(shapes))
        except Exception:  # A mask or labels given as {path: value} fit that alone.
            return False
        return True

    def stored(self, state: Any, rows: LayerRows) -> Any:
        """The optimizer's state in the form in which programs store it, to compare."""
        params = self.trained(self.params)
        keys = {p: self.keys[p] if self._takes_nested else (p,) for p in params}
        return NestedState.of(state, Nesting(keys), rows).store(state)

    def _cast(self, path: str, x: Array) -> Array:
        """A variable in the dtype in which the loss computes with it."""
        param = self.params[path]
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if self.compute_dtype is None or not floating:
            return x
        keeps = param.is_state or follows_load(param.names)
        return x if keeps else x.astype(self.compute_dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def _step(self, variables: Variables, state: Any, batch: Any) -> LoopStep:
        """One step."""

        def loss(
            trained: Variables, key: Array | None
        ) -> tuple[Array, tuple[LossResult, Variables]]:
            mine = {p: self._cast(p, x) for p, x in {**variables, **trained}.items()}
            result, new = self.model.loss(mine, batch, key)
            result = loss_result(result)
            return result.loss, (result, new)

        trained = self.trained(variables)
        evaluation = {WEIGHT: jnp.float32(num_rows(batch))}
        evaluation |= metrics_of(loss(trained, None)[1][0])
        key = jax.random.key(0)  # Nothing may depend on it: see `reason_no_judge`.
        run = jax.value_and_grad(loss, has_aux=True)
        (value, (result, new)), grads = run(trained, key)
        slopes = {p: g for p, g in grads.items() if not _is_load(self.params[p])}
        norm = optax.tree.norm(slopes)
        used = grads
        if self.clip_norm is not None:
            scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-30))
            used = jax.tree.map(lambda g: g * scale, grads)
        nested = self.nested(used)
        updates, state = self.optimizer.update(
            nested, state, self.nested(trained), value=value, grad=nested
        )
        after = {p: new[p].astype(x.dtype) for p, x in variables.items()}
        after |= optax.apply_updates(trained, self.flat(updates))
        if STEP in after:
            after[STEP] = variables[STEP] + 1
        metrics = {**metrics_of(result), "grad_norm": norm}
        return LoopStep(evaluation, metrics, grads, after, state)


def metrics_of(result: LossResult) -> dict[str, Array]:
    """{name: scalar} of a loss and its metrics, under the names that steps report.

    A `metrics.Last` is left out: the last part of a batch has another value than all.
    """
    found = {"loss": result.loss}
    if result.weight is not None:
        found["weight"] = result.weight
    for name, x in result.metrics.items():
        if isinstance(x, Mean):
            whole = jnp.where(x.weight == 0, 1, x.weight)
            found[name] = jnp.where(x.weight == 0, 0, x.total / whole)
            found[weight_name(name)] = x.weight
        elif not isinstance(x, Last) and name != DEVICE_LOAD:
            found[name] = x[0] if isinstance(x, tuple) else x
    return found


def _is_load(param: Param) -> bool:
    return follows_load(param.names)


def moved_by_rounding(x: Any) -> Any:
    """Weights moved by one rounding of float32; integers and keys as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    signs = np.random.default_rng(x.size).choice((-1.0, 1.0), x.shape)
    return (x * (1 + _ROUNDING * signs)).astype(x.dtype)


def reason_no_judge(program: TrainProgram) -> str:
    """A reason why no plain loop can judge a program; "" if one can."""
    model = program.model
    if model.plain is None:
        return "the model is not given as a module and its loss alone"
    loop = PlainLoop.of(program)
    variables = jax.eval_shape(lambda: loop.init(0))
    key = {"key": jax.eval_shape(lambda: jax.random.key(0))}

    def loss(keys: dict[str, Array], variables: Variables, batch: Any) -> Any:
        result, new = loop.model.loss(variables, batch, keys["key"])
        return loss_result(result), new

    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.abstract_batch
    )
    if used_inputs(loss, key, variables, batch):
        return "the model draws random numbers, which a plain loop draws otherwise"
    return ""
