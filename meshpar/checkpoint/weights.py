"""Weights from an orbax checkpoint of another trainer."""

import contextlib
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from meshpar.errors import CheckpointError
from meshpar.lowering.given_params import paths_of
from meshpar.lowering.program import Program


def read_weights(
    folder: str | os.PathLike, program: Program, at: str = "params"
) -> dict[str, Any]:
    """Reads the weights that another trainer saved, for `program.init(params=...)`.

    The rest of the checkpoint is not read. An array that has the path and the shape of
    a parameter goes straight to its shards. Others, such as layers that the program
    stacks, are read into the memory of the host.

    Args:
      folder: one checkpoint, as orbax's StandardCheckpointer or PyTreeCheckpointer
        writes it: nested dicts, or one dict {path: array}.
      program: the program that will train.
      at: path of the weights in the checkpoint, such as "state/params"; "" for all.

    Raises:
      CheckpointError: there is no checkpoint, or it has nothing at that path.
    """
    path = pathlib.Path(folder).resolve()
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    with contextlib.closing(reader):
        try:
            tree = reader.metadata(path).item_metadata.tree
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{folder} holds no orbax checkpoint that can be read ({error}); name "
                "the folder of one step"
            ) from error
        parts = [part for part in at.split("/") if part]
        weights = _subtree(tree, parts, folder)
        leaves, structure = jax.tree_util.tree_flatten_with_path(weights)
        paths = paths_of([keys for keys, _ in leaves])
        placed = [
            _restore_args(path, leaf, program)
            for path, (_, leaf) in zip(paths, leaves, strict=True)
        ]
        wanted, arguments = weights, jax.tree.unflatten(structure, placed)
        for part in reversed(parts):
            wanted, arguments = {part: wanted}, {part: arguments}
        restore = ocp.args.PyTreeRestore(
            item=wanted, restore_args=arguments, partial_restore=True
        )
        restored = reader.restore(path, args=restore)
    return _subtree(restored, parts, folder)


def _subtree(tree: Any, parts: list[str], folder: str | os.PathLike) -> Any:
    for i, part in enumerate(parts):
        if not isinstance(tree, dict) or part not in tree:
            found = ", ".join(map(str, tree)) if isinstance(tree, dict) else "one array"
            raise CheckpointError(
                f"{folder} has nothing at {'/'.join(parts[: i + 1])!r}, but {found}; "
                "give the path of the weights as at=..."
            )
        tree = tree[part]
    return tree


def _restore_args(path: str, stored: Any, program: Program) -> ocp.RestoreArgs:
    """How to restore one array: onto the shards of its parameter, or onto the host."""
    like = program.abstract_params.get(path)
    if like is None or tuple(stored.shape) != like.shape:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    floating = (jnp.issubdtype(x.dtype, jnp.floating) for x in (stored, like))
    dtype = like.dtype if all(floating) else stored.dtype
    return ocp.ArrayRestoreArgs(sharding=like.sharding, dtype=dtype)
