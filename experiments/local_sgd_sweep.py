r"""Loss against communicated bytes: synchronous training and local SGD, side by side.

    python -m experiments.local_sgd_sweep --recipe=tiny --steps=400 --replicas=4

Every case trains the same model on the same text for the same number of steps. A table
and a plot are written to --workdir; cases that are done are not run again.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table
from absl import flags

import meshpar
from experiments import building, command_line, data
from experiments.config import Config, LocalSGDConfig

flags.adopt_module_key_flags(command_line)
REPLICAS = flags.DEFINE_integer("replicas", 4, "Replicas, one device each.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds per case.")
WORKDIR = flags.DEFINE_string("workdir", "runs/local-sgd-sweep", "Table and plot.")
PERIODS = flags.DEFINE_list("periods", ["4", "16", "64"], "H.")
STALENESS = flags.DEFINE_list("staleness", ["0", "4"], "s; those below H are run.")
WIRES = flags.DEFINE_list("wires", ["f32", "int8", "int4"], "Formats.")


def cases(config: Config) -> dict[str, LocalSGDConfig | None]:
    """{name: settings}; None is synchronous, and one never synchronizes."""
    base = config.local_sgd
    found: dict[str, LocalSGDConfig | None] = {"synchronous": None}
    grid = itertools.product(PERIODS.value, STALENESS.value, WIRES.value)
    for period, staleness, wire in grid:
        if int(staleness) < int(period):
            found[f"H={period} s={staleness} {wire}"] = dataclasses.replace(
                base, period=int(period), staleness=int(staleness), wire=wire
            )
    alone = dataclasses.replace(base, period=config.steps + 1)
    return found | {"independent": alone}


def train(
    config: Config, corpus: data.Corpus, program: meshpar.TrainProgram, seed: int
) -> dict[str, float]:
    """Trains with one seed; held-out loss of the average, and bytes sent per step."""
    shape = dict(
        length=config.model.length,
        batch_size=config.batch_size,
        rows=program.batch_rows,
    )
    batches = data.training_batches(corpus, seed=seed, position=0, **shape)
    state, sent = program.init(seed), 0.0
    synchronous = program.contract.wire_bytes
    for _ in range(config.steps):
        state, metrics = program.step(state, next(batches))
        sent += metrics.get("replica_bytes", synchronous)
    held_out = data.held_out_batches(corpus, limit=config.evaluation_batches, **shape)
    found = jax.device_get([program.evaluate(state, batch) for batch in held_out])
    means = {
        k: float(np.mean([one[k] for one in found]))
        for k in ("loss", "drift")
        if k in found[0]
    }
    return means | {"bytes_per_step": sent / config.steps}


def plot(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Held-out loss over bytes per step, the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for row in summary(rows):
        sent = max(row["bytes_per_step"], 1.0)
        axes.errorbar(sent, row["loss"], yerr=row["spread"], fmt="o", capsize=3)
        axes.annotate(
            row["case"],
            (sent, row["loss"]),
            fontsize=7,
            rotation=20,
            textcoords="offset points",
            xytext=(4, 4),
        )
    axes.set(
        xscale="log",
        xlabel="bytes sent to other replicas, per device and step",
        ylabel="held-out loss, nats per token",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case: means over the seeds, and the spread of the losses."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        losses = [row["loss"] for row in mine]
        found.append(
            {
                "case": case,
                "loss": float(np.mean(losses)),
                "spread": float(np.std(losses)),
                "bytes_per_step": float(np.mean([r["bytes_per_step"] for r in mine])),
                "drift": float(np.mean([r.get("drift", 0.0) for r in mine])),
            }
        )
    return found


def table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
    """The summary, and how much worse than synchronous training each case is."""
    found = summary(rows)
    reference = next(row["loss"] for row in found if row["case"] == "synchronous")
    made = rich.table.Table("case", "held-out loss", "of synchronous", "bytes", "drift")
    for row in found:
        made.add_row(
            row["case"],
            f"{row['loss']:.4f} +- {row['spread']:.4f}",
            f"{100 * (row['loss'] / reference - 1):+.2f}%",
            f"{row['bytes_per_step']:,.0f}",
            f"{row['drift']:.4f}",
        )
    return made


def main(_: Sequence[str]) -> int:
    """Runs what is not done yet, and returns the exit code."""
    config = command_line.config_from_flags()
    replicas = REPLICAS.value
    config = dataclasses.replace(config, layout=f"data={replicas}")
    _, devices = command_line.start_devices(config)
    corpus = data.load(config.data)
    config = building.fit_vocabulary(config, corpus)
    folder = pathlib.Path(WORKDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    log, console = folder / "results.jsonl", rich.console.Console(highlight=False)
    rows = [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []
    for case, local in cases(config).items():
        seeds = [
            seed
            for seed in range(config.seed, config.seed + SEEDS.value)
            if not any((row["case"], row["seed"]) == (case, seed) for row in rows)
        ]
        if not seeds:
            continue
        axis, mode = "data", {"optimizer_mode": "synchronous"}
        mode["local_sgd"] = LocalSGDConfig()
        if local is not None:
            axis, mode = "replica", {"optimizer_mode": "local_sgd", "local_sgd": local}
        program = building.make_program(
            dataclasses.replace(config, **mode),
            meshpar.layouts.parse(f"{axis}={replicas}"),
            devices,
        )
        for seed in seeds:
            row = {"case": case, "seed": seed, **train(config, corpus, program, seed)}
            rows.append(row)
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            console.print(f"{case}, seed {seed}: loss {row['loss']:.4f}")
    console.print(table(rows))
    (folder / "summary.json").write_text(json.dumps(summary(rows), indent=1))
    plot(rows, folder / "loss_over_bytes.png")
    console.print(f"plot: {folder / 'loss_over_bytes.png'}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
