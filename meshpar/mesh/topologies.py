"""Ahead-of-time topologies: devices of machines that are not here."""

import os
import re

import jax
from jax.experimental import topologies

from meshpar.errors import MeshparError
from meshpar.mesh.chips import TARGETS

TPUS = ("v4", "v5e", "v5p", "v6e")


def topology(text: str) -> list[jax.Device]:
    """The devices of machines that are not here, to compile for ahead of time.

    Programs lowered onto them compile with the real compiler and can be read, but not
    run.

    Args:
      text: a TPU slice such as "v5e:4x4", "v5p:4x4x2", several such as "2*v5e:4x4",
        or GPUs of one NVLink domain such as "h100:8", "h200:8".

    Raises:
      MeshparError: an unknown form, or the compiler is not installed, with the remedy.
    """
    count, _, single = text.rpartition("*")
    kind, _, shape = single.partition(":")
    known = ", ".join([*(f"{k}:4x4" for k in TPUS), *(f"{k}:8" for k in TARGETS)])
    if kind in TARGETS and shape.isdigit() and int(shape) and not count:
        return _gpus(kind, int(shape))
    well_formed = re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape)
    if kind not in TPUS or not well_formed or not re.fullmatch(r"(\d+)?", count):
        raise MeshparError(f"topology={text!r}: write one such as {known}")
    # There is no chip: no metadata to ask for, no lock to take.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    chips = shape if shape.count("x") == 2 or kind in ("v5e", "v6e") else f"{shape}x1"
    name = f"{kind}:{chips}"
    try:
        slices = {"num_slices": int(count)} if count else {}
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **slices
        )
    except Exception as error:
        raise MeshparError(
            f"topology={text!r}: {_first_line(error)}; the TPU compiler comes with "
            'pip install "meshpar[aot-tpu]", and the shape must be one that exists'
        ) from error
    return list(found.devices)


def _gpus(kind: str, count: int) -> list[jax.Device]:
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name=kind,
            topology=f"1x1x{count}",
            target_config=TARGETS[kind],
        )
    except Exception as error:
        raise MeshparError(
            f"topology={kind}:{count}: {_first_line(error)}; the GPU compiler comes "
            'with pip install "meshpar[aot-gpu]"'
        ) from error
    return list(found.devices)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else "failed"
