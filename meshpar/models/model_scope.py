"""The scope in which a model is traced: our `constrain` and Flax's logical rules."""

import contextlib
from collections.abc import Iterable, Iterator

import flax.linen as nn
import jax
from jax.sharding import Mesh

from meshpar.layouts import scope as scopes
from meshpar.layouts.layout import Layout
from meshpar.models import foreign_shardings
from meshpar.models.flax_rules import FlaxRules
from meshpar.models.loops import install
from meshpar.models.unbound_names import explained_names

install()
foreign_shardings.install()


@contextlib.contextmanager
def model_scope(
    layout: Layout, mesh: Mesh, manual_axes: Iterable[str] = ()
) -> Iterator[scopes.Scope]:
    """Traces a model under a layout.

    Args:
      layout: gives the rules.
      mesh: the device mesh.
      manual_axes: axes that are manual where the model is traced, inside shard_map.

    Raises:
      LayoutError: the model uses dim names or states shardings that the layout cannot
        honour.
      MeshparError: the model uses an axis name or a random stream that nothing binds.
    """
    with (
        scopes.use(layout, mesh, manual_axes) as scope,
        nn.logical_axis_rules(FlaxRules(scope)),
        foreign_shardings.explained_errors(),
        explained_names(),
    ):
        yield scope


@contextlib.contextmanager
def on_one_device(layout: Layout, mesh: Mesh) -> Iterator[scopes.Scope]:
    """Traces a model on a mesh of one device, where its own shardings do not count."""
    with jax.set_mesh(mesh), model_scope(layout, mesh) as scope, scopes.unsharded():
        yield scope
