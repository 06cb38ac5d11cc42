"""Finite states: a state with a number that is none is neither saved nor resumed."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import Array
from meshpar.lowering.state import TrainState
from meshpar.lowering.train_program import TrainProgram


class FiniteCheck:
    """Looks for numbers of a training state that are not finite, where they are.

    Trained parameters must be finite, and arrays of the optimizer and of the mode, such
    as weights that travel between replicas or the store of islands. Other parameters
    and scalars may be infinite, as a best loss that is not known yet, but not NaN.
    """

    def __init__(self, program: TrainProgram):
        """Compiles nothing yet.

        Args:
          program: of the states.
        """
        params = program.model.params.items()
        self._trained = {path for path, param in params if param.trained}
        self._extra_numbers = program.extra_numbers
        whole = NamedSharding(program.mesh, PartitionSpec())
        self._all_good = jax.jit(_all_good, static_argnums=1, out_shardings=whole)

    def problem(self, state: TrainState, extra: Any = None) -> str:
        """The first tensor with such a number; "" if there is none.

        All processes of the program call it, and get the same.

        Args:
          state: in the order of the model, with or without replicas.
          extra: of the mode, from `TrainProgram.extra_state`; None without.
        """
        found = list(self._tensors(state, extra))
        for name, x, strict in found:
            if isinstance(x, np.ndarray) and not _is_good(x, strict):
                return name
        found = [row for row in found if not isinstance(row[1], np.ndarray)]
        arrays = [_on_device(x) for _, x, _ in found]
        good = self._all_good(arrays, tuple(strict for *_, strict in found))
        names = (name for name, *_ in found)
        pairs = zip(names, good.tolist(), strict=True)
        return next((name for name, is_good in pairs if not is_good), "")

    def _tensors(self, state: TrainState, extra: Any) -> Iterator[tuple]:
        """(name, array, whether it must be finite) of float tensors."""
        rows = [(path, x, path in self._trained) for path, x in state.params.items()]
        numbers = None if extra is None else self._extra_numbers(extra)
        trees = {"optimizer state": state.optimizer_state, "state of the mode": numbers}
        rows += [
            (f"{kind} {jax.tree_util.keystr(path)}", x, jnp.ndim(x) > 0)
            for kind, tree in trees.items()
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        ]
        return (row for row in rows if jnp.issubdtype(row[1].dtype, jnp.floating))


def _on_device(x: Any) -> Any:
    """The array in the memory of its devices, where it is in that of the host."""
    sharding = getattr(x, "sharding", None)
    default = sharding and next(iter(sharding.device_set)).default_memory().kind
    if sharding is None or sharding.memory_kind in (None, default):
        return x
    return jax.device_put(x, sharding.with_memory_kind(default))


def _all_good(arrays: list[Array], strict: tuple[bool, ...]) -> Array:
    if not arrays:
        return jnp.ones(0, bool)
    return jnp.stack(list(map(_is_good, arrays, strict)))


def _is_good(x: Any, strict: bool) -> Any:
    """Whether an array, of numpy or jax, is finite, or holds no NaN if not `strict`."""
    lib = np if isinstance(x, np.ndarray) else jnp
    return (lib.isfinite(x) if strict else ~lib.isnan(x)).all()
