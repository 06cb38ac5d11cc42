"""Replica check: copies of a training state that differ, as after silent corruption.

A mesh axis that does not split a tensor holds copies of it, which have equal bits. Each
device hashes its shards; one all_gather of the hashes shows which copies differ.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshpar.arrays import Array, is_key, num_bytes, to_device, vary
from meshpar.contracts.contract import Contract
from meshpar.contracts.purposes import purpose
from meshpar.errors import MeshparError
from meshpar.layouts.plan import HOST_MEMORY
from meshpar.lowering.inspection import Inspection
from meshpar.lowering.train_program import TrainProgram

DIVERGED = 77
"""Exit code of a run in which copies differ."""


class ReplicaError(MeshparError):
    """Copies of a tensor that must be equal differ."""

    exit_code = DIVERGED


class Difference(NamedTuple):
    """One piece of a tensor whose copies differ.

    Attributes:
      tensor: its name.
      groups: the devices that hold equal copies, the largest group first.
    """

    tensor: str
    groups: tuple[tuple[jax.Device, ...], ...]

    @property
    def minority(self) -> tuple[jax.Device, ...]:
        """The devices that differ from more than half of all copies, if these agree."""
        most, *others = self.groups
        rest = tuple(device for group in others for device in group)
        return rest if len(most) > len(rest) else ()

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices that hold a copy."""
        return tuple(device for group in self.groups for device in group)

    def __str__(self) -> str:
        if self.minority:
            most = len(self.groups[0])
            return f"{self.tensor}: {_named(self.minority)} against {most} others"
        return f"{self.tensor}: {' against '.join(map(_named, self.groups))}"


def describe(differences: Sequence[Difference]) -> str:
    """Says which tensors differ, and which device is to blame if that can be told.

    It is the only one that differs from a majority. An error that training has carried
    on makes other devices differ, too; and of two copies none is known to be right.

    Args:
      differences: as `ReplicaCheck.differences` gives them, at least one.
    """
    shown = "; ".join(map(str, differences[:3]))
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    odd = list(dict.fromkeys(d for found in differences for d in found.minority))
    if len(odd) == 1:
        verdict = f"{_named(odd)} is wrong: it differs from the majority"
    else:
        held = (device for found in differences for device in found.devices)
        verdict = f"one of {_named(odd or list(dict.fromkeys(held)))} is wrong"
    return f"{shown}{more}. So {verdict}"


def _named(devices: Sequence[jax.Device]) -> str:
    """Devices by their numbers and processes."""
    by_process: dict[int, list[str]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(str(device.id))
    return " and ".join(
        f"device{'s' * (len(ids) > 1)} {', '.join(ids)} of process {process}"
        for process, ids in by_process.items()
    )


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the state.

    Attributes:
      name: for messages.
      spec: how the mesh splits it.
      on_host: whether it lives in host memory.
      num_bytes: of the whole tensor.
    """

    name: str
    spec: PartitionSpec
    on_host: bool
    num_bytes: int

    def copy_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes along which there are copies."""
        split = {axis for entry in self.spec for axis in _axes(entry)}
        return tuple(a for a, n in mesh.shape.items() if n > 1 and a not in split)


class ReplicaCheck:
    """Compares all copies of a training state, without moving the state.

    Attributes:
      inspection: the program that hashes, lowered, compiled and read back.
    """

    def __init__(self, program: TrainProgram):
        """Compiles nothing yet.

        Args:
          program: whose states it compares.
        """
        self._mesh = mesh = program.mesh
        self._tensors = list(_tensors(program.abstract_state))
        abstract = jax.tree.leaves(program.abstract_state)

        def trace() -> jax.stages.Traced:
            with jax.set_mesh(mesh):
                return jax.jit(self._hashes).trace(abstract)

        self.inspection = Inspection(trace, mesh, lambda collectives: None)

    def differences(self, state: Any) -> list[Difference]:
        """The pieces of tensors whose copies differ; all processes get the same.

        Args:
          state: of the program, as its `step` returns it.
        """
        hashes = np.asarray(self.inspection.compiled(jax.tree.leaves(state)))
        return list(self._compared(hashes))

    @property
    def contract(self) -> Contract:
        """The one collective that a comparison writes."""
        return Contract(self.inspection.written_terms)

    def violations(self) -> list[str]:
        """Where the compiled program moves other things than it declares."""
        return self.contract.violations(self.inspection.collectives)

    def __str__(self) -> str:
        copied = [t for t in self._tensors if t.copy_axes(self._mesh)]
        size, whole = (
            sum(tensor.num_bytes for tensor in tensors)
            for tensors in (copied, self._tensors)
        )
        return (
            f"copies: {size:,} of {whole:,} bytes of the state have copies, "
            f"{len(copied)} of {len(self._tensors)} tensors"
        )

    def _hashes(self, leaves: Sequence[Array]) -> Array:
        """[devices, tensors] uint32, on all devices."""
        mesh, tensors = self._mesh, self._tensors
        axes = mesh.axis_names

        def on_one(shards: list[Array]) -> Array:
            own = jnp.stack([vary(hash_of(x), axes) for x in shards])
            with purpose("hashes of copies"):
                return lax.all_gather(own, axes, to="invarying")

        pairs = zip(leaves, tensors, strict=True)
        leaves = [to_device(x) if tensor.on_host else x for x, tensor in pairs]
        leaves = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
        specs = [tensor.spec for tensor in tensors]
        return jax.shard_map(
            on_one, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()
        )(leaves)

    def _compared(self, hashes: np.ndarray) -> Iterator[Difference]:
        """Compares the hashes of all devices, tensor by tensor and piece by piece."""
        sizes, names = self._mesh.devices.shape, self._mesh.axis_names
        by_place = hashes.reshape(*sizes, len(self._tensors))
        for number, tensor in enumerate(self._tensors):
            copies = tensor.copy_axes(self._mesh)
            if not copies:
                continue
            order = [a for a in names if a not in copies] + list(copies)
            order = [names.index(axis) for axis in order]
            number_of_copies = int(np.prod([self._mesh.shape[a] for a in copies]))
            found, devices = (
                x.transpose(order).reshape(-1, number_of_copies)
                for x in (by_place[..., number], self._mesh.devices)
            )
            for row in np.flatnonzero((found != found[:, :1]).any(axis=1)):
                yield Difference(tensor.name, _groups(found[row], devices[row]))


def _groups(
    hashes: np.ndarray, devices: np.ndarray
) -> tuple[tuple[jax.Device, ...], ...]:
    """Devices with equal hashes, the largest group first."""
    groups: dict[int, list[jax.Device]] = collections.defaultdict(list)
    for value, device in zip(hashes.tolist(), devices, strict=True):
        groups[value].append(device)
    return tuple(map(tuple, sorted(groups.values(), key=len, reverse=True)))


def _tensors(state: Any) -> Iterator[_Tensor]:
    """The tensors of an abstract state, in the order of its leaves."""
    for keys, x in jax.tree_util.tree_leaves_with_path(state):
        field, *rest = keys
        is_parameter = field.name == "params" and len(rest) == 1
        name = jax.tree_util.keystr(keys).removeprefix(".")
        yield _Tensor(
            rest[0].key if is_parameter else name,
            x.sharding.spec,
            x.sharding.memory_kind == HOST_MEMORY,
            num_bytes(x),
        )


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a spec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


_UNSIGNED: Mapping[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def hash_of(x: Array) -> Array:
    """A uint32 of all bits of an array and their places.

    It is a wrap-around sum of a one-to-one function of each word and its place. So two
    arrays that differ in one word never have one hash; those that differ in more have
    by a chance of 2**-32.

    Args:
      x: numbers or booleans of up to 64 bits.
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    unsigned = _UNSIGNED.get(x.dtype.itemsize, jnp.uint32)  # Of 8 bytes: two words.
    words = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place, stride = jnp.uint32(0), 1
    for dim in reversed(range(words.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        place, stride = (
            place + along * jnp.uint32(stride % 2**32),
            stride * words.shape[dim],
        )
    return _mixed(words + place * jnp.uint32(0x9E3779B9)).sum(dtype=jnp.uint32)


def _mixed(x: Array) -> Array:
    """The finalizer of MurmurHash3: each input bit changes half of the output bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
