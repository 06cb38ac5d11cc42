"""The compiled programs of local SGD, each compiled once.

There is one program for each kind of transfer, and small programs without an inner step
for snapshots, arrivals and synchronizations at once. No program has a conditional, and
none is compiled again as fragments take turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.local_sgd.schedule import Transfer
from meshpar.local_sgd.steps import STACKED, LocalState, LocalSteps
from meshpar.lowering.inspection import Inspection, inspect_step
from meshpar.lowering.totals import Totals


def transfer_index(transfer: Transfer | None) -> tuple:
    """The numbers of a transfer as the last argument of its program; () without one."""
    if transfer is None:
        return ()
    numbers = transfer.fragment, transfer.scatter, transfer.gather
    return (tuple(np.int32(number or 0) for number in numbers),)


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """The compiled programs of one mode, cached by kind.

    Attributes:
      steps: the pure functions.
      abstract_state: the state of all replicas, as ShapeDtypeStructs with shardings.
      abstract_batch: the global batch as ShapeDtypeStructs with shardings.
    """

    steps: LocalSteps
    abstract_state: LocalState
    abstract_batch: Any
    _inner: dict[Transfer | None, Inspection] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    _small: dict[tuple, Callable] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def state_shardings(self) -> LocalState:
        """The shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    def inspection(self, transfer: Transfer | None) -> Inspection:
        """The step during which a transfer happens, or none; shared by its kind."""
        kind = transfer and transfer.kind(self.steps.exchange.num_rounds)
        if kind not in self._inner:
            stepped, index = self.steps.stepped, ()
            if kind is not None:
                stepped = functools.partial(self.steps.stepped_beside, kind)
                index = ((jax.ShapeDtypeStruct((), jnp.int32),) * 3,)
            self._inner[kind] = inspect_step(
                self.steps.lowering,
                stepped,
                self.abstract_state,
                self.abstract_batch,
                *index,
                metrics_spec=STACKED,
            )
        return self._inner[kind]

    @functools.cached_property
    def _all_compiled(self) -> bool:
        """Compiles every step before the first one, so that none waits for it later."""
        for kind in (None, *self.steps.exchange.transfer_kinds):
            _ = self.inspection(kind).compiled
        return True

    def run(
        self,
        transfer: Transfer | None,
        state: LocalState,
        batch: Any,
    ) -> tuple[LocalState, Totals]:
        """Runs the inner step and a transfer; `state` is donated; totals [R]."""
        assert self._all_compiled
        program = self.inspection(transfer).compiled
        return program(state, batch, *transfer_index(transfer))

    def run_small(self, fn: Callable, state: LocalState, *static: Any) -> LocalState:
        """Runs fn(*static, state) of `LocalSteps`, which has next to no compute."""
        key = fn.__name__, *static
        if key not in self._small:
            self._small[key] = jax.jit(
                functools.partial(fn, *static),
                donate_argnums=0,
                out_shardings=self.state_shardings,
            )
        with jax.set_mesh(self.steps.lowering.mesh):
            return self._small[key](state)
