"""The start of a command's devices: joins other processes and picks the layout."""

import dataclasses
import pathlib
from typing import NamedTuple

import jax

from meshpar.commands.command_line import (
    COORDINATOR,
    DEVICES,
    NUM_PROCESSES,
    PLATFORM,
    PROCESS_ID,
    START_TIMEOUT,
)
from meshpar.errors import ConfigError, LayoutError, shown
from meshpar.layouts.layout import Layout, parse
from meshpar.mesh import simulate
from meshpar.mesh.platform import JAX_PLATFORMS
from meshpar.multihost import Membership, initialize, process_info
from meshpar.runs import fallbacks, programs
from meshpar.runs.chosen_layout import chosen_layout
from meshpar.runs.config import AUTO, RunConfig
from meshpar.runs.fallbacks import Fallbacks
from meshpar.runs.planned_layout import PlannedLayout

_SIMULATED = 8
"""Number of simulated CPU devices without a layout."""


class Started(NamedTuple):
    """The devices of a command.

    Attributes:
      layout: the layout to train under.
      devices: the devices that it fills.
      fallbacks: the layouts of fewer processes; None without any.
      membership: the processes that run.
      planned: the layout, if the planner took it.
    """

    layout: Layout
    devices: list[jax.Device]
    fallbacks: Fallbacks | None
    membership: Membership
    planned: PlannedLayout | None


def start_devices(config: RunConfig) -> tuple[Layout, list[jax.Device]]:
    """Starts jax: joins other processes, simulates CPU devices, picks the layout.

    Raises:
      MeshparError: fewer devices than requested, or processes that do not fit.
    """
    started = start(config)
    return started.layout, started.devices


def start(
    config: RunConfig, fallback_layouts: str = "", folder: pathlib.Path | None = None
) -> Started:
    """Starts jax in all processes of a run, or in those that have come.

    Args:
      config: the run.
      fallback_layouts: layouts for fewer processes, split by semicolons.
      folder: of a run, which goes on under the layout that was planned for it.

    Raises:
      MeshparError: fewer devices than requested, or processes that do not fit.
    """
    coordinator = COORDINATOR.value or ""
    rank = -1 if PROCESS_ID.value is None else PROCESS_ID.value
    info = process_info(coordinator, NUM_PROCESSES.value, rank)
    if PLATFORM.value:
        jax.config.update("jax_platforms", JAX_PLATFORMS[PLATFORM.value])
    named = config.layout not in ("", AUTO)
    layout = parse(config.layout) if named else None
    processes = info.num_processes if info else 1
    # The default is rounded up to divide over the processes.
    default = -(-_SIMULATED // processes) * processes
    islands = programs.num_islands(config)
    wanted = layout.num_devices * islands if layout else default
    num_devices = DEVICES.value or wanted
    if num_devices % processes:
        raise LayoutError(
            f"{num_devices} devices over {processes} processes: use a multiple of "
            f"{processes}"
        )
    simulate(num_devices // processes)
    fallback = None
    if fallback_layouts:
        if layout is None or processes == 1:
            raise ConfigError(
                f"{fallbacks.FLAG} names layouts for a part of several processes; give "
                "a --layout for all of them, and start the run in several"
            )
        fallback = fallbacks.parse(fallback_layouts, layout, processes)
    numbers = fallback.numbers if fallback else ()
    # It would swallow a SIGTERM at the start; the run has a flag of its own.
    jax.config.update("jax_enable_preemption_service", False)
    membership = initialize(info, START_TIMEOUT.value, numbers)
    if membership.num_processes < processes:
        layout = fallback.layouts[membership.num_processes]
    devices = _devices(DEVICES.value // processes * membership.num_processes)
    planned = None
    if layout is None:
        layout, planned = chosen_layout(config, devices, folder, _say)
    return Started(layout, devices, fallback, membership, planned)


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line)


def _devices(number: int) -> list[jax.Device]:
    """So many devices of all processes, or all devices for 0.

    Raises:
      MeshparError: there are none, or fewer.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax says which, or asserts.
        asked = f"--platform={PLATFORM.value}" if PLATFORM.value else "jax"
        reason = shown(str(error).partition("\n")[0]) or "its jax is not installed"
        raise ConfigError(
            f"{asked} finds no device: {reason}; use --platform=cpu, or install jax "
            "for the accelerator of this machine"
        ) from error
    if number > len(devices):
        raise LayoutError(
            f"--devices={number}, but {len(devices)} {devices[0].platform} "
            f"device(s) exist; add --platform=cpu to simulate them"
        )
    return devices[:number] if number else devices


def with_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """The configuration with the layout that `start` picked."""
    return dataclasses.replace(config, layout=str(layout))
