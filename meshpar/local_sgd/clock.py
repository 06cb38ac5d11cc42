"""The clock of local SGD: a copy of the state's step numbers on the host."""

import dataclasses
from typing import Any

import numpy as np

from meshpar.local_sgd.schedule import Actions, check_arrival
from meshpar.local_sgd.steps import LocalState


@dataclasses.dataclass
class Clock:
    """A copy of a state's step numbers on the host, so that no step waits for a device.

    Attributes:
      state_step: the array `step` of the state that was stepped last.
      step: steps done.
      began: the step at which the replicas began with their average.
      launched: step of the last snapshot of every fragment, -1 before the first.
      arrived: step after which every fragment was merged last.
    """

    state_step: Any = None
    step: int = 0
    began: int = 0
    launched: list[int] = dataclasses.field(default_factory=list)
    arrived: list[int] = dataclasses.field(default_factory=list)

    def read(self, state: LocalState) -> None:
        """Copies the numbers of a state, unless it is the one that was stepped last."""
        if state.step is not self.state_step:
            self.step, self.began = int(state.step), int(state.began)
            self.launched = np.asarray(state.launched).tolist()
            self.arrived = np.asarray(state.arrived).tolist()

    def check(self, actions: Actions, staleness: int) -> Actions:
        """Checks what arrives in the next step against the bound.

        A snapshot taken before the replicas began with their average is dropped.

        Raises:
          StalenessError: a fragment would arrive later than the bound allows.
        """
        transfer, arrive = actions.transfer, actions.arrive
        if transfer is not None and transfer.taken <= self.began > 0:
            return actions._replace(transfer=None, arrive=None)
        if arrive is not None:
            check_arrival(staleness, arrive, self.launched[arrive], self.step + 1)
        return actions

    def advance(self, actions: Actions, state: LocalState) -> None:
        """Records that a step with these actions led to `state`."""
        self.state_step, self.step = state.step, self.step + 1
        if actions.arrive is not None:
            self.arrived[actions.arrive] = self.step
        for fragment in actions.launch:
            self.launched[fragment] = self.step
            if actions.at_once:
                self.arrived[fragment] = self.step

    def sync_ages(self) -> dict[str, float]:
        """Steps since the last arrival: the largest, and of each of many fragments."""
        ages = [float(self.step - arrived) for arrived in self.arrived]
        of_each = {f"sync_age/{f}": age for f, age in enumerate(ages)}
        return {"sync_age": max(ages), **(of_each if len(ages) > 1 else {})}
