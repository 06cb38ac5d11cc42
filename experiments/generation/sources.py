"""Models to generate with: a run's newest checkpoint, or a folder of transformers."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import meshpar
from experiments import recipes
from experiments.data.tokenizers import Tokenizer, tokenizer_of
from experiments.interchange import hugging_face
from experiments.interchange.hugging_face_config import CONFIG
from experiments.interchange.hugging_face_files import read_json
from experiments.interchange.runs import TOKENIZER
from experiments.models.decoder_config import DecoderConfig
from experiments.models.language_model import language_model
from experiments.recipes.config import Config
from meshpar.arrays import Params
from meshpar.checkpoint import StoredCheckpoint, read_params
from meshpar.errors import ConfigError, shown
from meshpar.layouts.axes import DATA
from meshpar.layouts.offload import PARAMETERS
from meshpar.lowering.given_params import place_params
from meshpar.runs import programs
from meshpar.runs.stored import as_one_model, newest_checkpoint, stored_config


@dataclasses.dataclass(frozen=True)
class Source:
    """A model with weights somewhere.

    Attributes:
      name: of the weights; other weights have another name.
      decoder: the configuration of the model.
      model: the model.
      layout: the layout by default.
      compute_dtype: dtype of weights and cache.
      tokenizer: of its data.
      stop: token ids that end a text.
      load: reads the weights onto the devices of a generator.
    """

    name: str
    decoder: DecoderConfig
    model: meshpar.Model
    layout: meshpar.Layout
    compute_dtype: Any
    tokenizer: Tokenizer
    stop: tuple[int, ...]
    load: Callable[[meshpar.generation.Generator], Params]


def config_of(checkpoint: StoredCheckpoint, layout: str | None) -> Config:
    """The configuration of a run as one model under a layout.

    Args:
      checkpoint: of the run.
      layout: its layout string; None for that of the run, whose replicas are averaged.

    Raises:
      MeshparError: a configuration or a layout that cannot be read.
    """
    stored = checkpoint.metadata.get("config")
    recipe = stored.get("recipe") if isinstance(stored, dict) else None
    if isinstance(recipe, str) and ":" in recipe:
        raise ConfigError(
            f"{checkpoint.path} is of {shown(recipe)}, and this command needs a "
            "decoder of the catalog, whose tokens it knows; use meshpar.generator in a "
            "script"
        )
    return as_one_model(stored_config(checkpoint, recipes.CATALOG), layout)


def find_source(path: str, layout: str | None, tokenizer: str | None) -> Source:
    """The model in a folder.

    Args:
      path: folder of a run, or one with config.json and safetensors.
      layout: layout string; by default that of the run, or one device.
      tokenizer: a tokenizer.json; by default that of the run, or of the folder.

    Raises:
      MeshparError: a folder without a model, or a model that this repository lacks.
    """
    if (pathlib.Path(path) / CONFIG).is_file():
        return _of_transformers(pathlib.Path(path), layout, tokenizer)
    checkpoint = newest_checkpoint(path)
    config = config_of(checkpoint, layout)
    if not tokenizer:
        config.data.check_tokenizer(checkpoint.metadata)
    model = config.make_model()
    return Source(
        name=f"step {checkpoint.step} of {path}",
        decoder=config.model,
        model=model,
        layout=meshpar.layouts.parse(config.layout),
        compute_dtype=programs.compute_dtype(config),
        tokenizer=tokenizer_of(config.data.path, tokenizer or config.data.tokenizer),
        stop=(),
        load=lambda generator: read_params(
            checkpoint, generator.program.abstract_params
        ),
    )


def streamed(source: Source) -> Source:
    """The source with the layers' weights in host memory between their uses.

    Raises:
      LayoutError: its layout cannot bring them layer by layer.
    """
    layout = dataclasses.replace(source.layout, offload=PARAMETERS)
    return dataclasses.replace(source, layout=layout)


def _of_transformers(
    folder: pathlib.Path, layout: str | None, tokenizer: str | None
) -> Source:
    """The model in a folder of transformers."""
    decoder, tensors = hugging_face.read(folder)
    model = language_model(decoder)
    file = tokenizer or str(folder / TOKENIZER)
    if not pathlib.Path(file).is_file():
        raise ConfigError(
            f"{folder} has no {TOKENIZER}; add it, or give one as --tokenizer=FILE"
        )
    description = read_json(folder / CONFIG)
    end = description.get("eos_token_id")
    ends = end if isinstance(end, list) else [end]
    dtype = description.get("dtype") or description.get("torch_dtype")
    shapes = {path: param.shape for path, param in model.params.items()}

    def load(generator: meshpar.generation.Generator) -> Params:
        weights = hugging_face.imported(decoder, shapes, tensors)
        return place_params(weights, generator.program.abstract_params)

    return Source(
        name=str(folder),
        decoder=decoder,
        model=model,
        layout=meshpar.layouts.parse(layout or f"{DATA}=1,allow=idle_devices"),
        compute_dtype=jnp.bfloat16 if dtype in ("bfloat16", "float16") else None,
        tokenizer=tokenizer_of("", file),
        stop=tuple(x for x in ends if isinstance(x, int) and 0 <= x < decoder.vocab),
        load=load,
    )


def make_generator(
    source: Source, devices: list[jax.Device], max_length: int, batch_size: int
) -> meshpar.generation.Generator:
    """The generator of a source under its layout.

    Args:
      source: the model.
      devices: as many as the layout fills.
      max_length: most tokens that the model sees; 0 for the length that it trained
        with.
      batch_size: sequences at once; 0 for as few as the layout can split.

    Raises:
      MeshparError: a layout, length or batch that do not fit.
    """
    return meshpar.generator(
        source.model,
        source.layout,
        max_length=max_length or source.decoder.length,
        batch_size=batch_size,
        devices=devices,
        compute_dtype=source.compute_dtype,
    )
