"""`Optimizer`: an optax transformation as functions of {path: array}.

The transformation itself sees the model's nested dicts (`nesting`). An update is traced
once on shapes alone: what training cannot give it is refused, and its `reach` is read.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshpar.arrays import Array, Params, abstract, stack_of_row
from meshpar.errors import MeshparError, shown
from meshpar.jaxprs.layer_values import LayerValues, Leaf
from meshpar.jaxprs.reach import Reach, read_reach
from meshpar.lowering.branchless import without_branches
from meshpar.lowering.layer_rows import LayerRows, RowNumbers
from meshpar.lowering.layer_update import (
    MODEL,
    ROWS,
    STACKS,
    UpdateOperations,
    leaves_of,
    results_order,
    treats_alike,
)
from meshpar.lowering.nesting import NestedState, Nesting
from meshpar.lowering.optimizer_problems import (
    check_state,
    missing_arguments,
    refuse_lookahead,
)
from meshpar.models.model import Model

_ZERO_STEPS = 4
"""Updates of zeros after which an optimizer is trusted to leave them."""

_EXTRA = (("value", "grad"), ("value",), ("grad",), ())
"""Extra arguments with which an update is tried, in turn."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation as functions of {path: array}, layers stacked.

    Attributes:
      transformation: of nested dicts.
      nesting: of the parameters that it sees: the model's own, or stacks where its
        update is proved to be the same for these.
      rows: which of these parameters are stacked for it.
      layers: how the layers are updated: `STACKS`, `ROWS` or `MODEL`.
      abstract_state: the state as ShapeDtypeStructs, with {path: leaf} in place of
        nested dicts, as in checkpoints.
      reach: how far its updates reach.
      forms: the form of its state as it makes it, and as stored.
      traced: jaxpr of one update of the parameters that it sees.
    """

    transformation: optax.GradientTransformationExtraArgs
    nesting: Nesting
    rows: LayerRows
    layers: str
    abstract_state: Any
    reach: Reach
    forms: NestedState
    traced: Any

    def init(self, params: Params) -> Any:
        """The state at the start."""
        nested = self.nesting.nest(self.rows.unstacked(params))
        return self.forms.store(self.transformation.init(nested))

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
        run = self._layers_at_once if self.layers == ROWS else self._as_it_is
        # A jaxpr that was traced elsewhere does not mark what differs over these axes.
        if manual_axes and (self.reach.branches or self.layers == ROWS):
            run = functools.partial(without_branches, run, manual_axes)
        return run(grads, state, params, loss)

    def _as_it_is(
        self, grads: Params, state: Any, params: Params, loss: Array
    ) -> tuple[Params, Any]:
        """The update of the tensors that the transformation sees."""
        grads, params = (
            self.nesting.nest(self.rows.unstacked(tree)) for tree in (grads, params)
        )
        state = self.forms.nest(state)
        updates, state = _update(self.transformation, grads, state, params, loss)
        updates = self.rows.stacked(self.nesting.flatten(updates))
        return updates, self.forms.store(state)

    def _layers_at_once(
        self, grads: Params, state: Any, params: Params, loss: Array
    ) -> tuple[Params, Any]:
        """The update of stacks, vectorized over the layers."""
        return self.by_operations(
            self.operations.operations, grads, state, params, loss
        )

    def by_operations(
        self,
        steps: Sequence[Any],
        grads: Params,
        state: Any,
        params: Params,
        loss: Array,
    ) -> tuple[Params, Any]:
        """(updates, state) after one step.

        Args:
          steps: those of `operations`, or others that make the same values.
          grads: {path: gradient}.
          state: the state before.
          params: {path: array}.
          loss: the loss of `grads`.
        """
        arrays = {("gradient", path): x for path, x in grads.items()}
        arrays |= {("parameter", path): x for path, x in params.items()}
        arrays |= {("state", i): x for i, x in enumerate(jax.tree.leaves(state))}
        results = self.operations.run_steps(steps, {**arrays, "loss": loss})
        paths = self.results_order[0]
        updates = dict(zip(paths, results, strict=False))
        state = jax.tree.unflatten(self.forms.stored, results[len(paths) :])
        return updates, state

    @functools.cached_property
    def operations(self) -> UpdateOperations:
        """The operations of an update of the parameters that it sees."""
        leaves = leaves_of(self.nesting, self.forms, self.rows)
        read = self.rows, self.traced, leaves, self.results_order[1]
        found = UpdateOperations(*read)
        # Norms over all layers, as in clipping, are common to them read as totals.
        return UpdateOperations(*read, totals=True) if found.results is None else found

    @functools.cached_property
    def results_order(self) -> tuple[list[str], list[int | RowNumbers]]:
        """Paths of the updates as stored, and the places of all results."""
        return results_order(self.nesting, self.forms, self.rows)


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
    rows: LayerRows | None = None,
) -> Optimizer:
    """Makes the optimizer of a model's parameters; nothing is computed.

    Args:
      transformation: sees nested dicts; or {path: array}, if it only fits those.
      params: the parameters that it trains, layers stacked.
      keys: {path: keys in the nested dicts}, of the model's own parameters at least.
      rows: how layers are stacked.

    Raises:
      MeshparError: its update needs arguments that training does not give, or changes
        the shapes or dtypes of its state.
    """
    transformation = with_extra_args(transformation)
    rows = LayerRows({}) if rows is None else rows.only(params)
    own = _of_trees(transformation, params, keys, rows)
    if not rows.rows:
        return own
    return _of_stacks(own, params, keys) or _by_layers(own)


def optimizer_of(
    model: Model, transformation: optax.GradientTransformation | optax.MultiSteps
) -> Optimizer:
    """`make_optimizer` of the parameters of a model that are trained."""
    trained = {path: p for path, p in model.params.items() if p.trained}
    rows = LayerRows(model.rows)
    keys = {path: model.keys_of(path) for path in (*trained, *rows.places)}
    return make_optimizer(transformation, abstract(trained), keys, rows)


def own_state(
    transformation: optax.GradientTransformationExtraArgs,
    params: Mapping[str, jax.ShapeDtypeStruct],
    keys: Mapping[str, tuple[Any, ...]],
    rows: LayerRows,
) -> tuple[Any, NestedState]:
    """(state of the model's own tensors as ShapeDtypeStructs, its forms).

    Takes the arguments of `make_optimizer`.
    """
    own = rows.unstacked(params, _abstract_row)
    nesting, state = _initial(transformation, own, keys)
    return state, NestedState.of(state, nesting, rows)


def _of_trees(
    transformation: optax.GradientTransformationExtraArgs,
    params: Mapping[str, jax.ShapeDtypeStruct],
    keys: Mapping[str, tuple[Any, ...]],
    rows: LayerRows,
) -> Optimizer:
    """The optimizer of the model's own tensors."""
    own = rows.unstacked(params, _abstract_row)
    nesting, state = _initial(transformation, own, keys)
    refuse_lookahead(state)
    transformation, traced = _traced(transformation, nesting.nest(own), state)
    num_state = len(jax.tree.leaves(state))
    reach = read_reach(traced, nesting.paths, num_state)
    forms = NestedState.of(state, nesting, rows)
    stored = jax.eval_shape(forms.store, state)
    return Optimizer(
        transformation,
        nesting,
        rows,
        MODEL if rows.rows else STACKS,
        stored,
        reach.of_stacks(rows.places),
        forms,
        traced,
    )


def _of_stacks(
    own: Optimizer,
    params: Mapping[str, jax.ShapeDtypeStruct],
    keys: Mapping[str, tuple[Any, ...]],
) -> Optimizer | None:
    """The optimizer of stacks, if it is proved to be that of the model's own tensors.

    Its state has to have the same form, and every result the value number of the
    results for each layer.
    """
    whole = LayerRows({})
    stacks = {path: keys.get(path, tuple(path.split("/"))) for path in params}
    try:
        optimizer = _of_trees(own.transformation, params, stacks, whole)
    except Exception:  # What a mask or a label makes of a stack is the user's code.
        return None
    same_form = optimizer.abstract_state == own.abstract_state
    if not same_form or not _are_same(own, optimizer, params):
        return None
    if any(own.rows.padding) and not _keeps_zeros(optimizer, own.rows.rows):
        return None
    return dataclasses.replace(optimizer, layers=STACKS)


def _abstract_row(x: Any, number: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one row of a stack."""
    del number
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


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
            if isinstance(error, MeshparError):
                raise error from None
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise MeshparError(
                f"the optimizer cannot start from the model's weights: "
                f"{shown(told, 400)}; give masks and labels of the model's own tree"
            ) from error


def _traced(
    transformation: optax.GradientTransformationExtraArgs, params: Any, state: Any
) -> tuple[optax.GradientTransformationExtraArgs, Any]:
    """(the transformation, the jaxpr of one update on shapes alone).

    The result takes the loss and the gradients as extra arguments, and hands those on
    that the given transformation has.
    """
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    for names in _EXTRA:
        given = transformation if names == _EXTRA[0] else _with(transformation, names)
        run = functools.partial(_update, given)
        try:
            traced, (_, new_state) = jax.make_jaxpr(run, return_shape=True)(
                params, state, params, loss
            )
        except TypeError as error:
            if names and "unexpected keyword argument" in str(error):
                continue
            if missing := missing_arguments(error):
                raise missing from error
            raise
        check_state(state, new_state)
        return given, traced
    raise AssertionError("the last attempt gives no extra arguments")


def _update(
    transformation: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    loss: Array,
) -> tuple[Any, Any]:
    """One update of a transformation that takes the extra arguments."""
    return transformation.update(grads, state, params, value=loss, grad=grads)


def _with(
    transformation: optax.GradientTransformationExtraArgs, names: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """The transformation, which gets some of the extra arguments alone."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        extra = {name: extra[name] for name in names}
        return transformation.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(transformation.init, update)


def _are_same(own: Optimizer, stacks: Optimizer, params: Mapping[str, Any]) -> bool:
    """Whether an optimizer of stacks starts and updates each layer as its own does."""
    roles = {(k, path) for path in own.rows.rows for k in ("gradient", "parameter")}
    state = enumerate(own.forms.order)
    roles |= {("state", i) for i, place in state if isinstance(place, RowNumbers)}
    both = own, stacks
    paths, orders = zip(*(o.results_order for o in both), strict=True)
    inits = [_traced_init(o, params) for o in both]
    return paths[0] == paths[1] and all(
        _have_same_results(both, traces, orders, roles, initial)
        for traces, orders, initial in (
            ([o.traced for o in both], orders, False),
            (inits, [o.forms.order for o in both], True),
        )
    )


def _keeps_zeros(optimizer: Optimizer, stacks: Collection[str]) -> bool:
    """Whether rows of zeros stay so: an elementwise update runs on padding, too."""
    keys = optimizer.nesting.keys
    small = {path: jnp.zeros((1, 1)) for path in keys}
    small = optimizer.nesting.nest(small)
    state, loss = optimizer.transformation.init(small), jnp.zeros(())
    for _ in range(_ZERO_STEPS):
        updates, state = _update(optimizer.transformation, small, state, small, loss)
        flat = optimizer.nesting.flatten(updates)
        if any(jnp.any(flat[path] != 0) for path in stacks):
            return False
    return True


def _traced_init(optimizer: Optimizer, params: Mapping[str, Any]) -> Any:
    """The jaxpr of the state at the start."""
    own = optimizer.rows.unstacked(params, _abstract_row)
    return jax.make_jaxpr(optimizer.transformation.init)(optimizer.nesting.nest(own))


def _have_same_results(
    both: Sequence[Optimizer],
    traces: Sequence[Any],
    orders: Sequence[Any],
    roles: Collection[Any],
    initial: bool,
) -> bool:
    """Whether a function of a model's own tensors is the same one of stacks.

    Args:
      both: the optimizer of the model's own tensors, and that of stacks.
      traces: the jaxprs of the function.
      orders: places of the results as stored.
      roles: the arguments that are stacks.
      initial: as in `leaves_of`.
    """
    own, stacks = both
    numbers = LayerValues(own.rows.layers, False, not any(own.rows.padding))
    leaves, whole = (leaves_of(o.nesting, o.forms, o.rows, initial) for o in both)
    each = treats_alike(numbers.outputs(traces[0], leaves), orders[0])
    whole = [Leaf(leaf.role, 0 if leaf.role in roles else None) for leaf in whole]
    values = numbers.outputs(traces[1], whole, of_stacks=True)
    values = [values[place] for place in orders[1]]
    return each is not None and [x.number for x in each] == [x.number for x in values]


def _by_layers(own: Optimizer) -> Optimizer:
    """The optimizer, vectorized over the layers if it treats them alike."""
    if any(map(stack_of_row, _dict_keys(own.abstract_state))):
        return own  # Some layers alone have a state.
    if own.operations.results is None:
        return own
    return dataclasses.replace(own, layers=ROWS)


def _dict_keys(tree: Any) -> set[Any]:
    """The keys of all dicts in a tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    entries = (key for keys, _ in leaves for key in keys)
    return {k.key for k in entries if isinstance(k, jax.tree_util.DictKey)}
