"""The platform that a program is lowered for."""

import jax

from meshpar.layouts.scope import current_scope


def traced_platform() -> str:
    """The platform that a model is traced for: that of the mesh in use, or of jax."""
    scope = current_scope()
    if scope is None:
        return jax.default_backend()
    return scope.mesh.devices.flat[0].platform
