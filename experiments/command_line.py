"""Flags that all programs share, and how a program starts and ends."""

import dataclasses
import errno
import logging as std_logging
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
from experiments.config import Config, ConfigError, with_settings
from meshpar.multihost import agree, process

RECIPE = flags.DEFINE_string(
    "recipe", "bytes-llama", f"One of {', '.join(recipes.RECIPES)}."
)
LAYOUT = flags.DEFINE_string(
    "layout", None, 'Such as "data=2,fsdp=2,tensor=2,zero=3"; mixed by default.'
)
LOWERING = flags.DEFINE_string(
    "lowering",
    None,
    "shard_map (explicit collectives; default where possible), jit (the compiler's) "
    "or auto (the better as compiled).",
)
OPTIMIZER_MODE = flags.DEFINE_string(
    "optimizer_mode",
    None,
    "synchronous, or local_sgd: replicas of replica=R train apart (--set local_sgd.*).",
)
DATA = flags.DEFINE_string(
    "data",
    None,
    "Text file, folder, glob, or .npy/.bin token ids; Python's library by default.",
)
TOKENIZER = flags.DEFINE_string("tokenizer", None, "A tokenizer.json; else bytes.")
STEPS = flags.DEFINE_integer("steps", None, "Training steps.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Sequences per step, in all.")
SEED = flags.DEFINE_integer("seed", None, "Seed of weights, dropout and shuffling.")
DEVICES = flags.DEFINE_integer(
    "devices", 0, "Devices to use, in all; CPU devices are simulated (8 by default)."
)
PLATFORM = flags.DEFINE_enum(
    "platform", "", ["", "cpu", "gpu", "tpu"], "Kind of device; the best by default."
)
SET = flags.DEFINE_multi_string(
    "set", [], "Any other value of the recipe, such as model.depth=4; may repeat."
)
COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "host:port of process 0; launchers set it."
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "Processes of this run.")
START_TIMEOUT = flags.DEFINE_float(
    "start_timeout", 120.0, "Seconds to wait for all processes at the start."
)
PROCESS_ID = flags.DEFINE_integer("process_id", -1, "Number of this process, from 0.")


def config_from_flags() -> Config:
    """The recipe with everything that the flags change.

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


def start_devices(config: Config) -> tuple[meshpar.Layout, list[jax.Device]]:
    """Starts jax: joins other processes, simulates CPU devices, picks the layout.

    Raises:
      MeshparError: more devices wished for than exist, or processes that do not fit.
    """
    who = process.process_info(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    if PLATFORM.value:
        jax.config.update("jax_platforms", PLATFORM.value.replace("gpu", "cuda"))
    layout = meshpar.layouts.parse(config.layout) if config.layout else None
    processes = who.num_processes if who else 1
    fewest = -(-8 // processes) * processes  # 8, or as many as the processes split.
    wanted = DEVICES.value or (layout.num_devices if layout else fewest)
    if wanted < 1 or wanted % processes:
        raise meshpar.LayoutError(
            f"{wanted} devices over {processes} processes: use a multiple of "
            f"{processes}"
        )
    meshpar.simulate(wanted // processes)
    agree.initialize(who, START_TIMEOUT.value)
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
    """The configuration with the layout that was picked."""
    return dataclasses.replace(config, layout=str(layout))


def run(main: Callable[[Sequence[str]], int], arguments: bool = False) -> None:
    """Runs a program; errors that a user can mend are printed without a traceback.

    Args:
      main: takes the words of the command that are not flags, returns the exit code.
      arguments: whether there may be such words beside the program's name.
    """

    def checked(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)
        # Orbax's readers fail many at a time; what they say is said once, by us.
        std_logging.getLogger("asyncio").setLevel(std_logging.CRITICAL)
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
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            print(
                f"error: {error}; make room and run the same command again: it goes on "
                "from the last complete checkpoint",
                file=sys.stderr,
                flush=True,
            )
            code = 2
        except Exception:
            if not jax.distributed.is_initialized():
                raise
            # jax would wait for the others, who wait for this process.
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        if code and jax.distributed.is_initialized():
            # Process 0 serves the others: it goes last, so that they can speak too.
            time.sleep(2 if jax.process_index() == 0 else 0)
            # Leaving in order would wait for processes that may never come.
            os._exit(code)
        return code

    app.run(checked)
