"""Checksums: equal on any layout, different after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint.checksums import checksums

MESH = jax.make_mesh((4, 2), ("a", "b"))


def checksum_of(values, *spec):
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    (checksum,) = checksums(jax.device_put(values, sharding))
    return checksum


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_equal_on_any_layout_and_different_after_any_change(dtype):
    values = np.arange(8 * 16).reshape(8, 16) % 97
    values = (values % 2 if dtype == jnp.bool_ else values).astype(dtype)
    known = checksum_of(values)
    assert known == checksum_of(values, "a") == checksum_of(values, "b", "a")
    assert known == checksum_of(values, None, ("a", "b"))
    for index in ((0, 0), (3, 7), (7, 15)):
        other = values.copy()
        other[index] = other[index] == 0
        assert checksum_of(other) != known
    others = [values[::-1], values.T.reshape(8, 16), np.zeros_like(values)]
    if dtype == jnp.float32:
        others += [values * 2, -values, np.roll(values, 1)]
    assert known not in {checksum_of(other) for other in others}
