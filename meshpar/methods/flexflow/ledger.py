"""The ledger of a plan: memory of each parameter, by the split of its dims.

Every entry is the resolver's own answer for one parameter, so that what a layout
refuses is refused here, and bytes are exact. A search asks for the same entries again.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jax.tree_util import tree_flatten_with_path

from meshpar.arrays import num_bytes, parameter_path
from meshpar.errors import LayoutError
from meshpar.layouts.layout import Layout
from meshpar.layouts.param import Param
from meshpar.layouts.plan import Spec
from meshpar.layouts.resolve import make_plan
from meshpar.methods.flexflow.choices import SPLITTING
from meshpar.models.model import Model

_BESIDE, _MANY = "", 10**6


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter under some rules.

    Attributes:
      spec: axes per dim, of the parameter between steps and of its gradient.
      bytes: {kind: bytes on one device}, as of `Plan.bytes_per_device`.
    """

    spec: Spec
    bytes: Mapping[str, int]


class Ledger:
    """Entries of one model's parameters on a mesh of some sizes."""

    def __init__(
        self,
        model: Model,
        optimizer_state: Any,
        compute_dtype: Any,
        sizes: Mapping[str, int],
        required: Mapping[str, Any],
    ):
        """Prepares the ledger.

        Args:
          model: the model.
          optimizer_state: abstract state of its optimizer.
          compute_dtype: as in `meshpar.lower`.
          sizes: {axis: size} of the mesh.
          required: fields that all layouts have.
        """
        self.params, self.compute_dtype = model.params, compute_dtype
        kept = ("zero", "min_shard_size")
        fields = {name: required[name] for name in kept if name in required}
        self._fields = {**sizes, **fields}
        self._allow = _tuple(required.get("allow", ()))
        self._paths = tuple(_pairs(required.get("paths", ())))
        # Holds all axes in use, so that none shards no parameter.
        names = tuple(axis for axis in SPLITTING if sizes[axis] > 1)
        shape = tuple(_MANY * sizes[axis] for axis in names)
        self._beside = Param(shape, "float32", names)
        self._state: dict[str, list[Any]] = {path: [] for path in model.params}
        self.rest = 0
        for keys, leaf in tree_flatten_with_path(optimizer_state)[0]:
            if (path := parameter_path(keys, model.params)) is None:
                self.rest += num_bytes(leaf)
            else:
                self._state[path].append({path: leaf})
        self._entries: dict[tuple, Entry | None] = {}

    def entry(
        self, path: str, names: tuple | None, rules: Mapping[str, tuple[str, ...]]
    ) -> Entry | None:
        """A parameter under the rules for its names; None if they are refused.

        Args:
          path: of the parameter.
          names: for its dims, if the model left it unnamed.
          rules: {name of a dim: axes} for parameters.
        """
        own = self.params[path].names or ()
        rules = tuple(
            (name, rules[name]) for name in dict.fromkeys(own) if name in rules
        )
        key = path, names, rules
        if key not in self._entries:
            self._entries[key] = self._made(*key)
        return self._entries[key]

    def _made(self, path: str, names: tuple | None, rules: tuple) -> Entry | None:
        fields = dict(self._fields, params=dict(rules))
        if names is not None:
            fields["paths"] = ((f"^{re.escape(path)}$", names),)
        elif self.params[path].names is None:
            given = (pair for pair in self._paths if re.search(pair[0], path))
            fields["paths"] = tuple(given)[:1]
        allow = tuple(regex for regex in self._allow if re.search(regex, path))
        for allowed in dict.fromkeys(((), allow)):
            try:
                return self._planned(path, Layout(**fields, allow=allowed))
            except LayoutError:
                continue
        return None

    def _planned(self, path: str, layout: Layout) -> Entry:
        """The entry of one parameter as a plan resolves it."""
        params = {path: self.params[path], _BESIDE: self._beside}
        state, dtype = self._state[path], self.compute_dtype
        plan = make_plan(layout, params, state, dtype)
        kinds = {
            "parameters": plan.parameters,
            "weights": plan.weights,
            "gradients": plan.gradients,
        }
        sizes = {
            kind: leaves[path].bytes_per_device if path in leaves else 0
            for kind, leaves in kinds.items()
        }
        sizes["optimizer"] = sum(leaf.bytes_per_device for leaf in plan.optimizer)
        return Entry(plan.parameters[path].spec, sizes)


def _pairs(rules: Any) -> Any:
    return rules.items() if isinstance(rules, Mapping) else rules


def _tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
