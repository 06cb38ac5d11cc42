"""Exports the checkpoint of a run to transformers, and imports one as a new run."""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshpar
from experiments import data, recipes
from experiments.data.tokenizers import load_tokenizer
from experiments.interchange import hugging_face
from experiments.models.decoder_config import DecoderConfig
from experiments.recipes.config import Config
from meshpar.checkpoint import persistent
from meshpar.checkpoint.blocks import (
    Blocks,
    Index,
    block_shape,
    read_in_blocks,
    write_checkpoint,
)
from meshpar.commands import outputs
from meshpar.errors import CheckpointError, ConfigError
from meshpar.layouts.axes import DATA
from meshpar.lowering.state import TrainState
from meshpar.runs.config import with_mode
from meshpar.runs.modes import SYNCHRONOUS
from meshpar.runs.run_record import RunRecord
from meshpar.runs.stored import stored_config

ONE_DEVICE = f"{DATA}=1"
TOKENIZER = "tokenizer.json"
"""File of a folder of transformers."""


def _first_state(
    config: Config, program: meshpar.TrainProgram, weights: Mapping[str, Blocks]
) -> TrainState:
    """The state at step 0 with the given weights, in blocks.

    Raises:
      CheckpointError: an array of the optimizer starts with unequal numbers, or from
        the weights.
    """
    abstract, optimizer = program.portable_state, program.lowering.optimizer

    def extremes(weight: Any) -> list[Any]:
        """The least and the largest number of each array of the optimizer."""
        like = abstract.params
        params = {path: jnp.full(x.shape, weight, x.dtype) for path, x in like.items()}
        leaves = jax.tree.leaves(optimizer.init(program.plan.trained(params)))
        return [(x.min(), x.max()) for x in leaves]

    extremes = jax.jit(extremes)  # Compiled, it holds none of these arrays.
    leaves, structure = jax.tree.flatten(abstract.optimizer_state)
    arrays = []
    for like, *found in zip(leaves, extremes(0.0), extremes(1.0), strict=True):
        first = np.asarray(found[0][0])
        if not (np.asarray(found) == first).all():
            raise CheckpointError(
                "the optimizer's state does not start with equal numbers; import with "
                "another optimizer"
            )
        arrays.append(_filled(like, first))
    return TrainState(
        _filled(abstract.step, 0),
        _filled(abstract.seed, config.seed),
        {path: weights[path] for path in abstract.params},
        structure.unflatten(arrays),
    )


def _filled(like: jax.ShapeDtypeStruct, value: Any) -> Blocks:
    """An array of equal numbers."""

    def read(index: Index) -> np.ndarray:
        return np.full([dim.stop - dim.start for dim in index], value, like.dtype)

    dtype = np.dtype(like.dtype)
    return Blocks(like.shape, dtype, block_shape(like.shape, dtype), read)


def export(checkpoint: persistent.StoredCheckpoint, folder: pathlib.Path) -> None:
    """Writes the weights of a checkpoint, averaged over its replicas.

    Args:
      checkpoint: a complete checkpoint.
      folder: where to write the files of transformers.

    Raises:
      MeshparError: a checkpoint that cannot be read, or a decoder that transformers
        does not have.
    """
    config = recipes.of_decoder(stored_config(checkpoint, recipes.CATALOG))
    if config.framework != "nnx":
        raise ConfigError(
            f"framework={config.framework}: only nnx models can be exported; train one "
            "with --set=framework=nnx"
        )
    hugging_face.config_json(config.model)  # An error now is none after the reading.
    tokenizer = pathlib.Path(config.data.tokenizer)
    if tokenizer.is_file():
        config.data.check_tokenizer(checkpoint.metadata)
        load_tokenizer(config.data.tokenizer)  # No other file is copied.
    outputs.check_folder(folder, "--to")
    params = config.make_model().params
    shapes = {path: param.shape for path, param in params.items()}
    parts = read_in_blocks(checkpoint, shapes)
    names = hugging_face.write(folder, config.model, shapes, parts)
    if tokenizer.is_file():
        shutil.copy(tokenizer, folder / TOKENIZER)
    print(f"wrote {len(names)} tensors of step {checkpoint.step} to {folder}")


def _imported_model(decoder: DecoderConfig, recipe: DecoderConfig) -> DecoderConfig:
    """The imported decoder, with the recipe's settings that no weight depends on."""
    names = ["dropout", "loss_block"]
    if decoder.num_experts:
        names += ["exchange_bound", "router_jitter", "balance_loss", "z_loss"]
    settings = {name: getattr(recipe, name) for name in names}
    if decoder.position == "rope":
        settings["length"] = min(recipe.length, decoder.length)
    try:
        return dataclasses.replace(decoder, **settings)
    except ValueError as error:
        raise ConfigError(f"with the recipe's {settings}: {error}") from error


def import_weights(run: pathlib.Path, source: pathlib.Path, recipe: Config) -> None:
    """Starts a run with the weights of a transformers model: a checkpoint of step 0.

    Args:
      run: folder of the run.
      source: folder with config.json and safetensors.
      recipe: the configuration; its model is replaced by the imported one.

    Raises:
      MeshparError: `run` already holds a run, or the model is not supported.
    """
    folder = run / "checkpoints"
    if persistent.find_checkpoints(folder):
        raise CheckpointError(f"{run} already holds a run; import into a new folder")
    outputs.check_folder(run, "DIR")
    decoder, tensors = hugging_face.read(source)
    model = _imported_model(decoder, recipe.model)
    config = dataclasses.replace(recipe, model=model, framework="nnx")
    corpus = data.load(config.data)
    config = with_mode(config.fitted(corpus), SYNCHRONOUS)
    config = dataclasses.replace(config, lowering="", layout="")
    program = config.make_program(meshpar.layouts.parse(ONE_DEVICE), jax.devices()[:1])
    shapes = {path: param.shape for path, param in program.model.params.items()}
    weights = hugging_face.imported(config.model, shapes, tensors)
    metadata = {
        "position": 0,
        "layout": ONE_DEVICE,
        "config": dataclasses.asdict(config),
        "data": corpus.fingerprint,
        "length": config.model.length,
        "seed": config.seed,
        **config.data.tokenizer_identity,
    }
    write_checkpoint(folder, 0, _first_state(config, program, weights), metadata)
    RunRecord(run).saved()
    changes = [
        f"--set model.{field.name}={getattr(model, field.name)}"
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != getattr(recipe.model, field.name)
    ]
    words = [f"--recipe={config.recipe}", f"--workdir={run}", *changes]
    print(f"{len(tensors)} tensors are step 0 of a run; resume it with the same flags:")
    print("python -m experiments.run", " ".join(words))
