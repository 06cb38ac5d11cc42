"""Platforms: what a kind of device, or rather its compiler, can and cannot do."""

import dataclasses

import jax
from jax.sharding import Mesh

from meshpar.layouts.scope import current_scope
from meshpar.mesh import chips


@dataclasses.dataclass(frozen=True)
class Platform:
    """Facts about one platform that lowerings and models depend on.

    Attributes:
      name: as jax names it.
      widens_collectives: whether collectives move float32 in place of smaller floats.
        XLA:CPU adds in float32 anyway, and aborts on bfloat16 reductions beside
        automatic axes (its promotion pass, seen in jaxlib 0.10.2 and 0.12.0).
      hides_ring_steps: whether the steps of a ring hide behind compute where one
        collective would run alone (TPUs, seen with libtpu 0.0.51).
      reports_peak: whether compiled programs report their peak memory with
        temporaries.
      tiles_vectors: whether flat vectors have to come in whole tiles to be gathered or
        scattered as such.
      compiles_slowly: whether optimized code of a program that runs once takes longer
        to make than it saves.
    """

    name: str
    widens_collectives: bool = False
    hides_ring_steps: bool = False
    reports_peak: bool = True
    tiles_vectors: bool = False
    compiles_slowly: bool = False


CPU = Platform("cpu", widens_collectives=True, reports_peak=False, compiles_slowly=True)
GPU = Platform(chips.GPU)
TPU = Platform(chips.TPU, hides_ring_steps=True, tiles_vectors=True)

_PLATFORMS = {platform.name: platform for platform in (CPU, GPU, TPU)}


def platform_named(name: str) -> Platform:
    """The platform of a name that jax uses; GPUs for "cuda" and "rocm" too."""
    return _PLATFORMS.get(name, GPU)


def platform_of(mesh: Mesh) -> Platform:
    """The platform of a mesh's devices."""
    return platform_named(mesh.devices.flat[0].platform)


def traced_platform() -> Platform:
    """The platform that a model is traced for: of the mesh in use, or jax's default."""
    scope = current_scope()
    if scope is None:
        return platform_named(jax.default_backend())
    return platform_of(scope.mesh)
