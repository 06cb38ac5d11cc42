"""Takes Flax NNX models: `from_nnx`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.arrays import Array, Params
from meshpar.layouts.param import Param
from meshpar.models.layer_stack import Key, LayeredModel, LayerStack
from meshpar.models.model import Model, checked_params, join_path, loss_and_aux

_NNX_NAMES = ("out_sharding", "sharding_names", "sharding")  # newest key first


class _NnxFunctions:
    """An abstract NNX module as functions of its parameters.

    Attributes:
      prefix: stands before every path.
      stacked: whether every variable has a leading dim that the module does not have
        when it runs.
    """

    def __init__(self, abstract: nnx.Module, prefix: str = "", stacked: bool = False):
        self.prefix, self.stacked = prefix, stacked
        self.graph, params, rngs, other = nnx.split(
            abstract, nnx.Param, nnx.RngState, ...
        )
        if carried := nnx.to_flat_state(other):
            kinds = sorted({type(v).__name__ for _, v in carried})
            raise ValueError(
                f"variable {join_path(carried[0][0])} is one of {len(carried)} of kind "
                f"{', '.join(kinds)}; meshpar trains models whose only variables are "
                "nnx.Param and random state, so use a layer without running state "
                "(LayerNorm or GroupNorm in place of BatchNorm)"
            )
        self.params = {
            prefix + join_path(keys): (keys, v) for keys, v in nnx.to_flat_state(params)
        }
        self.rngs = nnx.to_flat_state(rngs)

    def _reseeded(self, index: int, variable: nnx.Variable, key: Array) -> Array:
        value = variable.get_value()
        shape = value.shape[1:] if self.stacked else value.shape
        if not isinstance(variable, nnx.RngKey):
            return jnp.zeros(shape, value.dtype)
        key = jax.random.fold_in(key, index)
        return jax.random.split(key, shape) if shape else key

    def __call__(self, params: Params, key: Key) -> nnx.Module:
        """The module in training mode, or without a key in evaluation mode.

        Parameters that are not given stay abstract: using one fails.
        """
        mode_key = jax.random.key(0) if key is None else key
        state = nnx.from_flat_state(
            [
                (keys, v.replace(params[path]) if path in params else v)
                for path, (keys, v) in self.params.items()
            ]
        )
        rngs = nnx.from_flat_state(
            [
                (keys, v.replace(self._reseeded(i, v, mode_key)))
                for i, (keys, v) in enumerate(self.rngs)
            ]
        )
        module = nnx.merge(self.graph, state, rngs)
        module.eval() if key is None else module.train()
        return module


def _layered(
    abstract: nnx.Module,
    whole: _NnxFunctions,
    stages: LayerStack,
    params: dict[str, Param],
) -> LayeredModel:
    """The pure functions of a module's stages."""
    block = abstract
    for name in stages.stack.split("."):
        if not hasattr(block, name):
            known = sorted(k for k, v in vars(block).items() if _is_module(v))
            raise ValueError(
                f"Stages(stack={stages.stack!r}): {type(block).__name__} has no "
                f"attribute {name!r}; its modules are {', '.join(known)}"
            )
        block = getattr(block, name)
    prefix = stages.stack.replace(".", "/") + "/"
    one = _NnxFunctions(block, prefix, stacked=True)
    depths = {path: params[path].shape[:1] for path in one.params}
    if len(set(depths.values())) != 1 or () in depths.values():
        raise ValueError(
            f"Stages(stack={stages.stack!r}): the first dims of its parameters must "
            f"all be the number of layers, but are {depths}; stack them with nnx.vmap"
        )
    return LayeredModel(
        prefix=prefix,
        depth=next(iter(depths.values()))[0],
        embed=lambda params, batch, key: stages.embed(whole(params, key), batch),
        layer=lambda params, x, key: stages.layer(one(params, key), x),
        head_loss=lambda params, x, batch, key: loss_and_aux(
            stages.head_loss(whole(params, key), x, batch)
        ),
    )


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Module)


def from_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[nnx.Module, Any], Any] | LayerStack,
    evaluation_loss_fn: Callable[[nnx.Module, Any], Any] | None = None,
) -> Model:
    """Takes an NNX model; names come from the `out_sharding` metadata of its Params.

    Args:
      make_model: builds the module from `nnx.Rngs`; traced, never run eagerly.
      loss_fn: (module, batch) -> loss or (loss, aux), or `Stages` for a model of equal
        layers, which allows the explicit lowering. The loss is a mean over the batch;
        aux["weight"], if given, is its weight against other parts of the batch; a part
        of weight 0 still needs a finite loss.
      evaluation_loss_fn: the same for evaluation; `loss_fn` by default. It gets the
        module in evaluation mode (`module.eval()`).

    Raises:
      ValueError: the module holds variables that training would have to carry along
        (batch statistics, caches), has no parameters, misnames one, or has not the
        stack that its stages name.
    """
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    module = _NnxFunctions(abstract)

    def names(variable: nnx.Variable) -> tuple | None:
        metadata = variable.get_metadata()
        given = next((metadata[k] for k in _NNX_NAMES if metadata.get(k)), None)
        return None if given is None else tuple(given)

    params = checked_params(
        {
            path: Param(v.get_value().shape, v.get_value().dtype, names(v))
            for path, (_, v) in module.params.items()
        }
    )
    layered = None
    if isinstance(loss_fn, LayerStack):
        layered = _layered(abstract, module, loss_fn, params)
        layered = dataclasses.replace(layered, evaluates=evaluation_loss_fn is None)

    def init(key: Array) -> Params:
        with nnx.use_eager_sharding(False):
            made = make_model(nnx.Rngs(key))
        flat = nnx.to_flat_state(nnx.state(made, nnx.Param))
        return {join_path(keys): v.get_value() for keys, v in flat}

    def loss(params: Params, batch: Any, key: Key) -> tuple[Array, dict]:
        if layered is not None:
            return layered.loss(params, batch, key)
        return loss_and_aux(loss_fn(module(params, key), batch))

    def bind(params: Params) -> nnx.Module:
        return module(params, None)

    def evaluation_loss(params: Params, batch: Any) -> tuple[Array, dict]:
        if evaluation_loss_fn is None:
            return loss(params, batch, None)
        return loss_and_aux(evaluation_loss_fn(bind(params), batch))

    return Model(params, init, loss, evaluation_loss, bind, layered)
