"""Flags that all commands share, and how a command starts and ends."""

import dataclasses
import errno
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence

import jax
from absl import app, flags, logging

import meshpar
from experiments import recipes
from experiments.recipes.config import Config, with_settings
from experiments.recipes.errors import ConfigError
from experiments.recipes.modes import MODES
from meshpar.mesh.platform import CPU, GPU, TPU
from meshpar.multihost import HUNG, agree, process

RECIPE = flags.DEFINE_string(
    "recipe", "bytes-llama", f"One of {', '.join(recipes.RECIPES)}."
)
LAYOUT = flags.DEFINE_string(
    "layout",
    None,
    'Such as "data=2,fsdp=2,tensor=2"; by default these axes over all devices.',
)
LOWERING = flags.DEFINE_string(
    "lowering",
    None,
    "shard_map (meshpar writes the collectives; the default where possible), jit (the "
    "compiler inserts them) or auto (the better of both as compiled).",
)
OPTIMIZER_MODE = flags.DEFINE_string(
    "optimizer_mode",
    None,
    f"One of {', '.join(MODES)}; local_sgd trains the replicas of replica=R apart "
    "(--set local_sgd.*).",
)
DATA = flags.DEFINE_string(
    "data",
    None,
    "Text file, folder, glob, or .npy/.bin token ids; the text of Python's standard "
    "library by default.",
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "A tokenizer.json; bytes by default."
)
STEPS = flags.DEFINE_integer("steps", None, "Training steps.")
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Sequences per step, over all devices."
)
SEED = flags.DEFINE_integer("seed", None, "Seed of weights, dropout and shuffling.")
DEVICES = flags.DEFINE_integer(
    "devices",
    0,
    "Number of devices to use; CPU devices are simulated, as many as the layout fills "
    "by default, or 8 without a layout.",
)
PLATFORM = flags.DEFINE_enum(
    "platform",
    "",
    ["", CPU.name, GPU.name, TPU.name],
    "Kind of device; accelerators before CPUs by default.",
)
SET = flags.DEFINE_multi_string(
    "set", [], "Sets any value of the recipe, KEY=VALUE, such as model.depth=4"
)
COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "host:port of process 0; set by launchers."
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 0, "Number of processes of this run."
)
START_TIMEOUT = flags.DEFINE_float(
    "start_timeout", 120.0, "Seconds to wait for all processes at the start."
)
PROCESS_ID = flags.DEFINE_integer("process_id", -1, "Number of this process, from 0.")


_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EROFS: "mount the disk for writing",
}


def config_from_flags() -> Config:
    """The recipe with all changes from flags.

    Raises:
      ConfigError: an unknown recipe or key, or a bad value.
    """
    config = recipes.get(RECIPE.value)
    given = {
        "layout": LAYOUT.value,
        "lowering": LOWERING.value,
        "optimizer_mode": OPTIMIZER_MODE.value,
        "data.path": DATA.value,
        "data.tokenizer": TOKENIZER.value,
        "steps": STEPS.value,
        "batch_size": BATCH_SIZE.value,
        "seed": SEED.value,
    }
    settings = [f"{key}={value}" for key, value in given.items() if value is not None]
    config = with_settings(config, [*SET.value, *settings])
    if config.layout:
        meshpar.layouts.parse(config.layout)
    return config


def use_cpu() -> None:
    """Makes jax use the CPU alone; call it before jax starts."""
    jax.config.update("jax_platforms", CPU.name)


def start_devices(config: Config) -> tuple[meshpar.Layout, list[jax.Device]]:
    """Starts jax: joins other processes, simulates CPU devices, picks the layout.

    Raises:
      MeshparError: fewer devices than requested, or processes that do not fit.
    """
    info = process.process_info(
        COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
    )
    if PLATFORM.value:
        platform = "cuda" if PLATFORM.value == GPU.name else PLATFORM.value
        jax.config.update("jax_platforms", platform)
    layout = meshpar.layouts.parse(config.layout) if config.layout else None
    processes = info.num_processes if info else 1
    default = -(-8 // processes) * processes  # 8, rounded up to divide over processes.
    num_devices = DEVICES.value or (layout.num_devices if layout else default)
    if num_devices < 1 or num_devices % processes:
        raise meshpar.LayoutError(
            f"{num_devices} devices over {processes} processes: use a multiple of "
            f"{processes}"
        )
    meshpar.simulate(num_devices // processes)
    agree.initialize(info, START_TIMEOUT.value)
    devices = jax.devices()
    if DEVICES.value > len(devices):
        raise meshpar.LayoutError(
            f"--devices={DEVICES.value}, but {len(devices)} {devices[0].platform} "
            f"device(s) exist; add --platform=cpu to simulate them"
        )
    if DEVICES.value:
        devices = devices[: DEVICES.value]
    layout = layout or meshpar.layouts.parse(recipes.default_layout(len(devices)))
    return layout, devices


def with_layout(config: Config, layout: meshpar.Layout) -> Config:
    """The configuration with the layout that `start_devices` picked."""
    return dataclasses.replace(config, layout=str(layout))


_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN)


def _report(error: Exception) -> int:
    """Prints an error that a command did not expect; returns its exit code.

    Another process that is lost, or a disk that is away, may be back the next time.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in _REMEDIES:
        print(
            f"error: {error}; {_REMEDIES[number]} and run the same command again: it "
            "goes on from the last complete checkpoint",
            file=sys.stderr,
            flush=True,
        )
        return 2
    many = jax.distributed.is_initialized()
    failed = isinstance(error, jax.errors.JaxRuntimeError)
    lost = many and failed and "RESOURCE_EXHAUSTED" not in str(error)
    code = HUNG if lost or number in _AWAY else 1
    if code == 1 and not many:
        raise error
    # Raising would deadlock: jax waits for processes that wait for this one.
    traceback.print_exception(error)
    return code


def _parse_flags(argv: Sequence[str]) -> Sequence[str]:
    """Parses the flags; an unknown flag or a bad value is an error of the user."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}; --help lists the flags", file=sys.stderr)
        sys.exit(2)


def run(main: Callable[[Sequence[str]], int], arguments: bool = False) -> None:
    """Runs a command; prints errors that a user can fix without a traceback.

    Args:
      main: (words of the command that are not flags) -> exit code.
      arguments: whether there may be such words besides the name of the command.
    """

    def checked(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)
        warnings.filterwarnings("ignore", module="orbax")
        try:
            if len(argv) > 1 and not arguments:
                raise ConfigError(
                    f"arguments {argv[1:]} are not flags; write --name=value"
                )
            code = main(argv)
        except meshpar.MeshparError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            code = getattr(error, "exit_code", 2)
        except Exception as error:
            code = _report(error)
        sys.stdout.flush()
        if code and jax.distributed.is_initialized():
            # Process 0 serves the others, so it ends last: they can still report.
            time.sleep(2 if jax.process_index() == 0 else 0)
            # A normal exit would wait for processes that may never arrive.
            os._exit(code)
        return code

    app.run(checked, flags_parser=_parse_flags)
