"""Texts of a run: its description at the start, and its sample and files at the end."""

import os

import jax

from meshpar.arrays import Params
from meshpar.islands.program import IslandsProgram
from meshpar.runs import metrics
from meshpar.runs.metrics import EVALUATION_LOSS, MetricsLog
from meshpar.runs.progress import Progress
from meshpar.runs.run_record import CHECKPOINTS
from meshpar.runs.setup import Setup


def _text(name: str, loss: float) -> str:
    return f"{name} {loss:.4f}"


def describe(setup: Setup, start: int) -> str:
    """Model, data, layout and folder of a run that starts after step `start`."""
    config, program = setup.config, setup.program
    mesh, model = program.mesh, program.model
    num_parameters = sum(param.size for param in model.params.values())
    lines = [
        f"model: {config.recipe}, {num_parameters:,} parameters",
        f"data: {setup.run.data.name}",
        f"layout: {program.layout} on {mesh.size} {mesh.devices.flat[0].platform} "
        f"device(s), {jax.process_count()} process(es)",
        *([program.mode_text] if program.mode_text else []),
        *([_text(*setup.baseline)] if setup.baseline else []),
        f"workdir: {setup.folder}" + (f", going on from step {start}" if start else ""),
    ]
    if start >= config.steps:
        lines.append(f"already at step {start} of {config.steps}; raise --steps")
    return "\n".join(lines)


def finish(
    setup: Setup, params: Params, log: MetricsLog | None, progress: Progress
) -> None:
    """Prints a sample and the final loss, draws the plot, and lists all files.

    Args:
      setup: the run.
      params: the trained parameters.
      log: its metrics; None on all processes but the first.
      progress: prints.
    """
    if setup.run.sample:
        progress.say(f"sample:\n{setup.run.sample(setup.program, params)}\n")
    if not log:
        return
    rows, baseline = metrics.read(log.path), setup.baseline
    metrics.plot(rows, setup.folder / "loss.png", baseline)
    held_out = [row[EVALUATION_LOSS] for row in rows if EVALUATION_LOSS in row]
    if held_out:
        beside = f", {_text(*baseline)}" if baseline else ""
        progress.say(f"held-out loss {held_out[-1]:.4f}{beside}")
    paths = {
        "metrics": log.path,
        "tensorboard": log.tensorboard,
        "checkpoints": setup.folder / CHECKPOINTS,
        "plot": setup.folder / "loss.png",
    }
    if isinstance(setup.program, IslandsProgram):
        from meshpar.runs.time_lines import time_lines  # It delays the first step.

        paths["time lines"] = setup.folder / "time_lines.png"
        picture = time_lines(setup.program.spans())
        picture.savefig(paths["time lines"], dpi=110, bbox_inches="tight")
    if setup.profile:
        paths["profile"] = setup.folder / "profile"
    for name, path in paths.items():
        progress.say(f"{name}: {os.path.relpath(path)}")
