"""Compiled programs in the run's folder: a restart loads them instead of compiling.

jax's persistent compilation cache finds a program by its code, the versions of jax and
its compiler, their flags and the kind of devices, CPU features included. A change of
any of them compiles anew.
"""

import contextlib
import os
import pathlib
import warnings

import jax

from meshpar import compat

FOLDER = "compiled"
"""Name of the folder of programs in the run's folder."""

_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"


def keep_programs(folder: pathlib.Path) -> None:
    """Makes jax keep all programs that it compiles from now on; writes nothing itself.

    Programs that compile in under a second are kept, too: a start compiles dozens of
    them. `JAX_COMPILATION_CACHE_DIR` is used in place of the run's folder, and
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` is left as it is.

    Args:
      folder: the run's folder.
    """
    if _MIN_SECONDS.upper() not in os.environ:
        jax.config.update(_MIN_SECONDS, 0.0)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / FOLDER))
        # Such a program is compiled anew; a full disk is the checkpoints' to report.
        words = "Error (reading|writing) persistent compilation cache entry"
        warnings.filterwarnings("ignore", words)


def remove_torn_programs(folder: pathlib.Path) -> None:
    """Removes halves of programs, which a kill or a full disk left behind.

    jax compiles such a program anew, but never replaces the half.

    Args:
      folder: the run's folder, locked by this process.
    """
    for path in (folder / FOLDER).glob("*-cache"):
        with contextlib.suppress(OSError):  # jax compiles what it cannot read.
            if not compat.is_whole_cache_entry(path.read_bytes()):
                path.unlink()
