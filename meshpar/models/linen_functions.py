"""A Flax Linen module as functions of its variables."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from flax.core import DenyList
from flax.core import scope as scopes

from meshpar.arrays import Array, Params, is_key
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.layouts.scope import unsharded
from meshpar.models.layer_stack import Key
from meshpar.models.updates import check_updates

_PARAMS = "params"
_AXES = "_axes"
"""Ending of collections in which t5x and flax.linen.partitioning keep dim names."""

_RUNNING = threading.RLock()
"""Held while a module runs: `nn.remat` makes a class then, for which Flax changes
annotations of `nn.Module` for a moment, in all threads."""

_WITHOUT_INTERMEDIATES = DenyList("intermediates")
"""The collections that `module.init` makes by default."""


@dataclasses.dataclass(frozen=True, eq=False)
class LinenFunctions:
    """A Linen module as functions of its variables, {path: array}.

    Parameters have the paths of the collection "params"; a variable of another
    collection has the collection's name before its path.

    Attributes:
      module: the module.
      args: positional example inputs; shapes will do.
      kwargs: example inputs by keyword.
      rngs: names of the random streams during training.
      sown: collections that hold one step's results, beside what `sow` fills.
    """

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    rngs: tuple[str, ...]
    sown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Read here, where no layout is in use that the example inputs might not fit.
        _ = self._keys, self._sown

    def variables(self, key: Array, mutable: Any = _WITHOUT_INTERMEDIATES) -> Any:
        """The variables of some collections that `module.init` makes."""
        keys = jax.random.split(key, 1 + len(self.rngs))
        rngs = dict(zip((_PARAMS, *self.rngs), keys, strict=True))
        args, kwargs = jax.tree.map(_zeros, (self.args, self.kwargs))
        with _RUNNING, unsharded():
            return self.module.init(rngs, *args, mutable=mutable, **kwargs)

    def abstract(self, mutable: Any = _WITHOUT_INTERMEDIATES) -> Any:
        """The shapes of `variables`."""
        run = functools.partial(self.variables, mutable=mutable)
        return jax.eval_shape(run, jax.random.key(0))

    def params(self, is_trained: Callable[[str], bool]) -> dict[str, Param]:
        """{path: Param} of the variables, parameters first.

        Args:
          is_trained: path -> whether a parameter is trained.
        """
        variables = self.abstract()
        params = {}
        for path, collection, leaf in self._flat(variables):
            names = _separate_names(variables.get(collection + _AXES, {}))
            if not hasattr(nn.meta.unbox(leaf), "dtype"):
                raise MeshparError(
                    f"the variable {path!r} is a {type(leaf).__name__}, no array; keep "
                    "each array in a variable of its own, or name the collection in "
                    "sown=(...) if it holds one step's results"
                )
            param = _param(leaf, names.get(_path_within(collection, path)))
            is_state = collection != _PARAMS
            floating = jnp.issubdtype(param.dtype, jnp.inexact)
            params[path] = dataclasses.replace(
                param,
                trained=floating and not is_state and is_trained(path),
                is_state=is_state,
            )
        return params

    def init(self, key: Array) -> Params:
        """Variables from a random key."""
        flat = self._flat(self.variables(key))
        with unsharded():
            return {path: nn.meta.unbox(leaf) for path, _, leaf in flat}

    @functools.cached_property
    def _keys(self) -> dict[str, tuple[str, ...]]:
        """{path: its keys}; names of variables may hold a "/" (nn.SpectralNorm)."""
        variables = self.abstract()
        every = (traverse_util.flatten_dict(tree) for tree in variables.values())
        return {"/".join(keys): keys for tree in every for keys in tree}

    @functools.cached_property
    def _sown(self) -> frozenset[str]:
        """Paths of the variables that `sow` fills while the module is initialized."""
        found: set[str] = set()

        def recorded(module: nn.Module, col: str, name: str, *rest: Any, **more: Any):
            found.add(path_in(col, "/".join((*module.path, name))))
            return type(module).sow(module, col, name, *rest, **more)

        def interceptor(run: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            module = context.module  # This instance alone: its class is everybody's.
            own = functools.partial(recorded, module)
            object.__setattr__(module, "sow", own)
            return run(*args, **kwargs)

        with nn.intercept_methods(interceptor):
            self.abstract()
        return frozenset(found)

    def _flat(self, variables: Mapping) -> Iterator[tuple[str, str, Any]]:
        """(path, collection, leaf) of all variables that training carries along."""
        for collection in sorted(variables, key=lambda name: (name != _PARAMS, name)):
            if collection in self.sown or collection.endswith(_AXES):
                continue
            leaves = traverse_util.flatten_dict(variables[collection], sep="/")
            for rest, leaf in leaves.items():
                if (path := path_in(collection, rest)) not in self._sown:
                    yield path, collection, leaf

    def results(self, variables: Mapping) -> Iterator[tuple[str, str]]:
        """(collection, path within it) of the variables that hold results."""
        for collection, tree in variables.items():
            for rest in traverse_util.flatten_dict(tree, sep="/"):
                is_sown = path_in(collection, rest) in self._sown
                if is_sown or collection in self.sown:
                    yield collection, rest

    def collections(self, params: Params, known: Mapping[str, Param]) -> dict:
        """{collection: nested tree} of {path: array}.

        Args:
          params: the variables.
          known: says which of them are parameters.
        """
        flat: dict[str, dict[tuple, Array]] = {}
        for path, x in params.items():
            collection, rest = _PARAMS, path
            if known[path].is_state:
                collection, rest = path.split("/", 1)
            keys = self.keys_of(rest)
            flat.setdefault(collection, {})[keys] = x
        return {
            collection: traverse_util.unflatten_dict(leaves)
            for collection, leaves in flat.items()
        }

    def keys_of(self, path: str) -> tuple[str, ...]:
        """Keys of a variable within its collection."""
        return self._keys.get(path) or tuple(path.split("/"))

    def random_keys(self, key: Key) -> dict[str, Array]:
        """{random stream: key}; none without a key."""
        if key is None:
            return {}
        keys = jax.random.split(key, max(1, len(self.rngs)))
        return dict(zip(self.rngs, keys, strict=False))


def path_in(collection: str, path: str) -> str:
    """The path of a variable of a collection."""
    return path if collection == _PARAMS else f"{collection}/{path}"


def _path_within(collection: str, path: str) -> str:
    """The inverse of `path_in`."""
    return path if collection == _PARAMS else path.removeprefix(f"{collection}/")


def _zeros(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or is_key(leaf):
        return leaf
    return jnp.zeros(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _separate_names(axes: Mapping) -> dict[str, tuple]:
    """{path: dim names} that are kept beside a collection, as in "params_axes"."""
    flat = traverse_util.flatten_dict(dict(axes), sep="/")
    return {path.removesuffix("_axes"): tuple(x.names) for path, x in flat.items()}


def _param(leaf: Any, separate: tuple | None) -> Param:
    """The Param of a variable, which Linen may have boxed with its dim names."""
    boxed = isinstance(leaf, nn.meta.AxisMetadata)
    names = getattr(leaf, "names", None) if boxed else separate
    x = nn.meta.unbox(leaf)
    return Param(x.shape, x.dtype, None if names is None else tuple(names))


class Apply:
    """`module.apply` with variables and random keys; keeps what it updates.

    Attributes:
      updates: {path: new value} of variables that calls have changed so far.
    """

    def __init__(
        self,
        functions: LinenFunctions,
        params: Params,
        known: Mapping[str, Param],
        key: Key,
    ) -> None:
        self._functions, self._module, self._key = functions, functions.module, key
        self._params = {path: x for path, x in params.items() if path in known}
        self._known = known
        state = (path for path in self._params if known[path].is_state)
        self._collections = tuple(dict.fromkeys(p.split("/", 1)[0] for p in state))
        self.updates: Params = {}

    @property
    def variables(self) -> dict[str, Any]:
        """{collection: nested tree}, as `module.apply` takes them."""
        return self._functions.collections(self._params | self.updates, self._known)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; takes the arguments of `module.apply` after the variables.

        With `mutable=` the result is (output, {collection: tree}), as in Flax.

        Raises:
          MeshparError: it changes a parameter, or the form of its state.
        """
        variables, asked = self.variables, kwargs.pop("mutable", False)
        if random_keys := self._functions.random_keys(self._key):
            kwargs.setdefault("rngs", random_keys)
        kept = () if self._key is None else self._collections
        mutable = scopes.union_filters(asked, kept)
        if mutable:
            kwargs["mutable"] = mutable
        with _RUNNING:
            result = self._module.apply(variables, *args, **kwargs)
        if not mutable:
            return result
        output, new = result
        for collection in {*kept, _PARAMS} & {*new}:
            leaves = traverse_util.flatten_dict(new[collection], sep="/")
            self._keep(collection, leaves)
        if not asked:
            return output
        return output, {
            name: x for name, x in new.items() if scopes.in_filter(asked, name)
        }

    def _keep(self, collection: str, leaves: Mapping[str, Array]) -> None:
        for rest, x in leaves.items():
            path = path_in(collection, rest)
            x = nn.meta.unbox(x)
            if path in self._params and x is not self._params[path]:
                check_updates({path: x}, self._known)
                self.updates[path] = x
