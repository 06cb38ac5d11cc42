"""Platforms by jax's names and by the devices of a mesh."""

import jax
import pytest

import meshpar
from meshpar.errors import MeshparError
from meshpar.mesh import platform


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cpu", platform.CPU),
        ("gpu", platform.GPU),
        ("cuda", platform.GPU),
        ("rocm", platform.GPU),
        ("tpu", platform.TPU),
    ],
)
def test_platforms_by_name(name, expected):
    assert platform.platform_named(name) is expected


def test_an_unknown_platform_is_refused():
    with pytest.raises(MeshparError, match="'npu' is not supported.*cpu, gpu, tpu"):
        platform.platform_named("npu")


def test_the_platform_of_a_mesh_and_of_a_trace():
    mesh = meshpar.mesh.make_mesh(meshpar.Layout(data=2), jax.devices()[:2])
    assert platform.platform_of(mesh) is platform.CPU
    assert platform.traced_platform() is platform.CPU
