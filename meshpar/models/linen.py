"""Takes Flax Linen models: `from_linen`."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from meshpar.arrays import Array, Params
from meshpar.layouts.param import Param
from meshpar.models.model import Model, checked_params, loss_and_aux


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
    params = checked_params(params)

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
        return loss_and_aux(loss_fn(bind(params, key), batch))

    def evaluation_loss(params: Params, batch: Any) -> tuple[Array, dict]:
        return loss_and_aux((evaluation_loss_fn or loss_fn)(bind(params), batch))

    return Model(params, init, loss, evaluation_loss, bind)
