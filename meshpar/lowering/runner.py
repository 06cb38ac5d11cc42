"""Runners: how a shard_map program runs the layers and adds up gradients.

`scan` runs all layers on every device, `pipeline.runner` runs them stage by stage, and
`pipeline.pipedream` updates the weights in between.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from meshpar.arrays import Array, Params
from meshpar.contracts.collective import Collective
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.gather import REPLICATED
from meshpar.fsdp.terms import LayerPass
from meshpar.fsdp.zero import Zero
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held
from meshpar.lowering.row_layers import OVER_ROWS
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

    purposes: ClassVar[tuple[str, ...]] = ("zero=", REPLICATED, OVER_ROWS)
    """How the purposes of what moves for weights and gradients begin."""

    @property
    def layer_passes(self) -> list[LayerPass]:
        """Every pass over the layers in one step, but for `row_passes`."""
        raise NotImplementedError

    def lasting_runs(self, run: LayerPass) -> float:
        """Runs of a pass that take as long as it does in one step."""
        return run.runs

    @property
    def copied_experts(self) -> int:
        """Bytes of the experts of a layer that each of its passes copies."""
        return 0

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
        """Why the steps differ from one device; "" if they are equal."""
        return ""

    def declared_reductions(self) -> Iterator[DeclaredCollective] | None:
        """The formula of a runner that reduces gradients itself; None for ZeRO's."""

    def declared_row_moves(
        self, passes: Sequence[LayerPass]
    ) -> Iterator[DeclaredCollective]:
        """The formula of what layers move that split rows over `tensor`.

        That is their weights and gradients.

        Args:
          passes: those over such layers.
        """
        del passes
        return iter(())

    def bounds(self, batch: Any) -> Iterator[DeclaredCollective]:
        """The most that compilers add for the runner's own sake.

        Args:
          batch: abstract batch of one replica.
        """
        del batch
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
