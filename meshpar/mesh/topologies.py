"""Ahead-of-time topologies: devices of machines that are not here."""

import os
import re

import jax
from jax.experimental import topologies

from meshpar.errors import MeshparError
from meshpar.mesh.chips import CHIPS, TPU, Chip


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
    chip = CHIPS.get(kind)
    if chip and chip.xla_target and re.fullmatch(r"[1-9]\d*", shape) and not count:
        return _gpus(chip, int(shape))
    well_formed = re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape)
    is_tpu = chip is not None and chip.platform == TPU
    if not is_tpu or not well_formed or not re.fullmatch(r"(\d+)?", count):
        raise MeshparError(f"topology={text!r}: write one such as {_examples()}")
    # There is no chip: no metadata to ask for, no lock to take.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    chips = shape if shape.count("x") == 2 or chip.torus_dims == 2 else f"{shape}x1"
    name = f"{kind}:{chips}"
    try:
        slices = {"num_slices": int(count)} if count else {}
        found = topologies.get_topology_desc(platform=TPU, topology_name=name, **slices)
    except Exception as error:
        raise MeshparError(
            f"topology={text!r}: {_first_line(error)}; the TPU compiler comes with "
            'pip install -e ".[aot-tpu]", and the shape must be one that exists'
        ) from error
    return list(found.devices)


def _examples() -> str:
    """A topology of each chip that there is a compiler for."""
    tpus = [f"{chip.name}:4x4" for chip in CHIPS.values() if chip.platform == TPU]
    return ", ".join([*tpus, *(f"{c.name}:8" for c in CHIPS.values() if c.xla_target)])


def _gpus(chip: Chip, count: int) -> list[jax.Device]:
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name=chip.name,
            topology=f"1x1x{count}",
            target_config=chip.xla_target,
        )
    except Exception as error:
        raise MeshparError(
            f"topology={chip.name}:{count}: {_first_line(error)}; the GPU compiler "
            'comes with pip install -e ".[aot-gpu]"'
        ) from error
    return list(found.devices)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else "failed"
