"""Scenarios: small training runs whose results are repeatable bit for bit.

A step is a function of the state and the number of the step, and one layout adds up in
one order. So a run that goes on from a checkpoint under the same layout ends with the
same bits as one that nothing disturbed.
"""

import dataclasses
import os
import pathlib
import random
import sys

from experiments.faults.comparison import LOSS, METRICS, STATE
from meshpar.layouts.axes import DATA, FSDP, PIPE, REPLICA, TENSOR
from meshpar.runs.modes import ISLANDS, LOCAL_SGD

STEPS = 60
"""Steps of every run; the intervals below divide it, and each other seldom."""

_SETTINGS = (
    *("checkpoint_every=3", "evaluate_every=4", "evaluation_batches=1"),
    "keep_checkpoints=3",
)
RECIPE = "tiny"
"""The recipe of the catalog that is broken by default; it trains on a text."""

_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")
_NUM_WORDS = 20_000


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A kind of run.

    Attributes:
      layout: its layout.
      processes: number of its processes.
      flags: further flags of its command.
      settings: further settings (`--set`).
      local: whether it also keeps checkpoints on a local disk.
      actors: whether its islands and their servers are processes of Ray.
      promise: what equals an undisturbed run: `METRICS`, `STATE` or `LOSS`.
    """

    layout: str
    processes: int = 1
    flags: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    local: bool = False
    actors: bool = False
    promise: str = METRICS

    def command(
        self, folder: pathlib.Path, data: pathlib.Path, recipe: str = RECIPE
    ) -> list[str]:
        """The words of the run's command.

        Args:
          folder: holds the run's folder `run`, and its local disk `disk`.
          data: the text to train on; a recipe of a file has data of its own.
          recipe: `RECIPE`, or FILE.py:FUNCTION.
        """
        words = [sys.executable, "-m", "experiments.faults.faulty_machine", str(folder)]
        words += ["experiments.run", f"--recipe={recipe}", "--platform=cpu"]
        words += [f"--layout={self.layout}", f"--steps={STEPS}"]
        words += [f"--workdir={folder / 'run'}", *self.flags]
        if recipe == RECIPE:
            words += [f"--data={data}", "--set=sample_tokens=0"]
        if self.local:
            words.append(f"--checkpoint_local_dir={folder / 'disk'}")
        return words + [f"--set={setting}" for setting in (*_SETTINGS, *self.settings)]

    def environment(self, cache: pathlib.Path) -> dict[str, str]:
        """The variables of the run: nothing of a cluster or of a launcher above it.

        Args:
          cache: a folder of compiled programs, which one process alone can use; not
            used if this command has one of its own.
        """
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MESHPAR_")}
        if self.processes == 1:
            kept.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
            kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        return kept


SCENARIOS: dict[str, Scenario] = {
    "two_processes": Scenario(f"{FSDP}=2", processes=2),
    "tensor": Scenario(f"{TENSOR}=2"),
    "pipeline": Scenario(f"{PIPE}=2,microbatches=4"),
    "local_sgd": Scenario(
        f"{REPLICA}=2",
        flags=(f"--optimizer_mode={LOCAL_SGD}",),
        settings=("local_sgd.period=5", "local_sgd.staleness=2")
        + ("local_sgd.outer=nesterov", "local_sgd.wire=int8"),
    ),
    "two_tiers": Scenario(
        f"{DATA}=2",
        settings=("checkpoint_every=6", "checkpoint_local_every=2"),
        local=True,
    ),
    "islands": Scenario(
        f"{DATA}=1",
        flags=(f"--optimizer_mode={ISLANDS}",),
        settings=("islands.workers=2", "islands.consistency=bsp"),
        promise=STATE,
    ),
    "islands_ray": Scenario(
        f"{DATA}=1",
        flags=(f"--optimizer_mode={ISLANDS}",),
        settings=("islands.workers=2", "islands.consistency=ssp:1")
        + ("islands.host=ray", "islands.servers=2", "islands.replicas=2"),
        actors=True,
        promise=LOSS,
    ),
}
"""{name: scenario}."""


def write_text(path: pathlib.Path) -> None:
    """Writes the text that all scenarios train on, always the same."""
    draw = random.Random(0)
    path.write_text(" ".join(draw.choices(_WORDS, k=_NUM_WORDS)))
