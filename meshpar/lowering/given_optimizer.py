"""An optimizer state of a user's own loop, in the form of a program, and back."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.errors import MeshparError, nearest
from meshpar.lowering.given_params import check_numbers, is_variable, paths_of
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.nesting import NestedState
from meshpar.lowering.optimizer import Optimizer, own_state
from meshpar.models.model import Model

_COLLECTION = "params"
"""Key of the parameters where an optimizer was started with all of `module.init`."""


def check_one_optimizer(optimizer: Any, mode: str) -> None:
    """Refuses a user's optimizer where several of them train.

    Args:
      optimizer: of the user; None for none.
      mode: the mode in words, which has one for each replica or island; "" for none.

    Raises:
      MeshparError: there are both.
    """
    if optimizer is not None and mode:
        raise MeshparError(
            f"{mode}: each has an optimizer state of its own, and a plain loop has "
            "another one; leave optimizer out"
        )


@dataclasses.dataclass(frozen=True)
class OwnOptimizerState:
    """The optimizer state of the module's own tensors, as a user's loop has it.

    Attributes:
      leaves: {path in the state: ShapeDtypeStruct}, such as "0/mu/dense/kernel".
      forms: this form, and the one with layers stacked in the order of the model.
    """

    leaves: Mapping[str, jax.ShapeDtypeStruct]
    forms: NestedState

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        model: Model,
        trained: Mapping[str, jax.ShapeDtypeStruct],
        rows: LayerRows,
    ) -> "OwnOptimizerState":
        """The state of an optimizer.

        Args:
          optimizer: of a program.
          model: gives the keys of parameters in nested dicts.
          trained: the parameters that are trained, layers stacked.
          rows: the module's path of every row of a stack.
        """
        rows = rows.only(trained)
        keys = {path: model.keys_of(path) for path in (*trained, *rows.places)}
        state, forms = own_state(optimizer.transformation, trained, keys, rows)
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        paths = paths_of([keys for keys, _ in leaves])
        return cls(dict(zip(paths, (x for _, x in leaves), strict=True)), forms)

    def stacked(self, given: Any) -> Any:
        """A user's state with layers stacked in the order of the model.

        Args:
          given: an optax state of nested dicts or of an `nnx.State`, or an
            `nnx.Optimizer`.

        Raises:
          MeshparError: it is the state of another optimizer, or of other parameters.
        """
        found = self._found(given)
        for path, like in self.leaves.items():
            shape, dtype = jnp.shape(found[path]), jnp.result_type(found[path])
            if shape != like.shape:
                raise MeshparError(
                    f"the optimizer state {path} is given as {list(shape)}, and the "
                    f"program's has {list(like.shape)}"
                )
            check_numbers(f"the optimizer state {path}", dtype, like.dtype)
        # Copies: a step takes the memory of its state.
        leaves = [jnp.array(found[path]) for path in self.leaves]
        return self.forms.store(jax.tree.unflatten(self.forms.nested, leaves))

    def put(self, given: Any, state: Any, step: int) -> Any:
        """A user's state with the numbers of a program.

        Args:
          given: as in `stacked`; an `nnx.Optimizer` is changed in place.
          state: layers stacked in the order of the model.
          step: steps done, for an `nnx.Optimizer`.

        Raises:
          MeshparError: as in `stacked`.
        """
        found = self._found(given)
        values = self.forms.nested.flatten_up_to(self.forms.nest(state))
        new = {
            path: jnp.asarray(x, jnp.result_type(found[path]))
            for path, x in zip(self.leaves, values, strict=True)
        }
        tree = _state_of(given)
        keys, leaves = zip(*_flat(tree), strict=True) if new else ((), ())
        pairs = list(zip(leaves, map(new.get, self._own_paths(keys)), strict=True))
        if isinstance(given, nnx.Optimizer):
            for variable, x in pairs:
                variable.set_value(x)
            given.step.set_value(jnp.asarray(step, given.step.get_value().dtype))
            return given
        filled = [leaf.replace(x) if is_variable(leaf) else x for leaf, x in pairs]
        structure = jax.tree.structure(tree, is_leaf=is_variable)
        return nn.meta.replace_boxed(given, jax.tree.unflatten(structure, filled))

    def _found(self, given: Any) -> dict[str, Any]:
        """{path in the state: array} of a user's state.

        Raises:
          MeshparError: it has other paths.
        """
        leaves = _flat(_state_of(given))
        paths = self._own_paths([keys for keys, _ in leaves])
        values = (x.get_value() if is_variable(x) else x for _, x in leaves)
        found = dict(zip(paths, values, strict=True))
        wrong = [
            (path, f"{what} {path} ({nearest(path, others)})")
            for what, own, others in (
                ("lacks", self.leaves, found),
                ("has also", found, self.leaves),
            )
            for path in own
            if path not in others
        ]
        if wrong:
            raise MeshparError(
                f"the given optimizer state {wrong[0][1]}: give the state of the same "
                "optax transformation that `lower` got, for the parameters that the "
                "program trains"
            )
        return found

    def _own_paths(self, keys: Iterable[tuple]) -> list[str]:
        """Paths of a user's leaves; the key of the collection may stand in them."""

        def own(path: str) -> str:
            parts = path.split("/")
            for place, part in enumerate(parts):
                shorter = "/".join(parts[:place] + parts[place + 1 :])
                if part == _COLLECTION and shorter in self.leaves:
                    return path if path in self.leaves else shorter
            return path

        return [own(path) for path in paths_of(list(keys))]


def steps_done(optimizer: Any) -> int:
    """The steps that an `nnx.Optimizer` has done; 0 for an optax state."""
    is_nnx = isinstance(optimizer, nnx.Optimizer)
    return int(optimizer.step.get_value()) if is_nnx else 0


def _state_of(given: Any) -> Any:
    """The optax state, without boxes of dim names; that of an optimizer itself."""
    is_nnx = isinstance(given, nnx.Optimizer)
    return given.opt_state if is_nnx else nn.meta.unbox(given)


def _flat(tree: Any) -> list[tuple[tuple, Any]]:
    """(keys, leaf) of a tree, with NNX variables as leaves."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]
