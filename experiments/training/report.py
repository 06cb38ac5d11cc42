"""Texts of a run: its description at the start, and its sample and files at the end."""

import os

import jax
import numpy as np

from experiments.training import metrics
from experiments.training.metrics import EVALUATION_LOSS, MetricsLog
from experiments.training.progress import Progress
from experiments.training.sampling import sample
from experiments.training.setup import Setup
from meshpar.arrays import Params
from meshpar.islands.program import IslandsProgram


def describe(setup: Setup, start: int) -> str:
    """Model, data, layout and folder of a run that starts after step `start`."""
    config, corpus, program = setup.config, setup.corpus, setup.program
    mesh, model = program.mesh, program.model
    num_parameters = sum(param.size for param in model.params.values())
    lines = [
        f"model: {config.recipe}, {num_parameters:,} parameters",
        f"data: {corpus.name}, {len(corpus.train):,} tokens, held out "
        f"{len(corpus.held_out):,}",
        f"layout: {program.layout} on {mesh.size} {mesh.devices.flat[0].platform} "
        f"device(s), {jax.process_count()} process(es)",
        *([program.mode_text] if program.mode_text else []),
        f"floor: a unigram model of this data reaches {setup.unigram_loss:.4f}",
        f"workdir: {setup.folder}" + (f", going on from step {start}" if start else ""),
    ]
    if start >= config.steps:
        lines.append(f"already at step {start} of {config.steps}; raise --steps")
    return "\n".join(lines)


def _sample_text(setup: Setup, params: Params) -> str:
    """Continues the beginning of the held-out text."""
    config, corpus = setup.config, setup.corpus
    prompt = np.asarray(corpus.held_out[: config.model.length // 2])
    ids = sample(
        setup.program,
        params,
        prompt.tolist(),
        config.sample_tokens,
        length=config.model.length,
        seed=config.seed,
    )
    return corpus.decode(ids)


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
    if setup.config.sample_tokens:
        progress.say(f"sample:\n{_sample_text(setup, params)}\n")
    if not log:
        return
    rows, floor = metrics.read(log.path), setup.unigram_loss
    metrics.plot(rows, setup.folder / "loss.png", floor)
    held_out = [row[EVALUATION_LOSS] for row in rows if EVALUATION_LOSS in row]
    if held_out:
        progress.say(f"held-out loss {held_out[-1]:.4f}, unigram floor {floor:.4f}")
    paths = {
        "metrics": log.path,
        "tensorboard": log.tensorboard,
        "checkpoints": setup.folder / "checkpoints",
        "plot": setup.folder / "loss.png",
    }
    if isinstance(setup.program, IslandsProgram):
        from experiments.reports import islands  # Its plots delay the first step.

        paths["time lines"] = setup.folder / "time_lines.png"
        picture = islands.time_lines(setup.program.spans())
        picture.savefig(paths["time lines"], dpi=110, bbox_inches="tight")
    if setup.profile:
        paths["profile"] = setup.folder / "profile"
    for name, path in paths.items():
        progress.say(f"{name}: {os.path.relpath(path)}")
