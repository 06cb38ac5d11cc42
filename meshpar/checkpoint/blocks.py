"""Checkpoints in blocks: written and read with a few blocks of one array in memory.

A model may be larger than the memory of the machine that converts its weights. Orbax
saves whole arrays; here a type handler of it takes arrays that are made block by block.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from meshpar.arrays import num_bytes
from meshpar.checkpoint.background_errors import quiet
from meshpar.checkpoint.checksums import CHECKSUMS, checksum_of_block
from meshpar.checkpoint.disk_space import lack_of_space
from meshpar.checkpoint.mode_identity import EXTRA, MODE
from meshpar.checkpoint.persistent import (
    BLOCK_BYTES,
    REPLICAS,
    STATE,
    TENSORS,
    StoredCheckpoint,
    shapes_and_dtypes,
    write_metadata,
)
from meshpar.checkpoint.weights import (
    check_shapes,
    corrupt,
    is_finite,
    not_finite,
    unreadable,
)
from meshpar.checkpoint.write_problems import failed_write
from meshpar.errors import CheckpointError, MeshparError
from meshpar.lowering.replicas import replica_average

Index = tuple[slice, ...]
"""The place of a block: a slice with a start and an end for each dim."""


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """An array that is nowhere whole.

    Attributes:
      shape: of the whole.
      dtype: of its numbers.
      block: shape of the blocks in which it is made at the least cost.
      read: makes the part at an index.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    block: tuple[int, ...]
    read: Callable[[Index], np.ndarray]

    def __getitem__(self, index: Index) -> np.ndarray:
        """The part at an index of slices, one for each dim, of which ends may lack."""
        pairs = zip(index, self.shape, strict=True)
        return self.read(tuple(slice(*s.indices(size)[:2]) for s, size in pairs))


def block_shape(
    shape: Sequence[int], dtype: Any, order: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The shape of blocks of at most `BLOCK_BYTES`, which lie in one piece.

    Args:
      shape: of the array.
      dtype: of its numbers.
      order: the dims from the outermost in memory to the innermost; by default theirs.
    """
    block, left = list(shape), BLOCK_BYTES // np.dtype(dtype).itemsize
    for dim in reversed(range(len(shape)) if order is None else order):
        block[dim] = max(1, min(shape[dim], left))
        left //= block[dim]
    return tuple(block)


def indices(shape: Sequence[int], block: Sequence[int]) -> Iterator[Index]:
    """The places of all blocks of an array, in order."""
    dims = zip(shape, block, strict=True)
    return itertools.product(
        *([slice(a, min(a + b, n)) for a in range(0, n, b)] for n, b in dims)
    )


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes `Blocks` as orbax writes numpy arrays, one block after the other.

    Attributes:
      checksums: {array: checksum} of those written so far.
    """

    def __init__(self):
        super().__init__()
        self.checksums: dict[Blocks, int] = {}

    async def serialize(
        self, values: Sequence[Blocks], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        del args
        writing = self._write(values, infos)
        return [ocp.future.CommitFutureAwaitingContractedSignals(writing)]

    async def _write(self, values: Sequence[Blocks], infos: Sequence[Any]) -> None:
        for array, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = ocp.type_handlers.get_json_tspec_write(
                info, True, array.shape, array.block, array.dtype, process_index=0
            )
            store = await tensorstore.open(
                tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
            )
            total = 0
            for index in indices(array.shape, array.block):
                block = array[index]
                total += checksum_of_block(block, index, array.shape)
                await store[index].write(block)
            self.checksums[array] = total % 2**32


def write_checkpoint(
    folder: pathlib.Path, step: int, state: Any, metadata: Mapping[str, Any]
) -> None:
    """Writes the first checkpoint of a run, of a state that is nowhere whole.

    One process calls it. A folder that lacks its checkpoint is not left behind.

    Args:
      folder: of the checkpoints; it is made, or is empty.
      step: number of training steps done.
      state: the training state in the order of the model, of `Blocks`.
      metadata: as in `Checkpoints.save`.

    Raises:
      CheckpointError: the disk is too full, or fails.
      MeshparError: of a block that cannot be read.
    """
    quiet()
    folder.parent.mkdir(parents=True, exist_ok=True)
    size = sum(map(num_bytes, jax.tree.leaves(state)))
    if problem := lack_of_space(folder.parent, size):
        raise CheckpointError(f"{problem} or choose another one")
    handler, partial = _Handler(), folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    registry = ocp.type_handlers.create_type_handler_registry(
        (Blocks, handler), (jax.Array, ocp.type_handlers.get_type_handler(jax.Array))
    )
    writer = ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    )
    path = partial / str(step)
    try:
        with contextlib.closing(writer):
            writer.save(path.absolute() / STATE, args=ocp.args.PyTreeSave(state))
        saved = [handler.checksums[array] for array in jax.tree.leaves(state)]
        own = {TENSORS: shapes_and_dtypes(state), CHECKSUMS: [saved, []]}
        mode = {EXTRA: {MODE: ""}, REPLICAS: 1}
        write_metadata(path, {**metadata, **own, **mode})
        partial.replace(folder)
    except MeshparError:
        raise
    except Exception as error:
        raise failed_write(folder.parent, error, []) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_in_blocks(
    checkpoint: StoredCheckpoint, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Index, np.ndarray]]:
    """Generates (path, place, part) of the parameters of a run's checkpoint.

    The blocks are those in which the checkpoint was written. Replicas are averaged.

    Args:
      checkpoint: a complete checkpoint, of any layout.
      shapes: {path: shape} of all parameters, with layers in the order of the model.

    Raises:
      CheckpointError: it cannot be read, belongs to another model, is not finite, or
        has changed since it was written; the last is known after all of its blocks.
    """
    lead, saved = check_shapes(checkpoint, shapes)
    context = ocp.type_handlers.get_ts_context()
    for path in shapes:
        info = ocp.type_handlers.ParamInfo(
            name=f"params.{path}",
            parent_dir=(checkpoint.path / STATE).absolute(),
            ts_context=context,
        )
        spec = tensorstore.Spec(ocp.type_handlers.get_json_tspec_read(info, True))
        opened, total = tensorstore.open(spec, open=True, context=context), 0
        store = _result(opened, checkpoint.path)
        block = store.chunk_layout.read_chunk.shape[len(lead) :]
        for index in indices(shapes[path], block):
            place = (*(slice(0, size) for size in lead), *index)
            part = _result(store[place].read(), checkpoint.path)
            if not is_finite(part):
                raise not_finite(checkpoint.path, path)
            total += checksum_of_block(part, place, store.shape)
            yield path, index, np.asarray(replica_average(part) if lead else part)
        if path in saved and total % 2**32 != saved[path]:
            raise corrupt(checkpoint.path, path)


def _result(future: tensorstore.Future, path: pathlib.Path) -> Any:
    """The result of tensorstore.

    Raises:
      CheckpointError: the checkpoint cannot be read.
    """
    try:
        return future.result()
    except Exception as error:
        raise unreadable(path, error) from error
