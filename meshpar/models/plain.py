"""A model as its user wrote it: the module itself, applied to a whole batch.

The judge of programs (`explain.judge`) trains it. No layer is stacked or cut out here,
and nothing knows of a layout.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from meshpar.arrays import Array
from meshpar.layouts.scope import unsharded
from meshpar.models.layer_stack import LayerStack
from meshpar.models.loss_call import call_loss
from meshpar.models.model import STEP, PlainModel, Variables


def plain_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable | LayerStack,
    evaluation_loss_fn: Callable | None,
) -> PlainModel:
    """An NNX module; it takes the arguments of `from_nnx`."""

    def init(key: Array) -> Variables:
        with nnx.use_eager_sharding(False):
            leaves = nnx.to_flat_state(nnx.state(make_model(nnx.Rngs(key))))
        return {_path(k): _value(x) for k, x in leaves if not _is_random(x)}

    def loss(
        variables: Variables, batch: Any, key: Array | None
    ) -> tuple[Any, Variables]:
        with nnx.use_eager_sharding(False):
            graph, state = nnx.split(nnx.eval_shape(lambda: make_model(nnx.Rngs(0))))
        draws = jax.random.key(0) if key is None else key
        leaves, streams = [], 0
        for keys, leaf in nnx.to_flat_state(state):
            if not _is_random(leaf):
                x = variables[_path(keys)]
                leaf = leaf.replace(x) if isinstance(leaf, nnx.Variable) else x
            else:  # Stream i draws from the i-th key of the batch.
                old = leaf.get_value()
                if isinstance(leaf, nnx.RngKey):
                    fresh = jax.random.fold_in(draws, streams)
                    fresh = jax.random.split(fresh, old.shape) if old.shape else fresh
                else:
                    fresh = jnp.zeros_like(old)
                leaf, streams = leaf.replace(fresh), streams + 1
            leaves.append((keys, leaf))
        module = nnx.merge(graph, nnx.from_flat_state(leaves))
        fn = loss_fn
        if key is None:
            module.eval()
            fn = evaluation_loss_fn or loss_fn
        if isinstance(fn, LayerStack):
            result = _loss_of_stack(fn, module, batch, variables, key)
        else:
            result = call_loss(fn, module, batch, params=variables, key=key)
        after = nnx.to_flat_state(nnx.state(module))
        new = {_path(keys): _value(leaf) for keys, leaf in after}
        return result, {path: new.get(path, x) for path, x in variables.items()}

    return PlainModel(init, _on_one_device(loss))


def _loss_of_stack(
    layers: LayerStack,
    module: nnx.Module,
    batch: Any,
    variables: Variables,
    key: Array | None,
) -> Any:
    """The loss of a module whose stacked layers run one after the other."""

    def call(fn: Callable, *args: Any) -> Any:
        return call_loss(fn, *args, params=variables, key=key)

    x = call(layers.embed, module, batch)
    context = () if layers.context is None else (call(layers.context, module, batch),)
    stack = module
    for name in layers.stack.split("."):
        stack = getattr(stack, name)
    graph, state = nnx.split(stack)
    (depth, *_) = {leaf.shape[0] for leaf in jax.tree.leaves(state)}
    for i in range(depth):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[i], state))  # noqa: B023
        x = layers.layer(layer, x, *context)
    return call(layers.head_loss, module, x, batch)


def plain_linen(
    module: nn.Module,
    loss_fn: Callable,
    evaluation_loss_fn: Callable | None,
    evaluation_module: nn.Module | None,
    init: Callable[[Array], Variables],
    collections: Callable[[Variables], dict[str, Any]],
    random_keys: Callable[[Array | None], dict[str, Array]],
) -> PlainModel:
    """A Linen module.

    Args:
      module: as in `from_linen`.
      loss_fn: as in `from_linen`.
      evaluation_loss_fn: as in `from_linen`.
      evaluation_module: as in `from_linen`.
      init: random key -> variables.
      collections: variables -> the tree that `module.apply` takes.
      random_keys: key -> {random stream: key}.
    """

    def loss(
        variables: Variables, batch: Any, key: Array | None
    ) -> tuple[Any, Variables]:
        own = module if key is not None else evaluation_module or module
        now = {path: x for path, x in variables.items() if path != STEP}

        def apply(*args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            tree = collections(now)
            if key is not None and (rngs := random_keys(key)):
                kwargs.setdefault("rngs", rngs)
            state = [] if key is None else [name for name in tree if name != "params"]
            asked = [mutable] if isinstance(mutable, str) else list(mutable or ())
            if not state and not asked:
                return own.apply(tree, *args, **kwargs)
            both = mutable if mutable is True else [*state, *asked]
            output, new = own.apply(tree, *args, mutable=both, **kwargs)
            for name in state:
                leaves = traverse_util.flatten_dict(nn.meta.unbox(new[name]), sep="/")
                paths = {f"{name}/{rest}": x for rest, x in leaves.items()}
                now.update({path: x for path, x in paths.items() if path in now})
            if mutable is False:
                return output
            wanted = new if mutable is True else {n: new[n] for n in asked if n in new}
            return output, wanted

        apply.variables = collections(now)
        fn = loss_fn if key is not None else evaluation_loss_fn or loss_fn
        result = call_loss(fn, apply, batch, params=variables, key=key)
        return result, {**variables, **now}

    return PlainModel(init, _on_one_device(loss))


def _on_one_device(loss: Callable) -> Callable:
    """The loss, in which the module's own shardings do not count."""

    def run(*args: Any) -> Any:
        with unsharded():
            return loss(*args)

    return run


def _path(keys: tuple) -> str:
    return "/".join(map(str, keys))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _is_random(leaf: Any) -> bool:
    return isinstance(leaf, nnx.RngState)
