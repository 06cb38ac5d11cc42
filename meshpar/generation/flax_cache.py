"""Caches of a user's own Flax model: Linen's collection "cache", NNX's `nnx.Cache`."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from meshpar.arrays import Array, Params
from meshpar.models.cached import CachedModel, RunCached
from meshpar.models.model import Model
from meshpar.models.nnx_functions import path_of

Names = Mapping[str, tuple[str | None, ...]]
"""{regex of a path: dim names}."""
_LENGTH = "cache_length"
FLAX_NAMES: Names = {
    r"(^|/)cached_(key|value)$": ("cache_batch", _LENGTH, "kv_heads", "head_dim")
}
"""Dim names of the caches of Flax's own attention, perhaps with stacked layers."""

_CACHE = "cache"

Call = Callable[..., Array]
"""(module, tokens_BL, positions_BL) -> logits_BLV; Linen's `apply` for the module."""


def _plain_call(module: Callable, tokens_BL: Array, positions_BL: Array) -> Array:
    del positions_BL
    return module(tokens_BL)


def linen_cache(
    model: Model,
    module: nn.Module,
    call: Call = _plain_call,
    *,
    max_length: int = 0,
    names: Names = FLAX_NAMES,
) -> CachedModel:
    """The cache of a Linen model that keeps it in the collection "cache".

    All sequences advance together, one token at a time, as Flax's attention with
    `decode=True` does: its cache has one index for all rows.

    Args:
      model: from `from_linen`.
      module: its module as it decodes, such as one with `decode=True`.
      call: (apply, tokens_BL, positions_BL) -> logits_BLV. It is also called with whole
        sequences and `module.init`, which makes the cache.
      max_length: most tokens of a sequence; 0 for no limit.
      names: {regex of a path: dim names} of the arrays of the cache, for the rules of
        activations; fewer names than dims are those of the last dims. Other arrays are
        whole on all devices.
    """

    def init(batch_size: int, length: int, dtype: Any) -> Params:
        del dtype
        tokens_BL = jnp.zeros((batch_size, length), jnp.int32)
        positions_BL = jnp.broadcast_to(jnp.arange(length)[None], tokens_BL.shape)

        def variables() -> Any:
            initialize = functools.partial(module.init, jax.random.key(0))
            return call(initialize, tokens_BL, positions_BL)[_CACHE]

        flat = traverse_util.flatten_dict(jax.eval_shape(variables), sep="/")
        flat = {path: nn.meta.unbox(x) for path, x in flat.items()}
        return {path: jnp.zeros(x.shape, x.dtype) for path, x in flat.items()}

    def run(
        params: Params, cache: Params, tokens_BL: Array, positions_BL: Array
    ) -> tuple[Array, Params]:
        variables = dict(model.bind(params).variables)
        variables[_CACHE] = traverse_util.unflatten_dict(cache, sep="/")
        changed: dict[str, Any] = {}

        def apply(*args: Any, **kwargs: Any) -> Array:
            output, new = module.apply(variables, *args, mutable=[_CACHE], **kwargs)
            changed.update(new)
            return output

        logits_BLV = call(apply, tokens_BL, positions_BL)
        flat = traverse_util.flatten_dict(changed[_CACHE], sep="/")
        return logits_BLV, {path: nn.meta.unbox(x) for path, x in flat.items()}

    return _cached(init, names, run, max_length)


def nnx_cache(
    model: Model,
    init_cache: Callable[[nnx.Module, int, int], None],
    call: Call = _plain_call,
    *,
    max_length: int = 0,
    names: Names = FLAX_NAMES,
) -> CachedModel:
    """The cache of an NNX model that keeps it in variables of type `nnx.Cache`.

    All sequences advance together, as with `linen_cache`.

    Args:
      model: from `from_nnx`.
      init_cache: (module, batch_size, length) gives the module its variables, such as
        by `init_cache` of each `nnx.MultiHeadAttention`, and lets it decode.
      call: (module, tokens_BL, positions_BL) -> logits_BLV.
      max_length: as in `linen_cache`.
      names: as in `linen_cache`.
    """

    def init(batch_size: int, length: int, dtype: Any) -> Params:
        del dtype

        def variables(params: Params) -> Params:
            module = model.bind(params)
            init_cache(module, batch_size, length)
            return _cache_of(module)

        params = {
            path: jax.ShapeDtypeStruct(param.shape, param.dtype)
            for path, param in model.params.items()
        }
        shapes = jax.eval_shape(variables, params)
        return {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items()}

    def run(
        params: Params, cache: Params, tokens_BL: Array, positions_BL: Array
    ) -> tuple[Array, Params]:
        module = model.bind(params)
        init_cache(module, len(tokens_BL), _length(cache, names))
        state = [(k, x.replace(cache[path_of(k)])) for k, x in _variables(module)]
        nnx.update(module, nnx.from_flat_state(state))
        logits_BLV = call(module, tokens_BL, positions_BL)
        return logits_BLV, _cache_of(module)

    return _cached(init, names, run, max_length)


def _variables(module: nnx.Module) -> list[tuple[tuple, nnx.Variable]]:
    """(keys, variable) of the cache."""
    return list(nnx.to_flat_state(nnx.state(module, nnx.Cache)))


def _cache_of(module: nnx.Module) -> Params:
    return {path_of(keys): x.get_value() for keys, x in _variables(module)}


def _length(cache: Params, names: Names) -> int:
    """The length of a cache; 1 if its arrays name none."""
    for path, x in cache.items():
        dims = _names_of(path, x.ndim, names) or ()
        if _LENGTH in dims:
            return x.shape[dims.index(_LENGTH)]
    return 1


def _names_of(path: str, num_dims: int, names: Names) -> tuple | None:
    for regex, dims in names.items():
        if re.search(regex, path):
            return (None,) * (num_dims - len(dims)) + dims
    return None


def _cached(
    init: Callable, names: Names, run: RunCached, max_length: int
) -> CachedModel:
    """A cached model whose rows advance together."""
    names_of = functools.partial(_names_of, names=names)
    return CachedModel(init, names_of, run, max_length, rows_advance_together=True)
