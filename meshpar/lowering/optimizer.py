"""`Optimizer`: an optax transformation as functions of {path: array}.

The transformation itself sees the model's nested dicts (`nesting`). An update is traced
once on shapes alone: what training cannot give it is refused, and its `reach` is read.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshpar.arrays import Array, Params, abstract, leaves_by_path
from meshpar.errors import MeshparError
from meshpar.lowering.branchless import without_branches
from meshpar.lowering.nesting import NestedState, Nesting
from meshpar.lowering.reach import Reach, read_reach
from meshpar.models.model import Model


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation as functions of {path: array}.

    Attributes:
      transformation: of nested dicts.
      nesting: of the parameters.
      abstract_state: the state as ShapeDtypeStructs, with {path: leaf} in place of
        nested dicts, as in checkpoints.
      reach: how far its updates reach.
      forms: the nested and the flat form of its state.
    """

    transformation: optax.GradientTransformationExtraArgs
    nesting: Nesting
    abstract_state: Any
    reach: Reach
    forms: NestedState

    def init(self, params: Params) -> Any:
        """The state at the start."""
        return self.forms.flatten(self.transformation.init(self.nesting.nest(params)))

    def update(
        self,
        grads: Params,
        state: Any,
        params: Params,
        loss: Array,
        manual_axes: tuple[str, ...] = (),
    ) -> tuple[Params, Any]:
        """(updates, state) after one step.

        Args:
          grads: {path: gradient}.
          state: the state before.
          params: {path: array}.
          loss: the loss of `grads`.
          manual_axes: manual axes along which any of these may differ, where the types
            of values say so (check_vma).
        """

        def update(grads: Any, state: Any, params: Any, loss: Array) -> tuple[Any, Any]:
            return self.transformation.update(
                grads, state, params, value=loss, grad=grads
            )

        grads, params = map(self.nesting.nest, (grads, params))
        run = update
        if manual_axes and self.reach.branches:
            run = functools.partial(without_branches, update, manual_axes)
        updates, state = run(grads, self.forms.nest(state), params, loss)
        return self.nesting.flatten(updates), self.forms.flatten(state)


def with_extra_args(
    transformation: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """The transformation with an update that takes any extra arguments."""
    if isinstance(transformation, optax.MultiSteps):  # Its own method drops them.
        return optax.GradientTransformationExtraArgs(
            transformation.init, transformation.update
        )
    return optax.with_extra_args_support(transformation)


def make_optimizer(
    transformation: optax.GradientTransformation | optax.MultiSteps,
    params: Mapping[str, jax.ShapeDtypeStruct],
    keys: Mapping[str, tuple[Any, ...]],
) -> Optimizer:
    """Makes the optimizer of a model's parameters; nothing is computed.

    Args:
      transformation: sees nested dicts; or {path: array}, if it only fits those.
      params: the parameters that it trains.
      keys: {path: keys in the nested dicts}, of these parameters at least.

    Raises:
      MeshparError: its update needs arguments that training does not give, or changes
        the shapes or dtypes of its state.
    """
    transformation = with_extra_args(transformation)
    nesting, state = _initial(transformation, params, keys)
    _refuse_lookahead(state)
    reach = _traced_reach(transformation, nesting.nest(params), state, nesting)
    forms = NestedState.of(state, nesting)
    abstract_state = forms.flatten(state)
    return Optimizer(transformation, nesting, abstract_state, reach, forms)


def optimizer_of(
    model: Model, transformation: optax.GradientTransformation | optax.MultiSteps
) -> Optimizer:
    """`make_optimizer` of the parameters of a model that are trained."""
    trained = {path: p for path, p in model.params.items() if p.trained}
    keys = {path: model.keys_of(path) for path in trained}
    return make_optimizer(transformation, abstract(trained), keys)


def _initial(
    transformation: optax.GradientTransformationExtraArgs,
    params: Mapping[str, jax.ShapeDtypeStruct],
    keys: Mapping[str, tuple[Any, ...]],
) -> tuple[Nesting, Any]:
    """The nesting that a transformation fits, and its state at the start."""
    nested = Nesting({path: keys[path] for path in params})
    flat = Nesting({path: (path,) for path in params})
    try:
        return nested, jax.eval_shape(transformation.init, nested.nest(params))
    except Exception as error:
        # A mask or labels given as {path: value} fit the flat dict alone.
        try:
            return flat, jax.eval_shape(transformation.init, flat.nest(params))
        except Exception:
            raise error from None


def _refuse_lookahead(state: Any) -> None:
    """Refuses optax.lookahead, whose parameters are pairs of weights."""

    def is_lookahead(node: Any) -> bool:
        return isinstance(node, optax.LookaheadState)

    if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
        raise MeshparError(
            "optax.lookahead trains pairs of fast and slow weights "
            "(optax.LookaheadParams), and a model has one set of weights: use its fast "
            "optimizer, and meshpar.with_ema for weights that change slowly"
        )


def _traced_reach(
    transformation: optax.GradientTransformationExtraArgs,
    params: Any,
    state: Any,
    nesting: Nesting,
) -> Reach:
    """Traces one update on shapes alone and reads its reach."""

    def update(grads: Any, state: Any, params: Any, loss: Array) -> Any:
        return transformation.update(grads, state, params, value=loss, grad=grads)

    loss = jax.ShapeDtypeStruct((), jnp.float32)
    trace = jax.make_jaxpr(update, return_shape=True)
    try:
        jaxpr, (_, new_state) = trace(params, state, params, loss)
    except TypeError as error:
        if missing := _missing_arguments(error):
            raise missing from error
        raise
    _check_state(state, new_state)
    paths = nesting.nest({path: path for path in nesting.keys})
    num_state = len(jax.tree.leaves(state))
    return read_reach(jaxpr.jaxpr, jax.tree.leaves(paths), num_state)


def _missing_arguments(error: TypeError) -> MeshparError | None:
    """The error of an update that lacks arguments; None if it is another error."""
    _, found, names = str(error).partition(" argument")
    if not found or "missing" not in str(error):
        return None
    missing = re.findall(r"'(\w+)'", names)
    remedy = "use an optimizer that does without"
    if "value_fn" in missing:
        remedy = "use one without a line search, as optax.lbfgs(..., linesearch=None)"
    elif "value" in missing:
        remedy = (
            "a wrapper drops these two; make it a GradientTransformationExtraArgs of "
            "optax (give an optax.MultiSteps itself)"
        )
    return MeshparError(
        f"the optimizer's update needs {', '.join(missing)}, and training gives it "
        f"the loss (value) and the gradients (grad) as extra arguments: {remedy}"
    )


def _check_state(before: Any, after: Any) -> None:
    """Refuses a state that does not keep its structure, shapes and dtypes."""
    old, new = leaves_by_path(before), leaves_by_path(after)
    for path in {**old, **new}:
        kinds = [
            f"{leaf.dtype}{list(leaf.shape)}" if leaf is not None else "missing"
            for leaf in (old.get(path), new.get(path))
        ]
        if kinds[0] != kinds[1]:
            raise MeshparError(
                f"the optimizer's state {path} is {kinds[0]} before an update and "
                f"{kinds[1]} after it; use an optimizer whose state keeps its form"
            )
