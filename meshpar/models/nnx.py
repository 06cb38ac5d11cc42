"""Flax NNX models: `from_nnx`."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.arrays import Array, Params
from meshpar.layouts.param import Param
from meshpar.models.layer_stack import Key, LayeredModel, LayerStack
from meshpar.models.metrics import LossResult, loss_result
from meshpar.models.model import Model, checked_params

_DIM_NAMES = ("out_sharding", "sharding_names", "sharding")
"""Keys of an NNX variable's metadata that may hold its dim names, newest first."""


class _NnxFunctions:
    """An abstract NNX module as functions of its parameters.

    Attributes:
      prefix: first part of every path.
      stacked: whether every variable has a leading dim that the module does not have
        when it runs.
      params: {path: (keys, variable)}.
    """

    def __init__(self, abstract: nnx.Module, prefix: str = "", stacked: bool = False):
        self.prefix, self.stacked = prefix, stacked
        self._graph, params, rngs, others = nnx.split(
            abstract, nnx.Param, nnx.RngState, ...
        )
        if carried := nnx.to_flat_state(others):
            kinds = sorted({type(v).__name__ for _, v in carried})
            raise ValueError(
                f"variable {_path(carried[0][0])} is one of {len(carried)} of kind "
                f"{', '.join(kinds)}; meshpar trains models whose only variables are "
                "nnx.Param and random state, so use a layer without running state "
                "(LayerNorm or GroupNorm in place of BatchNorm)"
            )
        self.params = {
            prefix + _path(keys): (keys, v) for keys, v in nnx.to_flat_state(params)
        }
        self._rngs = nnx.to_flat_state(rngs)

    def __call__(self, params: Params, key: Key) -> nnx.Module:
        """The module in training mode, or in evaluation mode without a key.

        Parameters that are not given stay abstract: using one fails.
        """
        rng_key = jax.random.key(0) if key is None else key
        state = nnx.from_flat_state(
            [
                (keys, v.replace(params[path]) if path in params else v)
                for path, (keys, v) in self.params.items()
            ]
        )
        rngs = nnx.from_flat_state(
            [
                (keys, v.replace(self._reseeded(i, v, rng_key)))
                for i, (keys, v) in enumerate(self._rngs)
            ]
        )
        module = nnx.merge(self._graph, state, rngs)
        module.eval() if key is None else module.train()
        return module

    def _reseeded(self, index: int, variable: nnx.Variable, key: Array) -> Array:
        """A random stream's key from `key`, or its counter at 0."""
        value = variable.get_value()
        shape = value.shape[1:] if self.stacked else value.shape
        if not isinstance(variable, nnx.RngKey):
            return jnp.zeros(shape, value.dtype)
        key = jax.random.fold_in(key, index)
        return jax.random.split(key, shape) if shape else key


def _path(keys: Iterable[Any]) -> str:
    return "/".join(map(str, keys))


def _param(variable: nnx.Variable) -> Param:
    value, metadata = variable.get_value(), variable.get_metadata()
    names = next((metadata[key] for key in _DIM_NAMES if metadata.get(key)), None)
    return Param(value.shape, value.dtype, None if names is None else tuple(names))


def _stacked_module(module: nnx.Module, stack: str) -> nnx.Module:
    """The module at an attribute path such as "decoder.blocks"."""
    for name in stack.split("."):
        if not hasattr(module, name):
            modules = (k for k, v in vars(module).items() if isinstance(v, nnx.Module))
            raise ValueError(
                f"LayerStack(stack={stack!r}): {type(module).__name__} has no "
                f"attribute {name!r}; its modules are {', '.join(sorted(modules))}"
            )
        module = getattr(module, name)
    return module


def _layered_model(
    abstract: nnx.Module,
    whole: _NnxFunctions,
    layers: LayerStack,
    params: dict[str, Param],
) -> LayeredModel:
    """The pure functions of a module that runs layer by layer."""
    prefix = layers.stack.replace(".", "/") + "/"
    layer = _NnxFunctions(_stacked_module(abstract, layers.stack), prefix, stacked=True)
    depths = {path: params[path].shape[:1] for path in layer.params}
    if len(set(depths.values())) != 1 or () in depths.values():
        raise ValueError(
            f"LayerStack(stack={layers.stack!r}): the first dims of its parameters "
            f"must all be the number of layers, but are {depths}; stack them with "
            "nnx.vmap"
        )
    return LayeredModel(
        prefix=prefix,
        depth=next(iter(depths.values()))[0],
        embed=lambda params, batch, key: layers.embed(whole(params, key), batch),
        layer=lambda params, x, key: layers.layer(layer(params, key), x),
        head_loss=lambda params, x, batch, key: loss_result(
            layers.head_loss(whole(params, key), x, batch)
        ),
    )


def from_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[nnx.Module, Any], Any] | LayerStack,
    evaluation_loss_fn: Callable[[nnx.Module, Any], Any] | None = None,
) -> Model:
    """Makes a `Model` of an NNX module.

    Dim names are those of the `out_sharding` metadata of its Params.

    Args:
      make_model: builds the module from `nnx.Rngs`; traced, never run eagerly.
      loss_fn: (module, batch) -> loss or (loss, aux), or a `LayerStack` for a model of
        equal layers, which allows the shard_map lowering. The loss is a mean over rows,
        a `meshpar.Mean(total, weight)`, or a scalar with aux["weight"], its weight
        against the losses of other parts of the batch. aux is a dict of metrics:
        scalars that are means as the loss is, or `meshpar.Mean`, `Sum`, `Max`, `Last`.
      evaluation_loss_fn: (module, batch) -> loss or (loss, aux) for evaluation, with
        the module in evaluation mode (`module.eval()`); `loss_fn` by default.

    Raises:
      ValueError: the module holds variables that training would have to carry along
        (batch statistics, caches), has no parameters, gives one more names than dims,
        or lacks the stack that the LayerStack names.
    """
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    module = _NnxFunctions(abstract)
    params = checked_params({p: _param(v) for p, (_, v) in module.params.items()})
    layered = None
    if isinstance(loss_fn, LayerStack):
        layered = _layered_model(abstract, module, loss_fn, params)
        layered = dataclasses.replace(layered, evaluates=evaluation_loss_fn is None)

    def init(key: Array) -> Params:
        with nnx.use_eager_sharding(False):
            model = make_model(nnx.Rngs(key))
        leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return {_path(keys): v.get_value() for keys, v in leaves}

    def loss(params: Params, batch: Any, key: Key) -> LossResult:
        if layered is not None:
            return layered.loss(params, batch, key)
        return loss_result(loss_fn(module(params, key), batch))

    def bind(params: Params) -> nnx.Module:
        return module(params, None)

    def evaluation_loss(params: Params, batch: Any) -> LossResult:
        if evaluation_loss_fn is None:
            return loss(params, batch, None)
        return loss_result(evaluation_loss_fn(bind(params), batch))

    return Model(params, init, loss, evaluation_loss, bind, layered)
