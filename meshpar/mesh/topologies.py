"""Ahead-of-time topologies: devices of machines that this one is not attached to."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from meshpar import compat
from meshpar.errors import MeshparError, shown
from meshpar.mesh.chips import CHIPS, GPU, TPU, Chip

COMPILERS = {TPU: ("libtpu",), GPU: ("jax_cuda12_plugin", "jax_cuda13_plugin")}
"""{platform: packages of which one has its compiler}."""

_TOPOLOGY = re.compile(r"(?:([1-9]\d*)\*)?(\w+):([1-9]\d*(?:x[1-9]\d*){0,2})")


def topology(text: str) -> list[jax.Device]:
    """The devices of a machine that is not attached, to compile for ahead of time.

    Programs that are lowered onto them are compiled by the real compiler. They can be
    read but not run.

    Args:
      text: a TPU slice such as "v5e:4x4" or "v5p:4x4x2", the GPUs of one NVLink domain
        such as "h100:8", or several of them, such as "2*v5e:4x4" or "8*h100:8".

    Raises:
      MeshparError: the text has another form, the shape does not exist, or the compiler
        is not installed; with the remedy.
    """
    chip, shape, num_slices = parse_topology(text)
    try:
        if chip.platform == TPU:
            return _tpus(chip, shape, num_slices)
        return _gpus(chip, *shape, num_slices)
    except Exception as error:
        extra = f"aot-{chip.platform}"
        raise MeshparError(
            f"topology={text!r}: {_first_line(error)}; the {chip.platform.upper()} "
            f'compiler comes with pip install "meshpar[{extra}]", and the shape must '
            "be one that exists"
        ) from error


_MOST_CHIPS = 2**18
"""Most chips of a topology: each becomes an object in the memory of this machine."""


def parse_topology(text: str) -> tuple[Chip, tuple[int, ...], int | None]:
    """Parses a topology string.

    Returns:
      The chip, the shape in chips, and the number of slices or NVLink domains, None if
      it is not given.

    Raises:
      MeshparError: the text has another form, or there is no compiler for the chip.
    """
    if match := _TOPOLOGY.fullmatch(text):
        slices, name, sizes = match.groups()
        shape = tuple(map(int, sizes.split("x")))
        chip = CHIPS.get(name)
        if (count := int(slices or 1) * math.prod(shape)) > _MOST_CHIPS:
            raise MeshparError(
                f"topology={shown(text)!r} has {count:,} chips; use at most "
                f"{_MOST_CHIPS:,}"
            )
        if chip and chip.platform == TPU and len(shape) > 1:
            return chip, shape, int(slices) if slices else None
        if chip and chip.xla_target and len(shape) == 1:
            return chip, shape, int(slices) if slices else None
    raise MeshparError(
        f"topology={shown(text)!r}: write one such as {', '.join(examples())}"
    )


def has_compiler(chip: Chip) -> bool:
    """Whether this machine can compile for a chip that it does not have."""
    return any(map(importlib.util.find_spec, COMPILERS[chip.platform]))


def stand_ins(text: str) -> list[jax.Device]:
    """Simulated CPU devices for a topology whose compiler is not installed.

    Raises:
      MeshparError: there are too few of them, or slow links connect slices, which they
        do not have; with the remedy.
    """
    chip, shape, num_slices = parse_topology(text)
    count, cpus = math.prod(shape), jax.devices("cpu")
    install = f'pip install "meshpar[aot-{chip.platform}]" brings its compiler'
    if (num_slices or 1) > 1:
        raise MeshparError(f"topology={text!r}: {install}")
    if len(cpus) < count:
        raise MeshparError(
            f"topology={text!r}: {install}; or simulate {count} CPU devices "
            f"(meshpar.simulate({count})), whose programs are read instead"
        )
    return cpus[:count]


def examples() -> list[str]:
    """One topology of each chip that can be compiled for."""
    return [
        f"{chip.name}:4x4" if chip.platform == TPU else f"{chip.name}:8"
        for chip in CHIPS.values()
        if chip.platform == TPU or chip.xla_target
    ]


def _tpus(
    chip: Chip, shape: tuple[int, ...], num_slices: int | None
) -> list[jax.Device]:
    # No TPU is attached: skip the metadata query and the lock on the chips.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    compat.quiet_absent_tpus()
    dims = (*shape, *[1] * (chip.torus_dims - len(shape)))
    options = {"chip_config_name": chip.libtpu_config} if chip.libtpu_config else {}
    if num_slices:
        options["num_slices"] = num_slices
    name = f"{chip.name}:{'x'.join(map(str, dims))}"
    description = topologies.get_topology_desc(
        platform=TPU, topology_name=name, **options
    )
    return list(description.devices)


def _gpus(chip: Chip, count: int, num_slices: int | None) -> list[jax.Device]:
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip.name,
        topology=f"{num_slices or 1}x1x{count}",
        target_config=chip.xla_target,
    )
    return list(description.devices)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else "failed"


def devices_of(machine: str | Sequence[jax.Device] | None) -> Sequence[jax.Device]:
    """The devices of a topology string, given devices, or all of this machine."""
    if machine is None:
        return jax.devices()
    return topology(machine) if isinstance(machine, str) else machine
