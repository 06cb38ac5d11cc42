"""The host's copy of a state's step numbers."""

import dataclasses
from typing import Any

import numpy as np

from meshpar.local_sgd.steps import LocalState


@dataclasses.dataclass
class Clock:
    """The host's copy of a state's step numbers, so that no step waits for a device."""

    state_step: Any = None
    step: int = 0
    began: int = 0
    launched: list[int] = dataclasses.field(default_factory=list)
    arrived: list[int] = dataclasses.field(default_factory=list)

    def read(self, state: LocalState) -> None:
        """Takes the numbers of a state, unless it is the one that was stepped last."""
        if state.step is not self.state_step:
            self.step, self.began = int(state.step), int(state.began)
            self.launched = np.asarray(state.launched).tolist()
            self.arrived = np.asarray(state.arrived).tolist()
