r"""Compares synchronous training and local SGD: loss against communicated bytes.

    python -m experiments.local_sgd_sweep --recipe=tiny --steps=400 --replicas=4

Every case trains the same model on the same text for the same number of steps. A table
and a plot are written to --workdir; cases that are done are not run again. Results of
other settings, data or code are old: they stay in the file, and out of the table.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

import meshpar
from experiments import data, recipes
from experiments.recipes.config import SETTINGS, Config
from experiments.reports import sweep
from meshpar.commands import command_line, outputs
from meshpar.commands.devices import start_devices
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError, shown
from meshpar.layouts.axes import DATA, REPLICA
from meshpar.runs.code import code_hash
from meshpar.runs.config import NEUTRAL, check_setting, values_of, with_mode
from meshpar.runs.modes import LOCAL_SGD, SYNCHRONOUS
from meshpar.runs.programs import make_mode
from meshpar.settings import Number, Path

REPLICAS = flags.DEFINE_integer("replicas", 4, "Number of replicas, one device each.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds per case.")
WORKDIR = flags.DEFINE_string(
    "workdir", "runs/local-sgd-sweep", "Folder of results, table and plot."
)
PERIODS = flags.DEFINE_list("periods", ["4", "16", "64"], "H, steps per period.")
STALENESS = flags.DEFINE_list(
    "staleness", ["0", "4"], "s, steps; values of H or more are left out."
)
WIRES = flags.DEFINE_list("wires", ["f32", "int8", "int4"], "Compression formats.")
_READ = {"layout", "lowering", "evaluation_batches"}
"""Settings that change no step of a run, but the results of a sweep."""

command_line.limit(REPLICAS, Number(2, 4096, "replicas"))
command_line.limit(SEEDS, Number(1, 10_000, "seeds"))
command_line.limit(WORKDIR, Path())
command_line.limit(WIRES, SETTINGS["local_sgd.wire"].range)


def _numbers(flag: flags.FlagHolder) -> list[int]:
    """The whole numbers of a list of words."""
    for word in flag.value or [""]:
        if not re.fullmatch("[0-9]{1,9}", word):
            raise ConfigError(
                f"--{flag.name}={shown(','.join(flag.value))}: {shown(word)!r} is no "
                "whole number of steps; write some such as 4,16"
            )
    return list(map(int, flag.value))


def cases(config: Config) -> dict[str, Config]:
    """{name: configuration} of all cases; "independent" never synchronizes."""

    def local_sgd(**changes: int | str) -> Config:
        settings = dataclasses.replace(config.local_sgd, **changes)
        return dataclasses.replace(config, optimizer_mode=LOCAL_SGD, local_sgd=settings)

    configs = {SYNCHRONOUS: with_mode(config, SYNCHRONOUS)}
    periods, delays = _numbers(PERIODS), _numbers(STALENESS)
    for period, staleness, wire in itertools.product(periods, delays, WIRES.value):
        if staleness < max(period, 1):
            configs[f"H={period} s={staleness} {wire}"] = local_sgd(
                period=period, staleness=staleness, wire=wire
            )
    return configs | {"independent": local_sgd(period=config.steps + 1)}


def _done(log: pathlib.Path) -> list[dict[str, Any]]:
    """The results that were written before."""
    if not log.exists():
        return []
    try:
        rows = [json.loads(x) for x in log.read_text().splitlines()]
        for row in rows:
            float(row["loss"]), float(row["bytes_per_step"]), row["case"], row["seed"]
            dict(row.get("made_by", {}))
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{log} is not what this command wrote ({error!r}); mend it, or choose "
            "another --workdir"
        ) from error
    return rows


def made_by(config: Config, corpus: data.Corpus) -> dict[str, str]:
    """Hashes of all that makes the results of a sweep, beside the case and the seed.

    Args:
      config: of all cases, with the layout of synchronous training.
      corpus: the data.
    """
    settings = {
        key: value
        for key, value in values_of(config)
        if key in _READ or config.kind_of_change(key) != NEUTRAL
    }
    settings.pop("seed")
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    return {
        "settings": digest.hexdigest()[:16],
        "data": corpus.fingerprint,
        "code": code_hash("meshpar", "experiments"),
    }


def why_old(row: Mapping[str, Any], own: Mapping[str, str]) -> str:
    """Other makers of an earlier result, in words; "" if they are those of now.

    Args:
      row: the result.
      own: of `made_by`.
    """
    found = row.get("made_by", {})
    return " and ".join(name for name in own if found.get(name) != own[name])


def train(
    config: Config, corpus: data.Corpus, program: meshpar.TrainProgram, seed: int
) -> dict[str, float]:
    """Trains with one seed; returns the held-out loss and the bytes sent per step."""
    shape = dict(
        length=config.model.length,
        batch_size=config.batch_size,
        rows=program.batch_rows,
    )
    batches = data.training_batches(corpus, seed=seed, position=0, **shape)
    held_out = data.held_out_batches(corpus, limit=config.evaluation_batches, **shape)
    state, bytes_sent = program.init(seed), 0.0
    synchronous_bytes = program.contract.wire_bytes
    for _ in range(config.steps):
        state, metrics = program.step(state, next(batches))
        bytes_sent += metrics.get("replica_bytes", synchronous_bytes)
    evaluate = functools.partial(program.evaluate, state)
    found = held_out.metric_sums(program, evaluate).result()
    means = {name: found[name] for name in ("loss", "drift") if name in found}
    return means | {"bytes_per_step": bytes_sent / config.steps}


def main(_: Sequence[str]) -> int:
    """Runs the cases that are not done yet, and returns the exit code."""
    config = recipes.of_decoder(command_line.config_from_flags())
    replicas = REPLICAS.value
    config = dataclasses.replace(config, layout=f"{DATA}={replicas}")
    configs = cases(config)
    for case_config in configs.values():
        make_mode(case_config)  # An error now is none after hours.
    check_setting("seed", config.seed + SEEDS.value - 1)
    folder = pathlib.Path(WORKDIR.value)
    outputs.check_folder(folder, "--workdir")
    log, console = folder / "results.jsonl", terminal.plain_console()
    rows = _done(log)
    _, devices = start_devices(config)
    corpus = data.load(config.data)
    config = config.fitted(corpus)
    own = made_by(config, corpus)
    old = collections.Counter(why for row in rows if (why := why_old(row, own)))
    for why, number in old.items():
        console.print(
            f"{number} result(s) in {log} are old: other {why} made them; they are "
            "left out"
        )
    rows = [row for row in rows if not why_old(row, own)]
    done = {(row["case"], row["seed"]) for row in rows}
    programs = {}
    for case, case_config in configs.items():
        axis = REPLICA if case_config.optimizer_mode == LOCAL_SGD else DATA
        layout = meshpar.layouts.parse(f"{axis}={replicas}")
        case_config = dataclasses.replace(case_config, model=config.model)
        programs[case] = case_config.make_program(layout, devices)
    folder.mkdir(parents=True, exist_ok=True)
    for case in list(programs):
        program = programs.pop(case)  # Its compiled step is freed after its case.
        for seed in range(config.seed, config.seed + SEEDS.value):
            if (case, seed) in done:
                continue
            result = train(config, corpus, program, seed)
            rows.append({"case": case, "seed": seed, "made_by": own, **result})
            with log.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            console.print(f"{case}, seed {seed}: loss {result['loss']:.4f}")
    console.print(sweep.table(rows))
    (folder / "summary.json").write_text(json.dumps(sweep.summary(rows), indent=1))
    sweep.plot(rows, folder / "loss_over_bytes.png")
    console.print(f"plot: {folder / 'loss_over_bytes.png'}")
    return 0


if __name__ == "__main__":
    command_line.run(
        main,
        (
            *command_line.of_config_but(
                command_line.LAYOUT, command_line.OPTIMIZER_MODE
            ),
            *command_line.OF_DEVICES,
        ),
        known=recipes.CATALOG,
    )
