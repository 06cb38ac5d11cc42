"""Startup of a process: seconds from its start to its first finished step, by part.

Tracing and compiling happen in several places, such as the initial weights and the
first step. Their time counts for them, not for the part around them, so that the parts
add up to the whole.
"""

import gc
import os
import pathlib
import threading
import time
from collections.abc import Iterable

import jax

IMPORTS = "imports"
"""From the start of the process to that of the command."""
DEVICES = "devices"
"""Reading flags, joining the other processes, starting the devices."""
SETUP = "data and model"
"""Reading the data, lowering the model, opening files."""
RESTORE = "restore"
"""Restoring a checkpoint or initializing the state, and what a kill prevented."""
TRACING = "tracing"
"""jax's traces of Python functions, and their lowering to StableHLO."""
COMPILING = "compiling"
"""Compiling programs, or loading them from the compilation cache."""
STEP = "first step"
"""The rest, up to the metrics of the first step."""

PARTS = (IMPORTS, DEVICES, SETUP, RESTORE, TRACING, COMPILING, STEP)

PREFIX = "startup_"
"""What the names of all metrics of a startup begin with."""
TOTAL = f"{PREFIX}seconds"
"""Name of the sum of all parts in the metrics."""
CPU_TOTAL = f"{PREFIX}cpu_seconds"
"""Name of the processor's seconds in the metrics, of all threads of the process."""

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""jax's event of a compilation, or of loading a program from the cache."""
TRACE_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
"""jax's events of traces and of their lowering."""
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"

_IMPORTED = time.time()


class Startup:
    """The clock of a startup, which listens to events of jax (traces, compilations).

    It begins in `IMPORTS`, is a context, and listens until the first step is done or
    the context ends. Until then Python collects no garbage: what is imported and traced
    stays, and looking through it costs a tenth of a start.

    Attributes:
      num_compiled: number of programs compiled or loaded so far.
      num_cached: those of them that came from the compilation cache.
      cpu_seconds: of all threads of the process, up to the end of the startup.
    """

    def __init__(self):
        self.num_compiled = self.num_cached = 0
        self.cpu_seconds = 0.0
        self._entered = [(IMPORTS, _process_start())]
        self._compiled: list[tuple[float, float]] = []
        self._traced: list[tuple[float, float]] = []
        self._thread = threading.get_ident()
        self._is_listening = True
        jax.monitoring.register_event_time_span_listener(self._hear_span)
        jax.monitoring.register_event_listener(self._hear)

    def __enter__(self):
        gc.disable()
        return self

    def __exit__(self, *_):
        if self._is_listening:
            self._is_listening = False
            gc.enable()
            jax.monitoring.unregister_event_time_span_listener(self._hear_span)
            jax.monitoring.unregister_event_listener(self._hear)

    @property
    def begin(self) -> float:
        """When the process began, in seconds since the epoch."""
        return self._entered[0][1]

    def enter(self, part: str) -> None:
        """Ends the current part and begins another, one of `PARTS`."""
        self._entered.append((part, time.time()))

    def finish(self) -> dict[str, float]:
        """Ends the startup: {part: seconds}, in order; {} if it has ended before."""
        if not self._is_listening:
            return {}
        self.__exit__()
        self.cpu_seconds = time.process_time()
        seconds = dict.fromkeys(PARTS, 0.0)
        ends = [*(begin for _, begin in self._entered[1:]), time.time()]
        for (part, begin), end in zip(self._entered, ends, strict=True):
            compiling = covered(self._compiled, begin, end)
            both = covered([*self._compiled, *self._traced], begin, end)
            seconds[COMPILING] += compiling
            seconds[TRACING] += both - compiling
            seconds[part] += end - begin - both
        return seconds

    def describe(self, seconds: dict[str, float]) -> str:
        """One line of the seconds that `finish` returned."""
        parts = [f"{part} {seconds[part]:.1f}" for part in PARTS]
        if self.num_cached:
            cached = f" ({self.num_cached} of {self.num_compiled} programs cached)"
            parts[PARTS.index(COMPILING)] += cached
        total = sum(seconds.values())
        return (
            f"first step after {total:.1f} s ({self.cpu_seconds:.1f} s of CPU): "
            f"{', '.join(parts)}"
        )

    def _hear_span(self, event: str, begin: float, end: float, **_) -> None:
        if threading.get_ident() != self._thread:
            return  # Other threads do not keep the first step waiting.
        if event == COMPILE_EVENT:
            self._compiled.append((begin, end))
            self.num_compiled += 1
        elif event in TRACE_EVENTS:
            self._traced.append((begin, end))

    def _hear(self, event: str, **_) -> None:
        if event == _CACHE_HIT_EVENT and threading.get_ident() == self._thread:
            self.num_cached += 1


def metric_name(part: str) -> str:
    """Name of a part's seconds in the metrics."""
    return f"{PREFIX}{part.replace(' ', '_')}"


def as_metrics(seconds: dict[str, float], cpu_seconds: float) -> dict[str, float]:
    """The seconds of a startup as metrics, with their sum."""
    parts = {metric_name(part): seconds[part] for part in PARTS}
    return {TOTAL: sum(seconds.values()), CPU_TOTAL: cpu_seconds, **parts}


def covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that lie in any of the spans."""
    seconds = 0.0
    for first, last in sorted(spans):
        first, last = max(first, begin), min(last, end)
        if last > first:
            seconds, begin = seconds + last - first, last
    return seconds


def _process_start() -> float:
    """The start time of this process; of this import, if the system hides it."""
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
        # Field 22, in ticks since the machine started; a name in brackets is field 2.
        ticks = int(stat.rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED
    return min(_IMPORTED, time.time() - age) if ticks else _IMPORTED
