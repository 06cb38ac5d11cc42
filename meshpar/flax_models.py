"""One model contract for Flax NNX and Flax Linen.

A `Model` is what every lowering and strategy sees: named parameter shapes, a pure
`init` and a pure `loss`. Parameters are a flat dict {path: array}, the same whatever
the mesh, so checkpoints and reports do not depend on the layout.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from meshpar.staged import Key, Staged, Stages

Array = jax.Array
Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Param:
    """Shape, dtype and dim names of one parameter; names None if nobody gave any."""

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Model:
    """A Flax model as pure functions over {path: array}.

    Attributes:
      params: {path: Param}, in the order of the model.
      init: key -> parameters.
      loss: (params, batch, key) -> (loss, aux); `aux` holds scalars.
      evaluation_loss: the same with dropout and the like off, (params, batch).
      bind: params -> the callable model (an NNX module, or Linen's `apply`).
      staged: the model layer by layer, for the explicit lowering; None without.
    """

    params: Mapping[str, Param]
    init: Callable[[Array], Params]
    loss: Callable[[Params, Any, Array], tuple[Array, dict]]
    evaluation_loss: Callable[[Params, Any], tuple[Array, dict]]
    bind: Callable[[Params], Any]
    staged: Staged | None = None


_NNX_NAMES = ("out_sharding", "sharding_names", "sharding")  # newest key first


def _loss_and_aux(result: Any) -> tuple[Array, dict]:
    loss, aux = result if isinstance(result, tuple) else (result, {})
    if jnp.ndim(loss):
        raise ValueError(
            f"loss_fn returned a loss of shape {jnp.shape(loss)}; return a scalar "
            "(the mean over the batch)"
        )
    for name, value in aux.items():
        if name in ("loss", "grad_norm"):
            raise ValueError(f"aux[{name!r}] is a metric of its own; rename it")
        if jnp.ndim(value):
            raise ValueError(
                f"aux[{name!r}] has shape {jnp.shape(value)}; aux holds scalars"
            )
    return loss, dict(aux)


def _checked(params: dict[str, Param]) -> dict[str, Param]:
    """Pads names to all dims, as a PartitionSpec is, and refuses too many."""
    if not params:
        raise ValueError("the model has no parameters")
    for path, param in params.items():
        if param.names is None:
            continue
        missing = len(param.shape) - len(param.names)
        if missing < 0:
            raise ValueError(
                f"parameter {path} has shape {param.shape} and dim names {param.names}"
                ": more names than dims"
            )
        names = param.names + (None,) * missing
        params[path] = dataclasses.replace(param, names=names)
    return params


def _path(keys: Iterable[Any]) -> str:
    return "/".join(map(str, keys))


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
                f"variable {_path(carried[0][0])} is one of {len(carried)} of kind "
                f"{', '.join(kinds)}; meshpar trains models whose only variables are "
                "nnx.Param and random state, so use a layer without running state "
                "(LayerNorm or GroupNorm in place of BatchNorm)"
            )
        self.params = {
            prefix + _path(keys): (keys, v) for keys, v in nnx.to_flat_state(params)
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


def _staged(
    abstract: nnx.Module, whole: _NnxFunctions, stages: Stages, params: dict[str, Param]
) -> Staged:
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
    return Staged(
        prefix=prefix,
        depth=next(iter(depths.values()))[0],
        embed=lambda params, batch, key: stages.embed(whole(params, key), batch),
        layer=lambda params, x, key: stages.layer(one(params, key), x),
        head_loss=lambda params, x, batch, key: _loss_and_aux(
            stages.head_loss(whole(params, key), x, batch)
        ),
    )


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Module)


def from_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[nnx.Module, Any], Any] | Stages,
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

    params = _checked(
        {
            path: Param(v.get_value().shape, v.get_value().dtype, names(v))
            for path, (_, v) in module.params.items()
        }
    )
    staged = None
    if isinstance(loss_fn, Stages):
        staged = _staged(abstract, module, loss_fn, params)
        staged = dataclasses.replace(staged, evaluates=evaluation_loss_fn is None)

    def init(key: Array) -> Params:
        with nnx.use_eager_sharding(False):
            made = make_model(nnx.Rngs(key))
        flat = nnx.to_flat_state(nnx.state(made, nnx.Param))
        return {_path(keys): v.get_value() for keys, v in flat}

    def loss(params: Params, batch: Any, key: Key) -> tuple[Array, dict]:
        if staged is not None:
            return staged.loss(params, batch, key)
        return _loss_and_aux(loss_fn(module(params, key), batch))

    def bind(params: Params) -> nnx.Module:
        return module(params, None)

    def evaluation_loss(params: Params, batch: Any) -> tuple[Array, dict]:
        if evaluation_loss_fn is None:
            return loss(params, batch, None)
        return _loss_and_aux(evaluation_loss_fn(bind(params), batch))

    return Model(params, init, loss, evaluation_loss, bind, staged)


def from_linen(
    module: nn.Module,
    loss_fn: Callable[[Callable, Any], Any],
    example_inputs: Any,
    evaluation_loss_fn: Callable[[Callable, Any], Any] | None = None,
    rngs: tuple[str, ...] = ("dropout",),
) -> Model:
    """Takes a Linen model; names come from `nn.with_logical_partitioning` and the like.

    Args:
      module: the Linen module.
      loss_fn: (apply, batch) -> loss or (loss, aux), where `apply(*args, **kwargs)`
        runs the module with its parameters and random keys.
      example_inputs: what `module.init` takes after the key: a tuple of positional
        arguments, a dict of keyword arguments or one array; shapes will do.
      evaluation_loss_fn: the same for evaluation, where `apply` has no random keys;
        `loss_fn` by default.
      rngs: names of the random streams that `apply` gets during training.

    Raises:
      ValueError: the module keeps other variables than parameters, has none, or
        misnames one.
    """
    args, kwargs = (), {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    else:
        one = not isinstance(example_inputs, tuple)
        args = (example_inputs,) if one else example_inputs

    def concrete(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf

    def init_variables(key: Array) -> Any:
        keys = dict(
            zip(("params", *rngs), jax.random.split(key, 1 + len(rngs)), strict=True)
        )
        inputs, named = jax.tree.map(concrete, (args, kwargs))
        return module.init(keys, *inputs, **named)

    def is_box(leaf: Any) -> bool:
        return isinstance(leaf, nn.meta.AxisMetadata)

    abstract = jax.eval_shape(init_variables, jax.random.key(0))
    if others := sorted(set(abstract) - {"params"}):
        raise ValueError(
            f"the module keeps collections {others} beside 'params'; meshpar trains "
            "models without running state (LayerNorm or GroupNorm in place of "
            "BatchNorm)"
        )
    boxes = traverse_util.flatten_dict(abstract.get("params", {}), sep="/")
    params = {}
    for path, box in boxes.items():
        names = getattr(box, "names", None) if is_box(box) else None
        leaf = nn.meta.unbox(box)
        names = None if names is None else tuple(names)
        params[path] = Param(leaf.shape, leaf.dtype, names)
    params = _checked(params)

    def init(key: Array) -> Params:
        tree = nn.meta.unbox(init_variables(key)["params"])
        return traverse_util.flatten_dict(tree, sep="/")

    def bind(params: Params, key: Array | None = None) -> Callable:
        tree = traverse_util.unflatten_dict(params, sep="/")

        def apply(*args: Any, **kwargs: Any) -> Any:
            if key is not None:
                keys = jax.random.split(key, max(1, len(rngs)))
                kwargs.setdefault("rngs", dict(zip(rngs, keys, strict=False)))
            return module.apply({"params": tree}, *args, **kwargs)

        return apply

    def loss(params: Params, batch: Any, key: Array) -> tuple[Array, dict]:
        return _loss_and_aux(loss_fn(bind(params, key), batch))

    def evaluation_loss(params: Params, batch: Any) -> tuple[Array, dict]:
        return _loss_and_aux((evaluation_loss_fn or loss_fn)(bind(params), batch))

    return Model(params, init, loss, evaluation_loss, bind)
