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
from jax.sharding import NamedSharding

from meshpar.contracts.hlo import parse_hlo
from meshpar.local_sgd.schedule import Transfer
from meshpar.local_sgd.steps import STACKED, LocalState, LocalSteps
from meshpar.lowering.state import Metrics
from meshpar.mesh.torus import compiler_options


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
    _inner: dict[Transfer | None, jax.stages.Compiled] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    _small: dict[tuple, Callable] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def _state_shardings(self) -> LocalState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The inner step without a transfer, as StableHLO."""
        return self.lower(None)

    def lower(self, kind: Transfer | None) -> jax.stages.Lowered:
        """Lowers the inner step and a transfer of one kind during it."""
        mesh = self.steps.lowering.mesh
        stepped, index = self.steps.stepped, ()
        if kind is not None:
            stepped = functools.partial(self.steps.stepped_beside, kind)
            index = ((jax.ShapeDtypeStruct((), jnp.int32),) * 3,)
        with jax.set_mesh(mesh):
            return jax.jit(
                stepped,
                donate_argnums=0,
                out_shardings=(self._state_shardings, NamedSharding(mesh, STACKED)),
                compiler_options=compiler_options(mesh),
            ).lower(self.abstract_state, self.abstract_batch, *index)

    def compiled(self, transfer: Transfer | None) -> jax.stages.Compiled:
        """The compiled step during which a transfer happens, or none.

        Raises:
          MeshparError: it could deadlock.
        """
        kind = transfer and transfer.kind(self.steps.exchange.num_rounds)
        if kind not in self._inner:
            lowered = self.lowered if kind is None else self.lower(kind)
            compiled = lowered.compile()
            lowering = self.steps.lowering
            sizes = dict(lowering.mesh.shape)
            lowering.check_compiled(parse_hlo(compiled.as_text(), sizes))
            self._inner[kind] = compiled
        return self._inner[kind]

    def compile_all(self) -> None:
        """Compiles every step before the first one, so that none waits for it later."""
        for kind in (None, *self.steps.exchange.transfer_kinds):
            self.compiled(kind)

    def run(
        self,
        transfer: Transfer | None,
        state: LocalState,
        batch: Any,
    ) -> tuple[LocalState, Metrics]:
        """Runs the inner step and a transfer; `state` is donated; metrics [R]."""
        if not self._inner:
            self.compile_all()
        program = self.compiled(transfer)
        return program(state, batch, *transfer_index(transfer))

    def run_small(self, fn: Callable, state: LocalState, *static: Any) -> LocalState:
        """Runs fn(*static, state) of `LocalSteps`, which has next to no compute."""
        key = fn.__name__, *static
        if key not in self._small:
            self._small[key] = jax.jit(
                functools.partial(fn, *static),
                donate_argnums=0,
                out_shardings=self._state_shardings,
            )
        with jax.set_mesh(self.steps.lowering.mesh):
            return self._small[key](state)
