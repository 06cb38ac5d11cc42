"""Partitioned layers: equal to one device, and collectives where they are declared."""

import dataclasses

import jax.numpy as jnp
import pytest

from experiments.gallery import model_parallel, partitioned

NETWORKS = model_parallel.small_networks()


def without_talk(layers):
    """The network with one layer less that has cross-talk."""
    last = max(i for i, layer in enumerate(layers) if layer.cross)
    quiet = dataclasses.replace(layers[last], cross=False)
    return (*layers[:last], quiet, *layers[last + 1 :])


@pytest.mark.parametrize("name", NETWORKS)
def test_cross_talk_that_is_not_declared_violates_the_contract(name):
    layers = NETWORKS[name]
    found = model_parallel.check(layers, declared=without_talk(layers))
    assert found.error < 1e-6
    assert found.violations != []


def test_rows_from_the_wrong_neighbour_are_found(monkeypatch):
    permute = partitioned.lax.ppermute

    def reversed_pairs(x, axis, pairs):
        return permute(x, axis, [(b, a) for a, b in pairs])

    monkeypatch.setattr(partitioned.lax, "ppermute", reversed_pairs)
    assert model_parallel.check(NETWORKS["locally connected"]).error > 1e-2


def test_layers_without_cross_talk_differ_from_layers_with_it():
    """Else an exchange that is left out would not show."""
    x = jnp.ones((1, 16, 16, 4))
    quiet, talking = (
        partitioned.LocallyConnected("layer", 4, 4, 3, cross, 16)
        for cross in (False, True)
    )
    w = jnp.ones(quiet.weight_shape(8))
    assert not jnp.allclose(quiet.whole(x, w, 8), talking.whole(x, w, 8))
