r"""Fits laws of speedup to step times: Amdahl's, Gunther's, and Gustafson's.

    python -m experiments.scaling --times=1:2.0,2:1.04,4:0.56,8:0.33
    python -m experiments.scaling --times=2:runs/two,4:runs/four,8:runs/eight
    python -m experiments.scaling --recipe=bytes-llama \
        --topologies=v5e:2x2,v5e:2x4,v5e:4x4 --axis=data

Times are measured ones, or those of runs in folders, or predicted ones of a recipe that
is compiled for machines that are not present.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Sequence

import matplotlib.figure
import rich.console
from absl import flags

from experiments import recipes
from experiments.recipes import step_times
from experiments.reports import scaling
from meshpar.commands import command_line, outputs
from meshpar.commands.reports import pictures, terminal
from meshpar.errors import ConfigError
from meshpar.mesh import simulate
from meshpar.mesh import topology as topology_of
from meshpar.methods import speedup_laws
from meshpar.runs import metrics
from meshpar.runs.config import RunConfig

TIMES = flags.DEFINE_list(
    "times", None, "DEVICES:SECONDS or DEVICES:FOLDER of a run, for each number."
)
TOPOLOGIES = flags.DEFINE_list(
    "topologies", None, "Machines to predict times for, such as v5e:2x4,v5e:4x4."
)
AXIS = flags.DEFINE_string(
    "axis", "data", "With --topologies: the axis that all devices are spread over."
)
WEAK = flags.DEFINE_bool(
    "weak", False, "The work grows with the devices; --batch_size is of one device."
)
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")
PNG = flags.DEFINE_string("png", "", "Draw speedup and fits into this file.")


def _seconds_of_run(folder: str) -> float:
    """The median time of a step, which leaves out compiling and pauses.

    Raises:
      ConfigError: the folder holds no step times.
    """
    path = pathlib.Path(folder) / metrics.METRICS
    rows = metrics.read(path) if path.exists() else []
    times = [row["step_seconds"] for row in rows if "step_seconds" in row]
    if not times:
        raise ConfigError(
            f"{folder} is no number of seconds, and holds no times of steps; give the "
            "folder of a run"
        )
    return statistics.median(times)


def _given_times(words: Sequence[str]) -> dict[int, float]:
    """{devices: seconds} of --times.

    Raises:
      ConfigError: a word of another form, or a number of devices twice.
    """
    times: dict[int, float] = {}
    for word in words:
        count, _, value = word.partition(":")
        if not (count.isdecimal() and int(count) and value) or int(count) in times:
            raise ConfigError(
                f"--times={word}: write DEVICES:SECONDS or DEVICES:FOLDER, and each "
                "number of devices once"
            )
        try:
            times[int(count)] = float(value)
        except ValueError:
            times[int(count)] = _seconds_of_run(value)
    return times


def _predicted_times(
    console: rich.console.Console, config: RunConfig
) -> dict[int, float]:
    """{devices: seconds} of --topologies."""
    command_line.use_cpu()
    simulate(1)
    times: dict[int, float] = {}
    for topology in TOPOLOGIES.value:
        size = len(topology_of(topology)) if WEAK.value else 1
        grown = dataclasses.replace(config, batch_size=config.batch_size * size)
        n, seconds = step_times.seconds_per_step(grown, AXIS.value, topology)
        if n in times:
            raise ConfigError(
                f"--topologies: {topology} has {n} devices, as one before it; leave it "
                "out"
            )
        times[n] = seconds
        if not JSON.value:
            console.print(f"{topology}: {seconds:.4g} s predicted", soft_wrap=True)
    return times


def main(_: Sequence[str]) -> int:
    """Prints times, speedups and fits; returns the exit code."""
    if (TIMES.value is None) == (TOPOLOGIES.value is None):
        raise ConfigError("give --times or --topologies, one of the two")
    if PNG.value:
        pictures.check_format(PNG.value)
        outputs.check_file(PNG.value, "--png")
    console = terminal.wide_console()
    if TIMES.value is not None:
        command_line.refuse_unread()
        if AXIS.present:
            raise ConfigError(
                f"--axis={AXIS.value} goes with --topologies, whose times are "
                "predicted; leave it out"
            )
        times = _given_times(TIMES.value)
    else:
        config = command_line.config_from_flags()
        times = _predicted_times(console, config)
    fits = scaling.laws(times, WEAK.value)
    if JSON.value:
        found = {
            "times": times,
            "fits": {
                name: dataclasses.asdict(law)
                | {"largest_error": speedup_laws.largest_error(law, times)}
                for name, law in fits.items()
            },
        }
        print(json.dumps(found))
    else:
        console.print(scaling.table(times, fits))
        for name, law in fits.items():
            error = speedup_laws.largest_error(law, times)
            console.print(
                f"{name}: {scaling.describe(law)} (largest error {error:.1%})",
                soft_wrap=True,
            )
    if PNG.value:
        figure = matplotlib.figure.Figure((7.2, 4.2), layout="constrained")
        label = "measured" if TIMES.value is not None else "predicted"
        scaling.plot(figure.subplots(), times, fits, label)
        figure.savefig(PNG.value)
    return 0


if __name__ == "__main__":
    command_line.run(
        main,
        command_line.of_config_but(
            command_line.DATA, command_line.TOKENIZER, command_line.SEED
        ),
        known=recipes.CATALOG,
    )
