"""Platforms (cpu, gpu, tpu): traits of their compilers that lowerings depend on."""

import dataclasses
import re

import jax
from jax.sharding import Mesh

from meshpar.errors import MeshparError
from meshpar.layouts.scope import current_scope
from meshpar.mesh import chips


@dataclasses.dataclass(frozen=True)
class Platform:
    """Traits of one platform.

    Attributes:
      name: its name in jax.
      widens_collectives: whether collectives move float32 instead of smaller floats.
        XLA:CPU adds in float32 anyway, and aborts on bfloat16 reductions beside
        automatic axes (its promotion pass, seen in jaxlib 0.10.2 and 0.12.0).
      hides_ring_steps: whether the steps of a ring overlap with compute where the
        native collective would not (TPUs, seen with libtpu 0.0.51).
      reports_peak: whether the peak memory of a compiled program is reported, with
        temporaries.
      tiles_vectors: whether only flat vectors of whole tiles are gathered and
        scattered by the native collectives.
      compiles_slowly: whether optimizing a program that runs once costs more time than
        it saves.
      multiplies_matrices: whether matmuls of two dims take less time than those of more
        (XLA:CPU calls a library for them).
      turns_stacks: whether a gather along a later dim of a layer's weight makes the
        compiler turn the stack of all layers, and hold it so for the whole step
        (XLA:GPU, seen in jaxlib 0.12.0).
      logits_copies: copies of the logits of a block of the loss, in float32, that are
        in memory beside the head's gradient, where they do not stay on the chip.
      on_chip_bytes: logits in float32 of which the copy in bfloat16 stays on the chip.
      reduces_late: whether the compiler adds parts of sums before it reduces them, and
        scatters sums of which each device needs a part. XLA:CPU reduces every part, and
        whole (seen in jaxlib 0.12.0 and libtpu 0.0.50).
      shows_host_transfers: whether the text of compiled programs shows all copies
        between device and host memory.
      adds_rows_in_place: whether a row of an array that is added to by `x.at[i].add` is
        read where it lies. One that is sliced, added to and written back is copied
        first (XLA:TPU, seen with libtpu 0.0.51).
      copies_rows: whether a row of a stack is copied before a grouped matmul reads it
        (XLA:TPU, seen with libtpu 0.0.50).
      copies_to_orders: whether a whole array is copied into another order in memory
        where conditionals choose different ones for it, such as one that writes it and
        one that reads a row, or where a loop reads rows in another one (XLA:TPU, seen
        with libtpu 0.0.50).
      allocates_early: whether the results of a loop get memory before the loops whose
        results it reads (XLA:TPU, seen with libtpu 0.0.50).
      pads_scattered_bytes: bytes from which a sum that is scattered along the first of
        its dims is padded, and a few rows move once more; none are at 0. One whose
        second dim is scattered is not (XLA:TPU, seen with libtpu 0.0.50).
      mixes_collectives: whether a collective that follows a loop and reads nothing of
        it may run among the collectives of the loop. Devices do not agree where, and
        the process aborts, waits for ever, or adds up what does not belong together
        (XLA:CPU, seen in jaxlib 0.10.2 and 0.12.0).
    """

    name: str
    widens_collectives: bool = False
    hides_ring_steps: bool = False
    reports_peak: bool = True
    tiles_vectors: bool = False
    compiles_slowly: bool = False
    multiplies_matrices: bool = False
    turns_stacks: bool = False
    logits_copies: float = 1.1
    on_chip_bytes: int = 0
    reduces_late: bool = True
    shows_host_transfers: bool = False
    adds_rows_in_place: bool = False
    copies_rows: bool = False
    copies_to_orders: bool = False
    allocates_early: bool = False
    pads_scattered_bytes: int = 0
    mixes_collectives: bool = False

    def logits_in_memory(self, size: int) -> int:
        """Bytes in memory for logits that take `size` bytes in float32."""
        return int(self.logits_copies * size) if size > self.on_chip_bytes else 0


CPU = Platform(
    "cpu",
    widens_collectives=True,
    reports_peak=False,
    reduces_late=False,
    compiles_slowly=True,
    multiplies_matrices=True,
    mixes_collectives=True,
)
GPU = Platform(chips.GPU, turns_stacks=True)
TPU = Platform(
    chips.TPU,
    hides_ring_steps=True,
    tiles_vectors=True,
    logits_copies=0.33,
    on_chip_bytes=2**28,
    shows_host_transfers=True,
    adds_rows_in_place=True,
    copies_rows=True,
    copies_to_orders=True,
    allocates_early=True,
    pads_scattered_bytes=2**23,
)

_PLATFORMS = {platform.name: platform for platform in (CPU, GPU, TPU)}
_PLATFORMS |= {"cuda": GPU, "rocm": GPU}  # jax's names for GPUs of one vendor.

JAX_PLATFORMS = {CPU.name: CPU.name, GPU.name: "cuda", TPU.name: TPU.name}
"""{platform: the name by which jax is asked for it}."""


def platform_named(name: str) -> Platform:
    """The platform with a name in jax; "cuda" and "rocm" are GPUs as well.

    Raises:
      MeshparError: none has this name.
    """
    if name not in _PLATFORMS:
        raise MeshparError(
            f"platform {name!r} is not supported: use devices of one of "
            f"{', '.join(_PLATFORMS)}"
        )
    return _PLATFORMS[name]


def platform_of_text(text: str) -> Platform:
    """The platform that the text of a compiled program is for, by its layouts."""
    if re.search(r"\{[\d,]*:T\(", text):
        return TPU
    return GPU if '"device_type":"CUDA"' in text or "__cublas$" in text else CPU


def platform_of(mesh: Mesh) -> Platform:
    """The platform of a mesh's devices."""
    return platform_named(mesh.devices.flat[0].platform)


def traced_platform() -> Platform:
    """The platform of the mesh that a model is traced for, or jax's default one."""
    scope = current_scope()
    if scope is None:
        return platform_named(jax.default_backend())
    return platform_of(scope.mesh)
