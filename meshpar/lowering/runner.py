"""Runners: how a shard_map program runs the layers and adds up gradients.

`scan` runs all layers on every device, `pipeline.runner` runs them stage by stage, and
`pipeline.pipedream` updates the weights in between.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshpar.arrays import Array, Params
from meshpar.contracts.collective import Collective
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.terms import LayerPass
from meshpar.fsdp.zero import Zero
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_moves import Moves, Runs
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held
from meshpar.lowering.state import TrainState
from meshpar.lowering.totals import Totals


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs the layers of one program; the base of all runners.

    Attributes:
      frame: the shard_map program around it.
      zero: when weights are whole and gradients are reduced.
    """

    frame: Frame
    zero: Zero

    @property
    def layer_passes(self) -> list[LayerPass]:
        """Every pass over the layers in one step, but for `row_passes`."""
        raise NotImplementedError

    @property
    def row_passes(self) -> list[LayerPass]:
        """Every pass over layers that split rows over `tensor`, in one step."""
        return []

    @property
    def sums_dtype(self) -> Any:
        """The dtype in which gradients are added up; None where nothing is added."""
        raise NotImplementedError

    def sums(self, params: Params, batch: Any, key: Array) -> tuple[Totals, Params]:
        """Totals and gradients summed over this shard's samples, inside shard_map."""
        raise NotImplementedError

    @property
    def trains(self) -> bool:
        """Whether the runner updates weights itself (`train_step`)."""
        return False

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Totals]:
        """One step of training, for runners that update weights themselves."""
        raise NotImplementedError

    @property
    def evaluates(self) -> bool:
        """Whether the runner evaluates the model itself (`evaluate`)."""
        return False

    def evaluate(self, params: Params, batch: Any) -> Totals:
        """Totals of the whole batch in evaluation mode."""
        raise NotImplementedError

    @property
    def reason_not_equal(self) -> str:
        """Why the steps do not equal those of one device; "" if they do."""
        return ""

    def declared_reductions(self) -> Iterator[DeclaredCollective] | None:
        """Collectives of a runner that reduces gradients itself; None for ZeRO's."""

    def declared_row_moves(
        self, passes: Sequence[LayerPass]
    ) -> Iterator[DeclaredCollective]:
        """Moves of weights and gradients of layers that split rows over `tensor`.

        Args:
          passes: those over the layers that compute anything.
        """
        del passes
        return iter(())

    def runs_outside(self, batch: Any) -> Runs:
        """Runs of embedding and head in one step.

        Args:
          batch: abstract batch of one replica.
        """
        del batch
        num = self.frame.layout.microbatches
        return Runs(num, num, num)

    def declared_beside(self, batch: Any, moves: Moves) -> Iterator[DeclaredCollective]:
        """Collectives of the runner's own, such as sends between stages.

        Args:
          batch: abstract batch of one replica.
          moves: what the model moves itself.
        """
        del batch, moves
        return iter(())

    def held(self, traced: TracedLayer, held: Held) -> Held:
        """Bytes held all through a step.

        Args:
          traced: bytes of one layer.
          held: bytes that a program holds if it runs all layers in one scan.
        """
        del traced
        return held

    def report(self, trace: Callable[[], TracedLayer]) -> dict[str, Any]:
        """Sections of a report by name; `trace` traces one layer."""
        del trace
        return {}

    @property
    def may_deadlock(self) -> bool:
        """Whether devices may take conditionals of their own."""
        return False

    def check_compiled(self, collectives: list[Collective]) -> None:
        """Raises MeshparError if the compiled step must not run."""
