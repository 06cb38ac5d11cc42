"""Metrics of finished steps: read one step late, logged, and checked to be finite."""

import collections
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshpar.errors import MeshparError
from meshpar.mesh import chips
from meshpar.multihost.watchdog import Watchdog
from meshpar.runs.callbacks import Callbacks
from meshpar.runs.metrics import MetricsLog
from meshpar.runs.planned_layout import STEP_OVER_PREDICTED
from meshpar.runs.progress import Progress
from meshpar.runs.setup import Setup
from meshpar.runs.startup import PREFIX, Startup, as_metrics

STEP_SECONDS, MFU = "step_seconds", "mfu"
_PER_SECOND = "_per_second"


def measures_time(name: str) -> bool:
    """Whether a metric of a run says how fast it was: equal runs do not share it."""
    measured = (STEP_SECONDS, MFU, STEP_OVER_PREDICTED)
    return name in measured or name.endswith(_PER_SECOND) or name.startswith(PREFIX)


class NonFiniteError(MeshparError):
    """The loss, the gradient or a tensor of the state is not a number."""


def last_good(step: int) -> str:
    """The newest checkpoint in words; `step` is 0 without one."""
    return f"that of step {step}" if step else "none yet"


class StepLog:
    """Metrics of the steps that were started, in order.

    Attributes:
      saved_step: step of the newest checkpoint, 0 without one.
    """

    def __init__(
        self,
        setup: Setup,
        start: int,
        position: int,
        log: MetricsLog | None,
        progress: Progress,
        watchdog: Watchdog,
        callbacks: Callbacks,
        startup: Startup | None = None,
    ):
        """Starts the clock.

        Args:
          setup: the run.
          start: number of steps done before.
          position: number of samples used before.
          log: receives the metrics; None on all processes but the first.
          progress: shows the metrics.
          watchdog: hears of every finished step.
          callbacks: hears of its metrics.
          startup: the clock that the first finished step stops.
        """
        self._setup, self._start, self._position = setup, start, position
        self._log, self._progress, self._watchdog = log, progress, watchdog
        self._callbacks, self._startup = callbacks, startup
        self.saved_step = start
        config, mesh = setup.config, setup.program.mesh
        rates = setup.run.learning_rate
        self._rates = np.asarray(rates(np.arange(config.steps))) if rates else None
        peak = chips.peak_flops(mesh.devices.flat[0].device_kind)
        self._peak_flops = peak and peak * mesh.size
        self._pending: collections.deque = collections.deque()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves the time since the last step out of the next step's seconds."""
        self._clock = time.perf_counter()

    def add(self, step: int, step_metrics: Any, stop: Any) -> None:
        """Adds a step that was started.

        Args:
          step: its number.
          step_metrics: {name: scalar}, possibly still being computed.
          stop: whether any process was told to stop, possibly still being computed.
        """
        self._pending.append((step, step_metrics, stop))

    def read(self, keep: int) -> bool:
        """Waits for all steps but the newest `keep`, and logs them.

        A step that stops the run is followed by all steps that were started.

        Returns:
          Whether any process was told to stop.

        Raises:
          NonFiniteError: the loss or gradient norm of a step is not finite.
        """
        stopping = False
        while ready := len(self._pending) - (0 if stopping else keep):
            finished = [self._pending.popleft() for _ in range(ready)]
            stopping |= self._record(finished)
        return stopping

    def _record(self, finished: Sequence[tuple[int, Any, Any]]) -> bool:
        """Logs finished steps; returns whether any process was told to stop."""
        steps = [(step, jax.device_get(values)) for step, values, _ in finished]
        now = time.perf_counter()
        seconds, self._clock = (now - self._clock) / max(1, len(steps)), now
        for step, step_metrics in steps:
            self._watchdog.finished(step)
            self._log_step(step, step_metrics, seconds)
            self._check_finite(step, step_metrics)
        if steps:
            self._end_startup(steps[0][0])
        return any(bool(stop) for _, _, stop in finished)

    def _log_step(self, step: int, step_metrics: Any, seconds: float) -> None:
        values = {name: np.asarray(x).tolist() for name, x in step_metrics.items()}
        config = self._setup.config
        (unit, number), flops = self._setup.run.units, self._setup.run.flops
        speed = config.batch_size * number / seconds
        values |= {f"{unit}{_PER_SECOND}": speed, STEP_SECONDS: seconds}
        if self._rates is not None:
            values["learning_rate"] = float(self._rates[step - 1])
        if (planned := self._setup.planned) and step > self._start + 1:
            values[STEP_OVER_PREDICTED] = seconds / planned.seconds
        if self._peak_flops and flops:
            values[MFU] = flops * config.batch_size / seconds / self._peak_flops
        if self._log:
            self._log.write(step, **values)
        self._progress.update(step, values["loss"], speed)
        self._callbacks.step(step, values)

    def _end_startup(self, step: int) -> None:
        """Says how long the first step took to come, after the first step only."""
        if not self._startup or not (seconds := self._startup.finish()):
            return
        self._progress.say(self._startup.describe(seconds))
        if self._log:
            self._log.write(step, **as_metrics(seconds, self._startup.cpu_seconds))

    def _check_finite(self, step: int, step_metrics: Any) -> None:
        loss, grad_norm = (float(step_metrics[k]) for k in ("loss", "grad_norm"))
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        config, saved = self._setup.config, self.saved_step
        first = self._position + (step - 1 - self._start) * config.batch_size
        rate = "the learning rate"
        if self._rates is not None:
            rate = f"learning_rate={self._rates[step - 1]:.3g}"
        raise NonFiniteError(
            f"step {step}: loss={loss}, grad_norm={grad_norm}; look at "
            f"{rate}, at the grad_norm of the steps before "
            f"({self._setup.folder / 'metrics.jsonl'}), at samples {first} to "
            f"{first + config.batch_size - 1} and at "
            f"compute_dtype={config.compute_dtype}; the last good checkpoint is "
            f"{last_good(saved)}"
        )
