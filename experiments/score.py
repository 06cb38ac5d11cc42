r"""Scores a text with the weights of a run: loss, perplexity, log-probabilities.

    python -m experiments.score runs/book --data=held_out.txt --layout="fsdp=2,tensor=4"

Without --data it scores the held-out batches of the run: the loss is the one that the
run evaluates. A run of a file of your own is evaluated on its own data, with its
metrics.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from experiments import data, recipes
from experiments.generation import scoring
from experiments.recipes.config import Config
from meshpar.commands import command_line, outputs
from meshpar.commands import score as of_any_run
from meshpar.commands.devices import start_devices
from meshpar.errors import ConfigError
from meshpar.runs.config import RunConfig
from meshpar.runs.stored import newest_checkpoint, stored_config, weights_for

OUT = flags.DEFINE_string(
    "out", None, "File for a line {token, text, log_probability} for each token."
)


def _batches(config: Config) -> tuple[Config, data.Corpus, list]:
    """The configuration with its vocabulary, the text, and its batches."""
    path, everything = command_line.DATA.value, np.arange(config.batch_size)
    if path is None:
        corpus = data.load(config.data)
        config = config.fitted(corpus)
        held_out = data.held_out_batches(
            corpus,
            length=config.model.length,
            batch_size=config.batch_size,
            rows=everything,
            limit=config.evaluation_batches,
        )
        batches = [*held_out.batches]
        if held_out.rest is not None:
            batches.append(scoring.filled(held_out.rest, config.batch_size))
        return config, corpus, batches
    settings = dataclasses.replace(config.data, pack=False)
    whole = dataclasses.replace(settings, path=path, held_out=0.0, separator=-1)
    corpus = data.load(whole)
    config = dataclasses.replace(config, data=settings)
    return config, corpus, scoring.whole_text(corpus.train[:], config)


def main(arguments: Sequence[str]) -> int:
    """Scores, and returns the exit code."""
    if len(arguments) != 2:
        raise ConfigError("give one folder: python -m experiments.score DIR")
    if OUT.value is not None:
        outputs.check_file(OUT.value, "--out")
    checkpoint = newest_checkpoint(arguments[1])
    config = stored_config(checkpoint, recipes.CATALOG, command_line.named_recipe())
    if not isinstance(config, Config):
        _refuse_texts(config)
        return of_any_run.main(arguments)
    config = of_any_run.config_from_flags(config)
    config, corpus, batches = _batches(config)
    layout, devices = start_devices(config)
    program = config.make_program(layout, devices)
    params = weights_for(program, checkpoint)
    found = list(scoring.score(program, params, batches))
    scores = scoring.Scores(
        *(np.concatenate(parts) for parts in zip(*found, strict=True))
    )
    if jax.process_index() == 0:
        if OUT.value is not None:
            _write(pathlib.Path(OUT.value), scores, corpus)
        print(f"step {checkpoint.step} of {arguments[1]} under {layout}")
        print(
            f"{len(scores.tokens):,} tokens of {corpus.name}: loss {scores.loss:.6f} "
            f"nats per token, perplexity {math.exp(scores.loss):.4f}"
        )
    return 0


def _refuse_texts(config: RunConfig) -> None:
    """Raises ConfigError for the flags of texts beside a run that knows none."""
    for flag in (command_line.DATA, OUT):
        if flag.value is not None:
            raise ConfigError(
                f"--{flag.name}={flag.value} is for decoders of the catalog, and the "
                f"run is of {config.recipe}, which has data of its own; leave it out"
            )


def _write(file: pathlib.Path, scores: scoring.Scores, corpus: data.Corpus) -> None:
    pairs = zip(scores.tokens.tolist(), scores.log_probabilities.tolist(), strict=True)
    lines = (
        json.dumps(dict(token=token, text=corpus.decode([token]), log_probability=x))
        for token, x in pairs
    )
    file.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    command_line.run(
        main,
        (
            command_line.RECIPE,
            command_line.LAYOUT,
            command_line.DATA,
            command_line.BATCH_SIZE,
            *command_line.OF_DEVICES,
        ),
        arguments=True,
        known=recipes.CATALOG,
    )
