"""Exports the checkpoint of a run to transformers, and imports one as a new run."""

import contextlib
import dataclasses
import pathlib
import shutil

import jax

import meshpar
from experiments import data, recipes
from experiments.data.tokenizers import load_tokenizer
from experiments.interchange import hugging_face
from experiments.models.decoder_config import DecoderConfig
from experiments.recipes.config import Config
from meshpar.checkpoint import persistent
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.checkpoint.weights import read_params
from meshpar.commands import outputs
from meshpar.errors import CheckpointError, ConfigError
from meshpar.layouts.axes import DATA
from meshpar.runs.config import with_mode
from meshpar.runs.modes import SYNCHRONOUS
from meshpar.runs.run_record import RunRecord
from meshpar.runs.stored import stored_config

ONE_DEVICE = f"{DATA}=1"
TOKENIZER = "tokenizer.json"
"""File of a folder of transformers."""


def _on_one_device(config: Config) -> tuple[Config, meshpar.TrainProgram]:
    """The configuration as a synchronous run on one device, and its program."""
    config = with_mode(config, SYNCHRONOUS)
    config = dataclasses.replace(config, lowering="", layout="")
    layout = meshpar.layouts.parse(ONE_DEVICE)
    return config, config.make_program(layout, jax.devices()[:1])


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
    config, program = _on_one_device(config)
    params = read_params(checkpoint, program.portable_state.params)
    names = hugging_face.write(folder, config.model, jax.device_get(params))
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
    config, program = _on_one_device(config.fitted(corpus))
    shapes = {path: param.shape for path, param in program.model.params.items()}
    weights = hugging_face.imported(config.model, shapes, tensors)
    state = program.init(config.seed)
    params = state.params
    for path, x in weights:  # Each takes the place of a random one.
        params[path] = jax.device_put(x, params[path].sharding)
    metadata = {
        "position": 0,
        "layout": ONE_DEVICE,
        "config": dataclasses.asdict(config),
        "data": corpus.fingerprint,
        "length": config.model.length,
        "seed": config.seed,
        **config.data.tokenizer_identity,
    }
    with contextlib.closing(Checkpoints(folder, program.portable_state)) as checkpoints:
        checkpoints.save(0, state, metadata)
    RunRecord(run).saved()
    changes = [
        f"--set model.{field.name}={getattr(model, field.name)}"
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != getattr(recipe.model, field.name)
    ]
    words = [f"--recipe={config.recipe}", f"--workdir={run}", *changes]
    print(f"{len(tensors)} tensors are step 0 of a run; resume it with the same flags:")
    print("python -m experiments.run", " ".join(words))
