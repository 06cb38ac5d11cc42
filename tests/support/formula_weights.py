"""Weights of small models by a formula, so that no file has to hold them."""

import json
import pathlib
import shutil
import zlib

import numpy as np
import safetensors.numpy

SHAPES = "shapes.json"
"""File beside config.json with {name: shape} of the weights."""


def weight(name: str, shape: list[int]) -> np.ndarray:
    """A weight of numbers that look random, from -0.5 to 0.5; vectors are around 1."""
    places = np.arange(1, 1 + np.prod(shape, dtype=int)) + zlib.crc32(name.encode())
    numbers = np.sin(places * 12.9898) * 43758.5453 % 1 - 0.5
    return (numbers + (len(shape) == 1)).reshape(shape).astype(np.float32)


def weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """{name: array} of the model in a folder with a config.json and `SHAPES`."""
    shapes = json.loads((folder / SHAPES).read_text())
    return {name: weight(name, shape) for name, shape in shapes.items()}


def write(folder: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """Writes a folder of transformers with these weights; returns it."""
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    safetensors.numpy.save_file(weights(folder), to / "model.safetensors")
    return to
