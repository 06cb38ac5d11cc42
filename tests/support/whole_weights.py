"""Weights of transformers that are whole in memory, written by the parts of one."""

from experiments.interchange import hugging_face


def every_part(x):
    """The place of all of an array."""
    return tuple(slice(0, size) for size in x.shape)


def write(folder, config, params):
    """Writes {path: array} for transformers."""
    shapes = {path: x.shape for path, x in params.items()}
    parts = ((path, every_part(x), x) for path, x in params.items())
    return hugging_face.write(folder, config, shapes, parts)
