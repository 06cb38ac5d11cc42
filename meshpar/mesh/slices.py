"""Slices: devices that fast links connect, among others that a slower network reaches.

Those of TPUs are joined by a data-center network. Those of GPUs are NVLink domains,
such as machines with eight GPUs, joined by a network card for each GPU.
"""

import jax

from meshpar.mesh.chips import GPU


def slice_of(device: jax.Device) -> int:
    """The number of the slice that a device belongs to."""
    index = getattr(device, "slice_index", None) or 0
    if not index and device.platform == GPU:
        # Described machines number their NVLink domains in the first coordinate alone.
        index = (getattr(device, "coords", None) or (0,))[0]
    return index
