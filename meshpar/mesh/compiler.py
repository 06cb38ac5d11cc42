"""Options that compilers of steps get, by platform."""

from jax.sharding import Mesh

from meshpar.mesh.platform import GPU, TPU, platform_of

_MOST_WITHOUT_TABLE = 64
"""Largest mesh whose permutes compile faster without a table (libtpu 0.0.51)."""

_PERCENT_OF_MEMORY = 150
"""Percent of four fifths of a GPU that its compiler lets a program take."""


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """Options for the compiler of a step; None for the defaults.

    TPUs: on large meshes a permute of a ring uses a lookup table. By default libtpu
    writes code for every pair of devices of a permute in which all take part: 0.2 s of
    compile time for 256 chips of v5e, 0.3 s for v5p. A table takes 0.03 s and another
    0.06 s per MB.

    GPUs: near the limit that the compiler sets itself, it computes values again, which
    `remat=` did not ask for, or holds more. What the device lacks is told when it runs.
    """
    platform = platform_of(mesh)
    if platform is GPU:
        return {"xla_gpu_memory_limit_slop_factor": str(_PERCENT_OF_MEMORY)}
    if platform is not TPU or mesh.size <= _MOST_WITHOUT_TABLE:
        return None
    option = "xla_tpu_max_collective_permute_tree_core_location_devices"
    return {option: str(_MOST_WITHOUT_TABLE)}
