"""Weights alone from an orbax checkpoint, of a run or of another trainer."""

import contextlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from meshpar.arrays import Params
from meshpar.checkpoint.background_errors import quiet
from meshpar.checkpoint.checksums import CHECKSUMS, checksums
from meshpar.checkpoint.persistent import (
    REPLICAS,
    STATE,
    TENSORS,
    StoredCheckpoint,
)
from meshpar.errors import CheckpointError, shown
from meshpar.lowering.given_params import paths_of, place_params
from meshpar.lowering.program import Program
from meshpar.lowering.replicas import replica_average

Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""{path: ShapeDtypeStruct with sharding}."""


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
      CheckpointError: there is no checkpoint, it has nothing at that path, or what it
        has is not finite.
    """
    weights = _read(folder, program.abstract_params, at)
    _check_finite(folder, weights)
    return weights


def read_params(checkpoint: StoredCheckpoint, like: Shapes) -> Params:
    """Reads the parameters of a run's checkpoint, without its optimizer state.

    Args:
      checkpoint: a complete checkpoint, of any layout. Replicas are averaged.
      like: {path: ShapeDtypeStruct with sharding} of all parameters, with layers in the
        order of the model; another float dtype is converted.

    Raises:
      CheckpointError: it cannot be read, belongs to another model, has changed since it
        was written, or is not finite.
    """
    quiet()
    path, metadata = checkpoint.path, checkpoint.metadata
    lead, saved = check_shapes(checkpoint, {name: x.shape for name, x in like.items()})
    try:
        params = _read(path / STATE, like, "params")
    except Exception as error:
        raise unreadable(path, error) from error
    if changed := _changed(params, metadata, saved):
        raise corrupt(path, changed)
    _check_finite(path, params)
    if lead:
        params = {name: np.asarray(replica_average(x)) for name, x in params.items()}
    return place_params(params, like)


def check_shapes(
    checkpoint: StoredCheckpoint, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Compares the parameters in a checkpoint with those of a model.

    Returns:
      Leading dims of each stored parameter, (number of replicas,) or (), and {path:
      checksum} of the parameters.

    Raises:
      CheckpointError: one is missing, or has another shape.
    """
    tensors = checkpoint.metadata[TENSORS]
    num_replicas = checkpoint.metadata.get(REPLICAS, 1)
    lead = (num_replicas,) if num_replicas > 1 else ()
    for name, shape in shapes.items():
        saved = tensors.get(_key_path(name), ["missing"])[0]
        if saved != [*lead, *shape]:
            raise CheckpointError(
                f"{checkpoint.path} holds {name} as {saved}, and the model as "
                f"{[*lead, *shape]}; use the configuration of that run"
            )
    of_state = checkpoint.metadata.get(CHECKSUMS, [[]])[0]
    checksums = dict(zip(tensors, of_state, strict=False))
    paths = {name: _key_path(name) for name in shapes}
    return lead, {n: checksums[path] for n, path in paths.items() if path in checksums}


def unreadable(path: pathlib.Path, error: Exception) -> CheckpointError:
    """The error of a checkpoint of which a file is missing or damaged."""
    return CheckpointError(
        f"{path} cannot be read: {shown(str(error))}; restore the folder, or delete "
        "this checkpoint to use the one before it"
    )


def corrupt(path: pathlib.Path, name: str) -> CheckpointError:
    """The error of a checkpoint of which a parameter is not what was written."""
    return CheckpointError(
        f"{path} is corrupt: {name} has changed since it was written; delete it to use "
        "the one before it"
    )


def not_finite(path: str | os.PathLike, name: str) -> CheckpointError:
    """The error of a checkpoint of which a parameter is not finite."""
    return CheckpointError(
        f"{path}: {name} holds NaN or infinite numbers, which are no weights; use a "
        "checkpoint before it (a run goes back to one with --resume=last_good)"
    )


def is_finite(x: Any) -> bool:
    """Whether all floating-point numbers of an array are finite; others are."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if isinstance(x, jax.Array):
        return not floating or bool(_all_finite(x))
    return not floating or bool(np.isfinite(x).all())


def _check_finite(folder: str | os.PathLike, weights: Any) -> None:
    """Raises CheckpointError for a tree of weights that are not all finite."""
    leaves = jax.tree_util.tree_flatten_with_path(weights)[0]
    names = paths_of([keys for keys, _ in leaves])
    for name, (_, x) in zip(names, leaves, strict=True):
        if not is_finite(x):
            raise not_finite(folder, name)


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def _key_path(name: str) -> str:
    """The path of a parameter among the tensors of a training state."""
    return f".params[{name!r}]"


def _changed(
    params: Params, metadata: Mapping[str, Any], saved: Mapping[str, int]
) -> str:
    """The first parameter whose checksum is not the saved one; "" if none.

    Arrays that were converted, or read into the memory of the host, are not compared.
    """
    same = {
        name: x
        for name, x in params.items()
        if isinstance(x, jax.Array)
        and metadata[TENSORS][_key_path(name)][1] == str(x.dtype)
        and name in saved
    }
    now = dict(zip(same, checksums(list(same.values())), strict=True))
    return next((name for name, found in now.items() if found != saved[name]), "")


def _read(folder: str | os.PathLike, like: Shapes, at: str) -> dict[str, Any]:
    """Reads arrays of a checkpoint below a path, sharded as given arrays are."""
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
            _restore_args(path, leaf, like)
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


def _restore_args(path: str, stored: Any, shapes: Shapes) -> ocp.RestoreArgs:
    """Orbax's arguments for one array: onto a parameter's shards, or onto the host."""
    like = shapes.get(path)
    if like is None or tuple(stored.shape) != like.shape:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    floating = (jnp.issubdtype(x.dtype, jnp.floating) for x in (stored, like))
    dtype = like.dtype if all(floating) else stored.dtype
    return ocp.ArrayRestoreArgs(sharding=like.sharding, dtype=dtype)
