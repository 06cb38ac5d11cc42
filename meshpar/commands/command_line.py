"""Flags that commands share, and how a command starts and ends.

A command takes the shared flags that it names to `run`, and no others.
"""

import contextlib
import dataclasses
import errno
import os
import re
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import app, flags, logging

from meshpar.errors import ConfigError, MeshparError, shown
from meshpar.layouts.layout import parse
from meshpar.mesh.machine import USABLE_ON_GPUS
from meshpar.mesh.platform import CPU, GPU, TPU
from meshpar.multihost import HUNG
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.config import (
    AUTO,
    RunConfig,
    settings_of,
    values_of,
    with_settings,
)
from meshpar.settings import Number, Range

SETTINGS = settings_of(RunConfig)


@dataclasses.dataclass(frozen=True)
class Address(Range):
    """Addresses host:port; "" for none."""

    in_words = "host:port, with a port below 65,536"

    def allows(self, value: Any) -> bool:
        match = re.fullmatch(r"\S+:([0-9]{1,5})", value)
        return not value or bool(match and int(match.group(1)) < 2**16)


RECIPE = flags.DEFINE_string(
    "recipe",
    "",
    "FILE.py:FUNCTION or MODULE:FUNCTION; `meshpar` takes it as its first word, too.",
)
LAYOUT = flags.DEFINE_string("layout", None, SETTINGS["layout"].help)
LOWERING = flags.DEFINE_string("lowering", None, SETTINGS["lowering"].help)
OPTIMIZER_MODE = flags.DEFINE_string(
    "optimizer_mode", None, SETTINGS["optimizer_mode"].help
)
DATA = flags.DEFINE_string(
    "data",
    None,
    "Text file, folder, glob, or file of token ids; the recipe's if empty.",
)
TOKENIZER = flags.DEFINE_string("tokenizer", None, "A tokenizer.json; empty for bytes.")
STEPS = flags.DEFINE_integer("steps", None, SETTINGS["steps"].help)
BATCH_SIZE = flags.DEFINE_integer("batch_size", None, SETTINGS["batch_size"].help)
SEED = flags.DEFINE_integer("seed", None, SETTINGS["seed"].help)
DEVICES = flags.DEFINE_integer(
    "devices",
    0,
    "Devices to use; those of CPUs are simulated, by default as many as the layout "
    "fills, or 8.",
)
PLATFORM = flags.DEFINE_enum(
    "platform",
    None,
    ["", CPU.name, GPU.name, TPU.name],
    "By default accelerators before CPUs.",
)
SET = flags.DEFINE_multi_string(
    "set", [], "KEY=VALUE, such as evaluate_every=10; --list_settings lists the keys."
)
LIST_SETTINGS = flags.DEFINE_bool(
    "list_settings", False, "List the keys of --set with their values, and end."
)
COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0; set by launchers."
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 0, "Number of processes of this run."
)
START_TIMEOUT = flags.DEFINE_float(
    "start_timeout", 120.0, "Seconds to wait for all processes at the start."
)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "This process, from 0.")

OF_CONFIG = (RECIPE, LAYOUT, LOWERING, OPTIMIZER_MODE, DATA, TOKENIZER, STEPS)
OF_CONFIG += (BATCH_SIZE, SEED, SET, LIST_SETTINGS)
"""The flags that `config_from_flags` reads, where the command takes them."""

OF_DEVICES = (DEVICES, PLATFORM, COORDINATOR, NUM_PROCESSES, START_TIMEOUT, PROCESS_ID)
"""The flags that `devices.start` reads."""

OF_RUNS = (*OF_CONFIG, *OF_DEVICES)
"""The flags that a command that trains reads."""


def limit(flag: flags.FlagHolder, allowed: Range) -> None:
    """Refuses values of a flag, or words of its list, when flags are read.

    Args:
      flag: the flag; None is always allowed.
      allowed: the values that are allowed.
    """

    def check(value: Any) -> bool:
        if value == []:
            raise flags.ValidationError("give at least one word")
        for item in value if isinstance(value, list) else [value]:
            if item is not None and (problem := allowed.problem(item)):
                raise flags.ValidationError(problem)
        return True

    flags.register_validator(flag.name, check)


limit(DEVICES, Number(0, 2**20, "devices", "0 for as many as the layout fills"))
limit(COORDINATOR, Address())
limit(NUM_PROCESSES, Number(0, 2**16, "processes", "0 for what a launcher sets"))
limit(PROCESS_ID, Number(0, 2**16, note="by default what a launcher sets"))
limit(START_TIMEOUT, Number(0, 1e6, "seconds", whole=False, above=True))


_catalogs = [FILES_ALONE]


def catalog() -> Catalog:
    """The recipes that this command knows by name."""
    return _catalogs[-1]


@contextlib.contextmanager
def knowing(known: Catalog) -> Iterator[None]:
    """Makes recipes known by name inside."""
    _catalogs.append(known)
    try:
        yield
    finally:
        _catalogs.pop()


_KEYS = {DATA.name: "data.path", TOKENIZER.name: "data.tokenizer"}
"""{flag: key of its setting}, where the two differ."""


def named_recipe() -> str:
    """The recipe that the user has named; "" for none."""
    return RECIPE.value if RECIPE.present else ""


def config_from_flags() -> RunConfig:
    """The recipe with all changes from the flags that the command takes.

    Raises:
      ConfigError: an unknown recipe or key, or a bad value.
    """
    config = catalog().get(RECIPE.value)
    settings = [*SET.value] if SET.name in flags.FLAGS else []
    known = settings_of(type(config))
    of_no_key = RECIPE.name, SET.name, LIST_SETTINGS.name
    for flag in OF_CONFIG:
        taken = flag.name in flags.FLAGS and flag.name not in of_no_key
        if taken and flag.value is not None:
            key = _KEYS.get(flag.name, flag.name)
            if key not in known:
                raise ConfigError(
                    f"--{flag.name}={shown(str(flag.value))}: {config.recipe} has no "
                    f"setting {key}; give its own arguments by --set=NAME=VALUE"
                )
            settings.append(f"{key}={flag.value}")
    config = with_settings(config, settings)
    if config.layout not in ("", AUTO):
        parse(config.layout)
    return config


def _print_settings(config: RunConfig) -> None:
    """Prints every key of --set: its value, meaning and range."""
    import rich.table

    from meshpar.commands.reports import terminal

    known = settings_of(type(config))
    table = rich.table.Table("key", "value", "meaning", "values")
    for key, value in values_of(config):
        table.add_row(key, str(value), known[key].help, known[key].range.in_words)
    terminal.wide_console().print(table)


def program(name: str) -> list[str]:
    """Words that start another command of those that know the same recipes."""
    known = bool(catalog().recipes)
    return ["python", "-m", f"experiments.{name}"] if known else ["meshpar", name]


def of_config_but(*left_out: flags.FlagHolder) -> tuple[flags.FlagHolder, ...]:
    """The flags of a configuration without some, for a command that sets these itself.

    Args:
      left_out: those that it does not read.
    """
    names = {flag.name for flag in left_out}
    return tuple(flag for flag in OF_CONFIG if flag.name not in names)


def refuse_unread(*read: flags.FlagHolder) -> None:
    """Raises ConfigError for shared flags that other flags leave unread.

    Args:
      read: the shared flags that are read all the same.
    """
    names = {flag.name for flag in read}
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        if flag.present and flag.name not in names:
            raise ConfigError(
                f"--{flag.name} is not read by this command with these flags; leave it "
                "out"
            )


def refuse_flags_of_others(
    choice: flags.FlagHolder, of_others: Mapping[str, Iterable[flags.FlagHolder]]
) -> None:
    """Raises ConfigError for flags that the value of another flag leaves unread.

    Args:
      choice: the other flag, such as --algorithm.
      of_others: {its value: flags that are not read then}.
    """
    for flag in of_others[choice.value]:
        if flag.present:
            raise ConfigError(
                f"--{flag.name} belongs to another {choice.name} than {choice.value}; "
                f"leave it out, or choose that --{choice.name}"
            )


def use_cpu() -> None:
    """Makes jax use the CPU alone; call it before jax starts."""
    jax.config.update("jax_platforms", CPU.name)


def _take(taken: Sequence[flags.FlagHolder], module: str) -> set[str]:
    """Takes flags of other modules, and deletes the rest; returns the names of those.

    Args:
      taken: the shared flags to take.
      module: the command's own, whose flags --help lists, too. Flags of another module
        that it declares as its key flags are taken as well.
    """
    for flag in flags.FLAGS.get_flags_for_module(module):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    known = ", ".join(catalog().recipes)
    if known:
        flags.FLAGS[RECIPE.name].help = f"FILE.py:FUNCTION, or one of {known}."
        flags.set_default(RECIPE, catalog().default)
    declared = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    kept, others = {flag.name for flag in (*taken, *declared)}, set()
    ours = [
        flag
        for name, defined in flags.FLAGS.flags_by_module_dict().items()
        if name.startswith(("meshpar.", "experiments.")) and name != module
        for flag in defined
    ]
    for flag in ours:
        if flag.name in kept:
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
        else:
            delattr(flags.FLAGS, flag.name)
            others.add(flag.name)
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        if flag.default is False or flag.default in ("", []):
            flag.default_as_str = None  # Help would say: default 'false'.
    return others


_SHARE_OF_GPUS = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The variable that says which share of a GPU's memory jax may take."""

_NOT_NUMBERS = {
    "invalid literal for int": "use a whole number",
    "could not convert string to float": "use a number",
}
"""{what Python says of a text that is not a number: what to do}."""


def _parse_flags(
    words: Sequence[str], others: Collection[str], because: Mapping[str, str]
) -> list[str]:
    """Words that are not flags; a flag that cannot be is an error with exit code 2."""
    try:
        return flags.FLAGS(list(words))
    except SystemExit as end:  # The flags of help end as errors do.
        raise SystemExit(0) from end
    except flags.Error as error:
        text = str(error)
        for found, remedy in _NOT_NUMBERS.items():
            text = re.sub(f"{found}.*", remedy, text, flags=re.DOTALL)
        message = f"{shown(text, 500)}; --help lists the flags and their values"
        name = getattr(error, "flagname", None)
        if name in others:
            why = f": {because[name]}" if name in because else ""
            message = f"--{name} is not read by this command{why}; leave it out"
        _print_error(message)
        sys.exit(2)


def _print_error(message: str) -> None:
    with contextlib.suppress(OSError):  # A log on a full disk: the exit code says it.
        print(f"error: {message}", file=sys.stderr, flush=True)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # The last: `ulimit -f`.
_NO_ACCESS = (
    *(errno.EACCES, errno.EPERM, errno.ELOOP),
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG),
)
_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN)


def _remedy(error: Exception) -> str:
    """The remedy of an error of the operating system or of memory; "" if unknown."""
    number = error.errno if isinstance(error, OSError) else None
    again = (
        "and run the same command again: it goes on from the last complete checkpoint"
    )
    if number in _NO_ROOM:
        return f"make room {again}"
    if number == errno.EROFS:
        return f"mount the disk for writing {again}"
    if number in _NO_ACCESS:
        return "choose a path that you may read and write"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return (
            "the memory of a device or of this machine is too small: use a smaller "
            "model, a smaller --batch_size, or a layout over more devices"
        )
    return ""


def _report(error: Exception) -> int:
    """Prints an error that a command did not expect; returns its exit code.

    Another process that is lost, or a disk that is away, may be back the next time.
    """
    if remedy := _remedy(error):
        _print_error(f"{shown(str(error), 500)}; {remedy}")
        return 2
    many = jax.distributed.is_initialized()
    lost = many and isinstance(error, jax.errors.JaxRuntimeError)
    away = isinstance(error, OSError) and error.errno in _AWAY
    code = HUNG if lost or away else 1
    if code == 1 and not many:
        raise error
    # Raising would deadlock: jax waits for processes that wait for this one.
    traceback.print_exception(error)
    return code


def run(
    main: Callable[[Sequence[str]], int],
    takes: Sequence[flags.FlagHolder] = (),
    because: Mapping[str, str] = types.MappingProxyType({}),
    arguments: bool = False,
    known: Catalog = FILES_ALONE,
) -> None:
    """Runs a command; prints errors that a user can fix without a traceback.

    Args:
      main: (words of the command that are not flags) -> exit code.
      takes: the shared flags that it reads.
      because: {another shared flag: why it is not read}, for the error.
      arguments: whether there may be words besides flags and the command's name.
      known: the recipes that it knows by name.
    """

    def checked(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)
        os.environ.setdefault(_SHARE_OF_GPUS, str(USABLE_ON_GPUS))
        warnings.filterwarnings("ignore", module="orbax")
        try:
            if len(argv) > 1 and not arguments:
                raise ConfigError(
                    f"arguments {argv[1:]} are not flags; write --name=value"
                )
            if LIST_SETTINGS.name in flags.FLAGS and LIST_SETTINGS.value:
                _print_settings(config_from_flags())
                return 0
            code = main(argv)
        except MeshparError as error:
            _print_error(str(error))
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

    with knowing(known):
        others = _take(takes, main.__module__)
        app.run(
            checked, flags_parser=lambda words: _parse_flags(words, others, because)
        )
