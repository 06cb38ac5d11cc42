"""A parameter with more rows than the devices hold: the rows of each batch are pulled.

The model has a parameter of few rows, the slots. The table in host memory has all rows,
with their optimizer state. Before a step the rows that its batch needs come into slots,
and rows that it does not need make room for them. The program trains the slots as any
other parameter, under any layout.

Source: Cui et al., GeePS, EuroSys 2016, sections 3.2 and 3.3 (a parameter cache in the
  device's memory, backed by host memory).
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshpar.arrays import Array, parameter_path
from meshpar.errors import MeshparError
from meshpar.lowering.state import TrainState
from meshpar.lowering.train_program import TrainProgram

_VALUES = "values"


class RowTable:
    """All rows of one parameter, in the memory of the host.

    A row that no batch needs is not updated: neither weight decay nor the decay of an
    optimizer's moments reaches it. Optimizers that leave a row with a zero gradient as
    it is, such as SGD and Adagrad, train the table as if it were on the devices.

    Attributes:
      arrays: {name: array [rows, ...]}, the values and their optimizer state, to be
        saved beside a checkpoint. Rows in slots are older here, until `flush`.
      fetched: rows that came to the devices so far.
      returned: rows that came back so far.
    """

    def __init__(
        self,
        program: TrainProgram,
        state: TrainState,
        path: str,
        values: np.ndarray | Mapping[str, np.ndarray],
    ):
        """Makes a table; its slots are empty.

        Args:
          program: trains the slots.
          state: of the program, whose optimizer state every row starts from.
          path: of the parameter [slots, ...].
          values: [rows, ...], which may be mapped from a file and is written to; or
            `arrays` of another table.

        Raises:
          MeshparError: a parameter that does not exist or has other rows, an optimizer
            that is not elementwise there, or several processes.
        """
        self._path, self._slots = path, _num_slots(program, path)
        _check_optimizer(program, path)
        given = values if isinstance(values, Mapping) else {_VALUES: values}
        leaves = self._leaves(state)
        for name, x in given.items():
            like = leaves.get(name)
            if like is None or (x.shape[1:], x.dtype) != (like.shape[1:], like.dtype):
                slots = leaves[_VALUES]
                raise MeshparError(
                    f"{name} {x.dtype}{list(x.shape)} does not go with {path} "
                    f"{slots.dtype}{list(slots.shape)} and its optimizer; give rows of "
                    "the same shape and dtype, and the optimizer that made them"
                )
        rows = len(given[_VALUES])
        self.arrays: dict[str, np.ndarray] = {
            name: given[name] if name in given else _every_row(name, x, rows)
            for name, x in leaves.items()
        }
        self.fetched = self.returned = 0
        self._write = jax.jit(
            _write,
            donate_argnums=0,
            out_shardings={name: x.sharding for name, x in leaves.items()},
        )
        self._row_in = np.full(self._slots, -1)
        self._last_used = np.zeros(self._slots, int)
        self._swaps = 0

    def swap(self, state: TrainState, ids: Any) -> tuple[TrainState, np.ndarray]:
        """Brings the rows of a batch into slots.

        Args:
          state: the newest state; donated.
          ids: integers [...], rows that the next step needs.

        Returns:
          (the state, int32 slots [...] to put in the place of ids).

        Raises:
          MeshparError: a row that the table lacks, or more rows than slots.
        """
        ids = np.asarray(ids)
        needed, places = np.unique(ids, return_inverse=True)
        rows = len(self.arrays[_VALUES])
        if needed.size and (needed[0] < 0 or needed[-1] >= rows):
            raise MeshparError(
                f"ids from {needed[0]} to {needed[-1]}, and the table has rows 0 to "
                f"{rows - 1}"
            )
        if needed.size > self._slots:
            raise MeshparError(
                f"a batch needs {needed.size} rows, and {self._path} has {self._slots} "
                "slots; give the model more, or the batch fewer ids"
            )
        self._swaps += 1
        held = np.isin(self._row_in, needed)
        missing = np.setdiff1d(needed, self._row_in[held])
        free = np.flatnonzero(~held)
        # Empty slots have never been used, and rows that were not used for long leave.
        free = free[np.argsort(self._last_used[free], kind="stable")][: missing.size]
        self._take_back(state, free[self._row_in[free] >= 0])
        state = self._bring(state, free, missing)
        self._row_in[free] = missing
        self._last_used[np.isin(self._row_in, needed)] = self._swaps
        by_row = np.argsort(self._row_in)
        slots = by_row[np.searchsorted(self._row_in, needed, sorter=by_row)]
        return state, slots[places].reshape(ids.shape).astype(np.int32)

    def flush(self, state: TrainState) -> None:
        """Writes the rows in slots to `arrays`; they stay in their slots.

        Args:
          state: the newest state.
        """
        self._take_back(state, np.flatnonzero(self._row_in >= 0))

    def _leaves(self, state: TrainState) -> dict[str, Any]:
        """{name: array [slots, ...]} of a state."""
        tree = state.optimizer_state
        keyed = jax.tree_util.tree_flatten_with_path(tree)[0]
        own = {
            jax.tree_util.keystr(keys): x
            for keys, x in keyed
            if x.shape and parameter_path(keys, state.params) == self._path
        }
        return {_VALUES: state.params[self._path], **own}

    def _with_leaves(self, state: TrainState, leaves: dict[str, Any]) -> TrainState:
        def new(keys: Any, x: Any) -> Any:
            return leaves.get(jax.tree_util.keystr(keys), x)

        return state._replace(
            params={**state.params, self._path: leaves[_VALUES]},
            optimizer_state=jax.tree_util.tree_map_with_path(
                new, state.optimizer_state
            ),
        )

    def _take_back(self, state: TrainState, slots: np.ndarray) -> None:
        """Copies slots to their rows in host memory."""
        if not slots.size:
            return
        found = _read(self._leaves(state), self._padded(slots))
        for name, x in found.items():
            self.arrays[name][self._row_in[slots]] = np.asarray(x)[: slots.size]
        self.returned += slots.size

    def _bring(
        self, state: TrainState, slots: np.ndarray, rows: np.ndarray
    ) -> TrainState:
        """The state with rows of the table in some slots."""
        if not slots.size:
            return state
        padded = self._padded(slots)
        new = {
            name: np.resize(x[rows], (len(padded), *x.shape[1:]))
            for name, x in self.arrays.items()
        }
        self.fetched += slots.size
        return self._with_leaves(state, self._write(self._leaves(state), padded, new))

    def _padded(self, slots: np.ndarray) -> np.ndarray:
        """Slots up to a power of two, so that few programs are compiled."""
        size = 1 << (slots.size - 1).bit_length()
        return np.append(slots, np.full(size - slots.size, self._slots))


@jax.jit
def _read(leaves: dict[str, Any], slots: Array) -> dict[str, Any]:
    """The rows in some slots; any rows for slots that do not exist."""
    return {name: x.at[slots].get(mode="clip") for name, x in leaves.items()}


def _write(
    leaves: dict[str, Any], slots: Array, rows: dict[str, Any]
) -> dict[str, Any]:
    """The leaves with rows in some slots; slots that do not exist are left out."""
    return {
        name: x.at[slots].set(rows[name], mode="drop") for name, x in leaves.items()
    }


def _num_slots(program: TrainProgram, path: str) -> int:
    """Slots of the parameter.

    Raises:
      MeshparError: it is no trained parameter that one process holds on its devices.
    """
    leaf = program.plan.parameters.get(path)
    trained = path in program.plan.gradients
    if leaf is None or not trained or not leaf.shape:
        known = ", ".join(sorted(program.plan.gradients))
        raise MeshparError(f"{path} is no trained parameter with rows; use {known}")
    on_host = any(program.plan.host_bytes().values())
    if program.abstract_state.params[path].shape != leaf.shape or on_host:
        raise MeshparError(
            f"{path} is not one array on the devices under {program.layout}: leave "
            "replica and offload out"
        )
    if jax.process_count() > 1:
        raise MeshparError(
            f"{jax.process_count()} processes share the slots, and a table serves one: "
            "train in one process"
        )
    return leaf.shape[0]


def _check_optimizer(program: TrainProgram, path: str) -> None:
    """Raises MeshparError for an optimizer whose rows depend on other rows."""
    reach = program.lowering.optimizer.reach
    if path in reach.mixed | reach.crossed or reach.positional:
        raise MeshparError(
            f"the optimizer's update of a row of {path} depends on other rows, or on "
            "its place; use an elementwise optimizer, such as optax.adagrad, and clip "
            "with lower(clip_norm=...)"
        )


def _every_row(name: str, x: Any, rows: int) -> np.ndarray:
    """The fresh optimizer state of all rows.

    Raises:
      MeshparError: rows of a fresh state differ.
    """
    x = np.asarray(x)
    if (x != x.flat[0]).any():
        raise MeshparError(
            f"the optimizer state {name} does not start with one number everywhere; "
            "give the state of program.init, or an optimizer such as optax.adagrad"
        )
    return np.full((rows, *x.shape[1:]), x.flat[0])
