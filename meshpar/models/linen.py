"""Flax Linen models: `from_linen`."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from meshpar.arrays import Array, Params
from meshpar.errors import LayoutError
from meshpar.layouts.param import Param
from meshpar.metrics import LossResult, loss_result
from meshpar.models.layer_cut import LayerCut, OnCall
from meshpar.models.layer_groups import LayerGroups
from meshpar.models.layer_stack import Key, LayeredModel
from meshpar.models.linen_functions import Apply, LinenFunctions
from meshpar.models.linen_layers import LinenLayers
from meshpar.models.loss_call import call_loss, with_arguments, with_axis
from meshpar.models.model import Model, checked_params
from meshpar.models.plain import plain_linen

LossFn = Callable[[Callable, Any], Any]


def from_linen(
    module: nn.Module,
    loss_fn: LossFn,
    example_inputs: Any,
    evaluation_loss_fn: LossFn | None = None,
    rngs: tuple[str, ...] = ("dropout",),
    *,
    layers: str = "",
    trained: str = "",
    evaluation_module: nn.Module | None = None,
    sown: tuple[str, ...] = (),
    axis_name: str = "",
) -> Model:
    """Makes a `Model` of a Linen module.

    Dim names are those of `nn.with_logical_partitioning`, `nn.with_partitioning` or the
    collection "params_axes".

    Args:
      module: the Linen module.
      loss_fn: (apply, batch) -> loss or (loss, aux); it gets a random key and the
        number of steps done if it has arguments called `key` (None in evaluation mode)
        and `step`. `apply(*args, **kwargs)`
        runs the module with its variables and random keys. The loss is a mean over
        rows, a `metrics.Mean(total, weight)`, or a scalar with aux["weight"], its
        weight against the losses of other parts of the batch. aux is a dict of metrics:
        numbers or arrays, means as the loss is, or `metrics.Mean`, `Sum`, `Max`,
        `Last`.
      example_inputs: arguments of `module.init` after the key: a tuple of positional
        arguments, a dict of keyword arguments or one array; shapes will do.
      evaluation_loss_fn: (apply, batch) -> loss or (loss, aux) for evaluation, where
        `apply` has no random keys; `loss_fn` by default.
      rngs: names of the random streams that `apply` gets during training.
      layers: path of the layers with * for their number, such as "decoder/block_*".
        The module calls each of them once, in order, with the output of the one before
        as first argument. Their parameters are stacked, and the explicit lowering,
        pipelines and `remat` become possible. Layers are equal, or a pattern of unequal
        layers repeats. Without *, the path of a module of `nn.scan`.
      trained: regex of the paths of parameters that are trained; all by default. The
        others have no gradient and no optimizer state.
      evaluation_module: the module in evaluation mode, for modules whose mode is a
        field; `module` by default. Its variables are those of `module`.
      sown: collections that hold results of one step, beside what `sow` fills;
        training does not carry them along.
      axis_name: name of the axis of `jax.pmap` over which the model averages, such as
        that of a BatchNorm; its mean is that of the whole batch.

    Variables of other collections than "params", such as the statistics of BatchNorm,
    are carried along in the training state; `apply` updates them in training mode.

    Raises:
      MeshparError: the module has no parameters, none that is trained, or one with more
        names than dims; or it has no layers that can be run one by one.
    """
    args, kwargs = _example(example_inputs)
    functions = LinenFunctions(module, args, kwargs, rngs, sown)
    params = functions.params(lambda path: re.search(trained, path) is not None)
    modes = {True: functions, False: functions}
    if evaluation_module is not None:
        modes[False] = dataclasses.replace(functions, module=evaluation_module)
    found = LinenLayers.of(functions, layers, params) if layers else None
    own = _LinenModel(modes, loss_fn, evaluation_loss_fn or loss_fn, params, found)
    plain = plain_linen(
        module,
        loss_fn,
        evaluation_loss_fn,
        evaluation_module,
        functions.init,
        lambda variables: functions.collections(variables, params),
        functions.random_keys,
    )
    model = dataclasses.replace(own.model(), plain=plain)
    model = with_axis(model, axis_name)
    model = with_arguments(model, [loss_fn], evaluation_loss_fn)
    if evaluation_module is None:
        return model
    return dataclasses.replace(model, evaluates_apart=True)


def _example(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """(args, kwargs) of example inputs."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


@dataclasses.dataclass(frozen=True, eq=False)
class _LinenModel:
    """The parts of a model, each by whether it trains (True) or evaluates.

    Attributes:
      functions: the module.
      loss_fn: the loss function of training.
      evaluation_loss_fn: the loss function of evaluation.
      params: {path: Param} of the module.
      layers: the layers; None if they do not run one by one.
    """

    functions: dict[bool, LinenFunctions]
    loss_fn: LossFn
    evaluation_loss_fn: LossFn
    params: Mapping[str, Param]
    layers: LinenLayers | None

    def init(self, key: Array) -> Params:
        variables = self.functions[True].init(key)
        return self.layers.stack.stacked(variables) if self.layers else variables

    def bind(self, params: Params, key: Key = None) -> Apply:
        """The module's `apply`; in evaluation mode without a key."""
        if self.layers:
            params = self.layers.stack.unstacked(params)
        return Apply(self.functions[key is not None], params, self.params, key)

    def result(self, params: Params, batch: Any, key: Key) -> LossResult:
        """The loss, and the variables that the module changed in training mode."""
        loss_fn = self.evaluation_loss_fn if key is None else self.loss_fn
        apply = self.bind(params, key)
        result = call_loss(loss_fn, apply, batch, params=params, key=key)
        return loss_result(result).with_state(apply.updates)

    def run_with(
        self, params: Params, batch: Any, key: Key, on_call: OnCall
    ) -> tuple[Any, Params]:
        """(result of the loss function, variables that have changed).

        Args:
          params: {path in the module: array}.
          batch: the batch.
          key: random key, or None for evaluation.
          on_call: takes the place of the layers.

        Raises:
          LayoutError: a parameter is a slice of the module's.
        """
        for path, x in params.items():
            whole = self.params.get(path, x).shape
            if x.shape != whole:
                raise LayoutError(
                    f"{path} is {list(x.shape)} on every stage and {list(whole)} in "
                    "the module, and Linen modules check the shapes of their "
                    "parameters; leave out vocab=pipe"
                )
        apply = Apply(self.functions[key is not None], params, self.params, key)
        loss_fn = self.evaluation_loss_fn if key is None else self.loss_fn
        with self.layers.taken_out(on_call):
            result = call_loss(loss_fn, apply, batch, params=params, key=key)
        return result, apply.updates

    def layered(self, params: Mapping[str, Param]) -> LayeredModel:
        """The model layer by layer."""
        return LayerCut.of(self.layers, params, self.run_with).layered_model()

    def model(self) -> Model:
        params, layered = dict(self.params), None
        if self.layers:
            params = self.layers.stack.stacked_params(params)
        params = checked_params(params)
        if self.layers:
            layered = self.layered(params)

        def loss(params: Params, batch: Any, key: Key) -> LossResult:
            if layered is not None:
                return layered.loss(params, batch, key)
            return self.result(params, batch, key)

        def evaluation_loss(params: Params, batch: Any) -> LossResult:
            return loss(params, batch, None)

        model = Model(params, self.init, loss, evaluation_loss, self.bind, layered)
        if not self.layers:
            return model
        rows, stacked = {}, self.layers.stack.stacked
        if isinstance(self.layers.stack, LayerGroups):
            rows = self.layers.stack.rows(self.params)
        return dataclasses.replace(model, rows=rows, stack_variables=stacked)
