r"""Compares consistency models with stragglers, on a simulated clock.

    python -m experiments.islands_sweep

Workers train a small classifier in the simulator of the store. Gradients are real; time
is simulated, so that the results are the same on every machine. A table per kind of
straggler and a plot are written to --workdir.

Source: Ho et al., SSP, NeurIPS 2013, figures 2 and 3 (waiting and convergence); Dean et
  al., DistBelief, NeurIPS 2012, figure 5 (time to a target).
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from experiments import stragglers
from experiments.reports import islands
from meshpar.commands import command_line, outputs
from meshpar.commands.reports import terminal
from meshpar.settings import Number, Path

ISLANDS = flags.DEFINE_integer("islands", 8, "Number of workers.")
SECONDS = flags.DEFINE_integer("seconds", 60, "Simulated seconds of every case.")
WORKDIR = flags.DEFINE_string(
    "workdir", "runs/islands-sweep", "Folder of results and plot."
)
command_line.limit(ISLANDS, Number(2, 256, "workers"))
command_line.limit(SECONDS, Number(4, 100_000, "seconds"))
command_line.limit(WORKDIR, Path())


def main(_: Sequence[str]) -> int:
    """Runs all cases, and returns the exit code."""
    folder = pathlib.Path(WORKDIR.value)
    outputs.check_folder(folder, "--workdir")
    console, results = terminal.plain_console(), []
    for kind in stragglers.STRAGGLERS:
        results += stragglers.sweep(kind, ISLANDS.value, SECONDS.value)
        console.print(islands.table(results, kind))
    folder.mkdir(parents=True, exist_ok=True)
    rows = [result._replace(spans=[])._asdict() for result in results]
    (folder / "results.json").write_text(json.dumps(rows, indent=1))
    islands.curves(results).savefig(folder / "islands_sweep.png", dpi=110)
    console.print(f"plot: {folder / 'islands_sweep.png'}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
