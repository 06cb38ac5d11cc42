"""Flax NNX models: `from_nnx`."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from meshpar.arrays import Array, Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.metrics import LossResult, loss_result
from meshpar.models.layer_cut import LayerCut, OnCall
from meshpar.models.layer_stack import (
    EMBED_KEY,
    HEAD_KEY,
    Key,
    LayeredModel,
    LayerStack,
    fold_key,
)
from meshpar.models.loss_call import call_loss, with_arguments, with_axis
from meshpar.models.model import Model, checked_params
from meshpar.models.nnx_functions import (
    MakeModel,
    NnxFunctions,
    abstract_modules,
    from_instance,
    init_variables,
    path_of,
)
from meshpar.models.nnx_layers import Described, Found, NnxLayers, module_at
from meshpar.models.plain import plain_nnx

LossFn = Callable[[nnx.Module, Any], Any]


def from_nnx(
    make_model: MakeModel | nnx.Module,
    loss_fn: LossFn | LayerStack,
    evaluation_loss_fn: LossFn | None = None,
    *,
    layers: str = "",
    trained: Any = "",
    axis_name: str = "",
) -> Model:
    """Makes a `Model` of an NNX module.

    Dim names are those of the `out_sharding` metadata of its Params.

    Args:
      make_model: builds the module from `nnx.Rngs`; traced, never run eagerly. Or a
        module, with whose variables training starts (`from_pretrained`).
      loss_fn: (module, batch) -> loss or (loss, aux); it gets a random key and the
        number of steps done if it has arguments called `key` (None in evaluation mode)
        and `step`. Or a `LayerStack` for a model of
        stacked layers, which allows the shard_map lowering. The loss is a mean over
        rows, a `metrics.Mean(total, weight)`, or a scalar with aux["weight"], its
        weight against the losses of other parts of the batch. aux is a dict of metrics:
        numbers or arrays, means as the loss is, or `metrics.Mean`, `Sum`, `Max`,
        `Last`.
      evaluation_loss_fn: (module, batch) -> loss or (loss, aux) for evaluation, with
        the module in evaluation mode (`module.eval()`); `loss_fn` by default.
      layers: attribute path of an `nnx.List` or an `nnx.Dict` of layers, such as
        "decoder.blocks", or of attributes with * for their number ("layer_*"). The
        module calls each of them once, in order, with the output of the one before as
        first argument. Their variables are stacked, and the explicit lowering,
        pipelines and `remat` become possible. Layers are equal, or a pattern of unequal
        layers repeats.
      trained: the parameters that are trained; all by default. A regex of their paths,
        or an NNX filter such as `nnx.LoRAParam`. The others have no gradient and no
        optimizer state.
      axis_name: name of the axis of `jax.pmap` over which the model averages, such as
        that of a BatchNorm; its mean is that of the whole batch.

    Variables that are no `nnx.Param`, such as the statistics of BatchNorm, are carried
    along in the training state; the module updates them in training mode.

    Raises:
      MeshparError: the module has no parameters, none that is trained, or one with more
        names than dims; a filter selects a variable that is no parameter; or the module
        has no layers that can be run one by one.
    """
    if isinstance(make_model, nnx.Module):
        make_model, given = from_instance(make_model)
        options = {"layers": layers, "trained": trained, "axis_name": axis_name}
        model = from_nnx(make_model, loss_fn, evaluation_loss_fn, **options)
        return _starting_from(model, given)
    if not callable(make_model) or isinstance(make_model, nnx.Optimizer):
        raise MeshparError(
            f"from_nnx got a {type(make_model).__name__}: give a function of nnx.Rngs "
            "that builds a module, or a module; of an nnx.Optimizer give its model "
            "here, its transformation (optimizer.tx) to lower, and both to program.take"
        )
    described = loss_fn if isinstance(loss_fn, LayerStack) else None
    if described and layers:
        raise MeshparError("give a LayerStack or layers=, not both")

    found: list[Described] = []

    def parts(module: nnx.Module) -> list[nnx.Module]:
        if described:
            option = f"LayerStack(stack={described.stack!r})"
            return [module_at(module, described.stack, option)]
        if not layers:
            return []
        own = Found.in_module(module, layers)
        found.append(Described.of(own))
        return own.modules

    abstract, *inner = abstract_modules(make_model, parts)
    whole = NnxFunctions(abstract)
    plain = plain_nnx(make_model, loss_fn, evaluation_loss_fn)
    params = whole.params(_trained_predicate(trained))
    if described:
        stack = NnxFunctions(inner[0], described.stack.replace(".", "/") + "/", True)
        params = checked_params(params)
        layered = _described(whole, stack, described, params)
        evaluates = evaluation_loss_fn is None
        layered = dataclasses.replace(layered, evaluates=evaluates)
        own = _NnxModel(make_model, whole, None, evaluation_loss_fn)
        asking = described.embed, described.head_loss
        model = dataclasses.replace(own.model(params, layered), plain=plain)
        model = with_axis(model, axis_name)
        return with_arguments(model, asking, evaluation_loss_fn)
    lists = NnxLayers.of(layers, inner, found[0], params) if layers else None
    own = _NnxModel(make_model, whole, loss_fn, evaluation_loss_fn or loss_fn, lists)
    if lists is None:
        model = own.model(checked_params(params), None)
    else:
        params = checked_params(lists.stack.stacked_params(params))
        model = own.model(params, own.layered(params))
    model = with_axis(dataclasses.replace(model, plain=plain), axis_name)
    return with_arguments(model, [loss_fn], evaluation_loss_fn)


def _starting_from(model: Model, given: Params) -> Model:
    """A model that starts from the variables of a module."""

    def init(key: Array) -> Params:
        fresh = model.init(key)  # With what the loss asks for, such as the step.
        return {**fresh, **model.stack_variables(given)}

    plain = dataclasses.replace(model.plain, init=lambda _: dict(given))
    return dataclasses.replace(model, init=init, plain=plain, given=given)


def _trained_predicate(trained: Any) -> Callable[[tuple, Any], bool]:
    """(keys, floating-point variable) -> whether it is trained."""
    if isinstance(trained, str):
        return lambda keys, leaf: (
            isinstance(leaf, nnx.Param)
            and re.search(trained, path_of(keys)) is not None
        )
    selects = nnx.filterlib.to_predicate(trained)

    def is_trained(keys: tuple, leaf: Any) -> bool:
        selected = selects(keys, leaf)
        if selected and not isinstance(leaf, nnx.Param):
            raise MeshparError(
                f"trained={trained} selects {path_of(keys)!r}, a "
                f"{type(leaf).__name__}; only an nnx.Param is trained: use "
                "nnx.All(nnx.Param, ...), or make it a subclass of nnx.Param"
            )
        return selected

    return is_trained


@dataclasses.dataclass(frozen=True, eq=False)
class _NnxModel:
    """The parts of a model.

    Attributes:
      make_model: builds the module.
      whole: the module as a function of its variables.
      loss_fn: the loss function of training; None if a LayerStack gives it.
      evaluation_loss_fn: the loss function of evaluation; None if a LayerStack does.
      lists: the layers; None if they are not stacked by meshpar.
    """

    make_model: MakeModel
    whole: NnxFunctions
    loss_fn: LossFn | None
    evaluation_loss_fn: LossFn | None
    lists: NnxLayers | None = None

    def init(self, key: Array) -> Params:
        variables = init_variables(self.make_model, key)
        return self.lists.stack.stacked(variables) if self.lists else variables

    def bind(self, params: Params, key: Key = None) -> nnx.Module:
        """The module; in evaluation mode without a key."""
        if self.lists:
            params = self.lists.stack.unstacked(params)
        return self.whole(params, key)

    def result(self, params: Params, batch: Any, key: Key) -> LossResult:
        """The loss, and the variables that the module changed in training mode."""
        loss_fn = self.evaluation_loss_fn if key is None else self.loss_fn

        def loss(module: nnx.Module) -> LossResult:
            result = call_loss(loss_fn, module, batch, params=params, key=key)
            return loss_result(result)

        if key is None:
            return loss(self.bind(params))
        result, state = self.whole.run(loss, params, key)
        return result.with_state(state)

    def run_with(
        self, params: Params, batch: Any, key: Key, on_call: OnCall
    ) -> tuple[Any, Params]:
        """(result of the loss function, variables that may have changed).

        Args:
          params: {path in the module: array}.
          batch: the batch.
          key: random key, or None for evaluation.
          on_call: takes the place of the layers.
        """
        module = self.whole(params, key)
        self.lists.take_out(module, on_call)
        loss_fn = self.evaluation_loss_fn if key is None else self.loss_fn
        result = call_loss(loss_fn, module, batch, params=params, key=key)
        return result, self.whole.updates(module, params)

    def layered(self, params: Mapping[str, Param]) -> LayeredModel:
        """The model layer by layer."""
        return LayerCut.of(self.lists, params, self.run_with).layered_model()

    def model(self, params: Mapping[str, Param], layered: LayeredModel | None) -> Model:
        def loss(params: Params, batch: Any, key: Key) -> LossResult:
            if layered is not None:
                return layered.loss(params, batch, key)
            return self.result(params, batch, key)

        def evaluation_loss(params: Params, batch: Any) -> LossResult:
            if layered is not None and layered.evaluates:
                return layered.loss(params, batch, None)
            return self.result(params, batch, None)

        leaves = self.whole.leaves.items()
        keys = {path: keys for path, (keys, _) in leaves}
        model = Model(
            params, self.init, loss, evaluation_loss, self.bind, layered, keys
        )
        if self.lists is None:
            return model
        stack = self.lists.stack
        return dataclasses.replace(
            model, rows=stack.rows(self.whole.leaves), stack_variables=stack.stacked
        )


def _described(
    whole: NnxFunctions,
    stack: NnxFunctions,
    layers: LayerStack,
    params: dict[str, Param],
) -> LayeredModel:
    """The pure functions of a module that a LayerStack describes."""
    depths = {path: params[path].shape[:1] for path in stack.leaves}
    if len(set(depths.values())) != 1 or () in depths.values():
        raise MeshparError(
            f"LayerStack(stack={layers.stack!r}): the first dims of its variables "
            f"must all be the number of layers, but are {depths}; stack them with "
            "nnx.vmap"
        )

    def run(fn: Callable, params: Params, key: Key, part: int, *args: Any) -> Any:
        def call(module: nnx.Module) -> Any:
            return call_loss(fn, module, *args, params=params, key=key)

        return whole.run_layered(call, params, fold_key(key, part))

    def embed(params: Params, batch: Any, key: Key) -> Any:
        return run(layers.embed, params, key, EMBED_KEY, batch)

    def context(params: Params, batch: Any, key: Key) -> tuple:
        if layers.context is None:
            return ()
        return (run(layers.context, params, key, EMBED_KEY, batch),)

    def layer(params: Params, x: Any, key: Key, context: tuple) -> Any:
        def call(module: nnx.Module) -> Any:
            return layers.layer(module, x, *context)

        return stack.run_layered(call, params, key)

    def head_loss(params: Params, x: Any, batch: Any, key: Key) -> LossResult:
        return loss_result(run(layers.head_loss, params, key, HEAD_KEY, x, batch))

    depth = next(iter(depths.values()))[0]
    return LayeredModel(
        stack.prefix, depth, embed, layer, head_loss, context, pattern=layers.pattern
    )
