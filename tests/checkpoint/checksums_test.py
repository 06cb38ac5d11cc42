"""Checksums: the same on any layout, another for any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint.checksums import checksums

MESH = jax.make_mesh((4, 2), ("a", "b"))


def number(values, *spec):
    (found,) = checksums(
        jax.device_put(values, NamedSharding(MESH, PartitionSpec(*spec)))
    )
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_the_same_on_any_layout_and_another_after_any_change(dtype):
    values = np.arange(8 * 16).reshape(8, 16) % 97
    values = (values % 2 if dtype == jnp.bool_ else values).astype(dtype)
    known = number(values)
    assert known == number(values, "a") == number(values, "b", "a")
    assert known == number(values, None, ("a", "b"))
    for place in ((0, 0), (3, 7), (7, 15)):
        other = values.copy()
        other[place] = other[place] == 0
        assert number(other) != known
    others = [values[::-1], values.T.reshape(8, 16), np.zeros_like(values)]
    if dtype == jnp.float32:
        others += [values * 2, -values, np.roll(values, 1)]
    assert known not in {number(other) for other in others}
