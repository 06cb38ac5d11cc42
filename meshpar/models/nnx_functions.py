"""A Flax NNX module as functions of its variables, without any array of its own."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from meshpar.arrays import Array, Params, is_key
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.models.layer_stack import Key, refuse_updates
from meshpar.models.updates import changed, check_updates

MakeModel = Callable[[nnx.Rngs], nnx.Module]

_DIM_NAMES = ("out_sharding", "sharding_names", "sharding")
"""Keys of an NNX variable's metadata that may hold its dim names, newest first."""


class AbstractModule(NamedTuple):
    """A module split into its structure and its leaves.

    Attributes:
      graph: the structure.
      leaves: (keys, variable or array) in the order of NNX, ShapeDtypeStructs inside.
    """

    graph: nnx.GraphDef
    leaves: list[tuple[tuple, Any]]


def abstract_modules(
    make_model: MakeModel, parts: Callable[[nnx.Module], Sequence[nnx.Module]]
) -> list[AbstractModule]:
    """The module that `make_model` builds, and parts of it; runs no arithmetic.

    Args:
      make_model: builds the module.
      parts: the parts of the module to return after the whole.
    """
    graphs: list[nnx.GraphDef] = []

    def build() -> list[nnx.State]:
        whole = make_model(nnx.Rngs(0))
        if not isinstance(whole, nnx.Module):
            raise MeshparError(
                f"the function that builds the model returned a "
                f"{type(whole).__name__}; return an nnx.Module"
            )
        _mark_arrays(whole)
        splits = [nnx.split(module) for module in (whole, *parts(whole))]
        graphs.extend(graph for graph, _ in splits)
        return [state for _, state in splits]

    with nnx.use_eager_sharding(False):
        states = jax.eval_shape(build)
    return [
        AbstractModule(graph, list(nnx.to_flat_state(state)))
        for graph, state in zip(graphs, states, strict=True)
    ]


def _mark_arrays(module: nnx.Module) -> None:
    """Marks arrays among the attributes as data; NNX overlooks those of a trace."""
    for _, part in nnx.iter_modules(module):
        for name, value in list(vars(part).items()):
            if isinstance(value, jax.Array):
                setattr(part, name, nnx.data(value))


def init_variables(make_model: MakeModel, key: Array) -> Params:
    """{path: array} of a fresh module, without its random state."""
    with nnx.use_eager_sharding(False):
        module = make_model(nnx.Rngs(key))
    _mark_arrays(module)
    leaves = nnx.to_flat_state(nnx.state(module))
    return {
        path_of(keys): jnp.asarray(_value(leaf))
        for keys, leaf in leaves
        if not isinstance(leaf, nnx.RngState)
    }


def from_instance(module: nnx.Module) -> tuple[MakeModel, Params]:
    """(what builds modules like a given one, {path: array} of its variables).

    The modules that it builds have zeros in the place of all variables.
    """
    graph, state = nnx.split(module)
    leaves = list(nnx.to_flat_state(state))

    def zeros(leaf: Any) -> Any:
        value = _value(leaf)
        if is_key(value):
            key = jax.random.key(0)
            return _filled(
                leaf, jax.random.split(key, value.shape) if value.shape else key
            )
        return _filled(leaf, jnp.zeros(value.shape, value.dtype))

    def make_model(rngs: nnx.Rngs) -> nnx.Module:
        del rngs
        return nnx.merge(
            graph, nnx.from_flat_state([(keys, zeros(leaf)) for keys, leaf in leaves])
        )

    variables = {
        path_of(keys): _value(leaf)
        for keys, leaf in leaves
        if not isinstance(leaf, nnx.RngState)
    }
    return make_model, variables


def path_of(keys: Iterable[Any]) -> str:
    """The path of a variable from its keys."""
    return "/".join(map(str, keys))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _filled(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


class NnxFunctions:
    """An abstract module as a function of its variables.

    Attributes:
      prefix: first part of every path.
      stacked: whether every variable has a leading dim that the module does not have
        when it runs.
      leaves: {path: (keys, variable or array)}, random state aside.
    """

    def __init__(
        self, module: AbstractModule, prefix: str = "", stacked: bool = False
    ) -> None:
        self.prefix, self.stacked = prefix, stacked
        self._graph = module.graph
        self.leaves = {
            prefix + path_of(keys): (keys, leaf)
            for keys, leaf in module.leaves
            if not isinstance(leaf, nnx.RngState)
        }
        self._rngs = [
            (keys, leaf)
            for keys, leaf in module.leaves
            if isinstance(leaf, nnx.RngState)
        ]

    def params(self, is_trained: Callable[[tuple, Any], bool]) -> dict[str, Param]:
        """{path: Param}.

        Args:
          is_trained: (keys, floating-point variable) -> whether it is trained.
        """
        params = {}
        for path, (keys, leaf) in self.leaves.items():
            param = self._param(path)
            floating = jnp.issubdtype(param.dtype, jnp.inexact)
            if floating and is_trained(keys, leaf):
                param = dataclasses.replace(param, trained=True)
            params[path] = param
        return params

    def __call__(
        self, params: Params, key: Key, graph: nnx.GraphDef | None = None
    ) -> nnx.Module:
        """The module.

        Variables that are not given stay abstract: using one fails.

        Args:
          params: {path: array}.
          key: random key.
          graph: the structure; by default that of the module as it was given, or in
            evaluation mode without a key.
        """
        rng_key = jax.random.key(0) if key is None else key
        leaves = [
            (keys, _filled(leaf, params[path]) if path in params else leaf)
            for path, (keys, leaf) in self.leaves.items()
        ]
        rngs = [
            (keys, leaf.replace(self._reseeded(i, leaf, rng_key)))
            for i, (keys, leaf) in enumerate(self._rngs)
        ]
        state = nnx.from_flat_state(leaves + rngs)
        if graph is not None:
            return nnx.merge(graph, state)
        module = nnx.merge(self._graph, state)
        if key is None:
            module.eval()
        return module

    def run(
        self, fn: Callable[[nnx.Module], Any], params: Params, key: Key
    ) -> tuple[Any, Params]:
        """(fn(module), {path: new value} of the state that it changed).

        Raises:
          MeshparError: it changes a parameter, or the form of its state.
        """
        module = self(params, key)
        result = fn(module)
        updates = self.updates(module, params)
        known = {path: self._param(path) for path in updates}
        if not all(param.is_state for param in known.values()):
            updates = self._changed(updates, fn, params, key)
        check_updates(updates, known)
        return result, updates

    def run_layered(
        self,
        fn: Callable[[nnx.Module], Any],
        params: Params,
        key: Key,
        graph: nnx.GraphDef | None = None,
    ) -> Any:
        """fn(module) for a part of a model that runs layer by layer.

        Takes the arguments of `__call__` after the function.

        Raises:
          MeshparError: it changes a variable, or leaves a new one.
        """
        module = self(params, key, graph)
        result = fn(module)
        updates = self.updates(module, params)
        refuse_updates(self._changed(updates, fn, params, key, graph))
        for keys, leaf in nnx.to_flat_state(nnx.state(module)):
            path = self.prefix + path_of(keys)
            if path not in self.leaves and not isinstance(leaf, nnx.RngState):
                raise MeshparError(
                    f"the model sows {path!r} where it runs layer by layer, and the "
                    "loss function would not see it; return it with the activations, "
                    "or give the loss function alone, without layers"
                )
        return result

    def _changed(
        self,
        updates: Params,
        fn: Callable,
        params: Params,
        key: Key,
        graph: nnx.GraphDef | None = None,
    ) -> Params:
        """The updates that are not the variables themselves, handed through."""

        def rerun(params: Params) -> Params:
            module = self(params, key, graph)
            fn(module)
            return self.updates(module, params)

        return changed(updates, rerun, params)

    def updates(self, module: nnx.Module, params: Params) -> Params:
        """{path: new value} of the variables that a module replaced while it ran.

        Args:
          module: from `__call__`, after it ran.
          params: what it was made with.
        """
        after = {
            self.prefix + path_of(keys): _value(leaf)
            for keys, leaf in nnx.to_flat_state(nnx.state(module))
        }
        return {
            path: after[path]
            for path, x in params.items()
            if path in after and after[path] is not x
        }

    def _param(self, path: str) -> Param:
        """The Param of a variable that is not trained."""
        leaf = self.leaves[path][1]
        value, is_state = _value(leaf), not isinstance(leaf, nnx.Param)
        return Param(value.shape, value.dtype, _dim_names(leaf), False, is_state)

    def _reseeded(self, index: int, variable: nnx.Variable, key: Array) -> Array:
        """A random stream's key from `key`, or its counter at 0."""
        value = variable.get_value()
        shape = value.shape[1:] if self.stacked else value.shape
        if not isinstance(variable, nnx.RngKey):
            return jnp.zeros(shape, value.dtype)
        key = jax.random.fold_in(key, index)
        return jax.random.split(key, shape) if shape else key


def _dim_names(leaf: Any) -> tuple | None:
    metadata = leaf.get_metadata() if isinstance(leaf, nnx.Variable) else {}
    names = next((metadata[key] for key in _DIM_NAMES if metadata.get(key)), None)
    if isinstance(names, NamedSharding):
        names = names.spec
    return None if names is None else tuple(names)
