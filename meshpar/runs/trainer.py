"""The training loop: resume, step, log, evaluate, checkpoint, and stop on a signal."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import DataError
from meshpar.layouts.layout import Layout
from meshpar.lowering.state import Metrics
from meshpar.multihost import agree
from meshpar.multihost.watchdog import (
    END,
    EVALUATION,
    FIRST_STEP,
    SAVE,
    START,
    Watchdog,
)
from meshpar.runs import compiled, goodput, progress_file, report, time_record
from meshpar.runs.callbacks import Callbacks
from meshpar.runs.config import RunConfig
from meshpar.runs.data import Batches
from meshpar.runs.fallbacks import Fallbacks
from meshpar.runs.finite import FiniteCheck
from meshpar.runs.guards import StopFlag, own_folder
from meshpar.runs.metrics import DRIFT, MetricsLog, of_evaluation
from meshpar.runs.planned_layout import PlannedLayout
from meshpar.runs.progress import Progress
from meshpar.runs.replica_check import ReplicaCheck, ReplicaError, describe
from meshpar.runs.run_record import CHECKPOINTS, RunRecord
from meshpar.runs.setup import prepare
from meshpar.runs.start import NO_CONSENT, Consent, Start, restore
from meshpar.runs.startup import RESTORE, SETUP, STEP, Startup
from meshpar.runs.step_log import NonFiniteError, StepLog, last_good
from meshpar.runs.time_record import TimeRecord

RESTART = 75
"""Exit code of a run stopped by a signal; the same command resumes it."""


def _watchdog(config: RunConfig, times: TimeRecord) -> Watchdog:
    """A watchdog with the limits of a run, which watches the start first."""

    def note(step: int, section: str) -> None:
        progress_file.write(step, section)
        times.note(step, section)

    limits = dataclasses.asdict(config.watchdog)
    watchdog = Watchdog(config.watchdog_seconds, limits=limits, note=note)
    watchdog.enter(START)
    return watchdog


def _next(batches: Batches, step: int) -> Any:
    """The next batch.

    Raises:
      DataError: there is none.
    """
    try:
        return next(batches)
    except StopIteration:
        raise DataError(
            f"the data end after step {step}; the last checkpoint is kept: give more "
            "data, or as many steps as there are batches"
        ) from None


class Due(NamedTuple):
    """The actions that are due after a step."""

    evaluation: bool
    checkpoint: bool
    local_checkpoint: bool
    replica_check: bool

    @classmethod
    def after(cls, step: int, config: RunConfig) -> "Due":
        """The actions after a step of a run."""
        last = step >= config.steps
        every = config.checkpoint_local_every or config.checkpoint_every
        compared = config.check_replicas
        return cls(
            evaluation=last or step % config.evaluate_every == 0,
            checkpoint=last or step % config.checkpoint_every == 0,
            local_checkpoint=bool(config.checkpoint_local_dir) and step % every == 0,
            replica_check=bool(compared) and step % compared == 0,
        )


class Trainer:
    """One run of a configuration in its folder.

    Attributes:
      state: the training state at the end of `run`; None before.
      program: the lowered program.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        devices: Sequence[jax.Device],
        profile: bool = False,
        consent: Consent = NO_CONSENT,
        fallbacks: Fallbacks | None = None,
        can_grow: Callable[[], bool] = lambda: False,
        startup: Startup | None = None,
        planned: PlannedLayout | None = None,
    ):
        """Reads the data and lowers the program; nothing is written or compiled yet.

        Args:
          config: the run.
          layout: its layout.
          devices: the devices to fill.
          profile: whether to write a profiler trace of a few steps.
          consent: what the user agrees to when the run resumes.
          fallbacks: layouts in which the run may go on in fewer processes.
          can_grow: () -> whether a restart would have more processes.
          startup: the clock of the start of this process, if it is to be timed.
          planned: the layout, if the planner took it.

        Raises:
          MeshparError: folders, data, layout or model that do not fit.
        """
        self._times = TimeRecord(startup.begin if startup else None)
        with self._times.listening(), _watchdog(config, self._times):
            setup = prepare(config, layout, devices, profile, fallbacks, planned)
        self._setup, self.state = setup, None
        self._config = setup.config
        self.program = self._program = setup.program
        self._finite = FiniteCheck(setup.program)
        self._replicas = None
        if setup.config.check_replicas:
            self._replicas = ReplicaCheck(setup.program)
        self._callbacks = Callbacks(setup.config, setup.run, setup.folder / CHECKPOINTS)
        self._consent, self._can_grow, self._startup = consent, can_grow, startup
        self._held_out = None
        if setup.run.evaluates:
            limit = setup.config.evaluation_batches
            with setup.config.blaming_recipe():
                self._held_out = setup.run.evaluation.evaluation_batches(
                    setup.place(), limit
                )

    def run(self) -> int:
        """Trains to the last step; returns the exit code.

        Raises:
          MeshparError: a folder that cannot be used, or a loss that is not finite.
        """
        setup, num_steps = self._setup, self._config.steps
        self._check_processes()
        with contextlib.ExitStack() as stack:
            watchdog = stack.enter_context(_watchdog(self._config, self._times))
            stack.enter_context(own_folder(setup.folder))
            stack.enter_context(self._record_times())
            if jax.process_index() == 0:
                compiled.remove_torn_programs(setup.folder)
                if setup.planned:
                    setup.planned.write(setup.folder)
            stack.callback(self._program.close)
            stop, record = stack.enter_context(StopFlag()), RunRecord(setup.folder)
            checkpoints = stack.enter_context(
                contextlib.closing(self._open_checkpoints())
            )
            self._enter(RESTORE)
            self._times.enter(time_record.RESTORE)
            finite = self._finite
            start = restore(setup, checkpoints, record, self._consent, finite)
            self._times.restored(start.step)
            self._enter(SETUP)
            log = None
            if jax.process_index() == 0:
                log = MetricsLog(setup.folder, start.step, start.changes)
            unit, _ = setup.run.units
            progress = Progress(num_steps, start.step, log is not None, unit)
            copies = str(self._replicas or "")
            for note in (self._program.why_auto, *start.notes, copies):
                if note:
                    progress.say(note)
            progress.say(report.describe(setup, start.step))
            try:
                with progress:
                    self._catch_up(start, checkpoints, log, progress, watchdog)
                    self.state = state = self._train(
                        start, stop, checkpoints, record, log, progress, watchdog
                    )
            finally:
                watchdog.enter(END)
                if log:
                    log.close()
            checkpoints.wait()
            checkpoints.check_saved(int(state.step))
            record.saved()
            self._callbacks.look()
            if int(state.step) < num_steps:
                grows = not stop.signal and self._can_grow()
                why = "; processes have come that were missing" if grows else ""
                progress.say(
                    f"stopped at step {int(state.step)}, saved{why}; the same command "
                    "goes on from here"
                )
                self._say_goodput(time_record.STOPPED, progress)
                return RESTART
            params = self._program.evaluated_params(state)
            report.finish(setup, params, log, progress)
            self._say_goodput(time_record.DONE, progress)
        return 0

    def _record_times(self) -> contextlib.AbstractContextManager[None]:
        """Writes the record of this start's time inside."""
        layout, processes = str(self._program.layout), jax.process_count()
        return self._times.recording(
            self._setup.folder, layout=layout, processes=processes
        )

    def _say_goodput(self, how: str, progress: Progress) -> None:
        """Ends the record of time, and prints what the whole run used it for."""
        self._times.close(how)
        progress.say(str(goodput.read(self._setup.folder)))

    def _enter(self, part: str) -> None:
        if self._startup:
            self._startup.enter(part)

    def _check_processes(self) -> None:
        """Raises an error unless all processes are about to run the same."""
        config, program = self._config, self._program
        local = "set" if config.checkpoint_local_dir else ""
        agree.check_fingerprint(
            dict(
                config=dataclasses.replace(
                    config, workdir="", checkpoint_local_dir=local
                ),
                code=config.code,
                layout=program.layout,
                jax=jax.__version__,
                devices=[(d.process_index, d.id) for d in program.mesh.devices.flat],
                program=program.fingerprint,
                **self._setup.facts,
            ),
            agree.READ_S,  # A process without the hash of its data reads all of it.
        )

    def _open_checkpoints(self) -> Checkpoints:
        config, program = self._config, self._program
        return Checkpoints(
            self._setup.folder / CHECKPOINTS,
            program.portable_state,
            config.keep_checkpoints,
            local_folder=config.checkpoint_local_dir,
            num_replicas=program.layout.replica,
            abstract_extra=program.abstract_extra,
            extra_identity=program.extra_identity,
        )

    def _catch_up(
        self,
        start: Start,
        checkpoints: Checkpoints,
        log: MetricsLog | None,
        progress: Progress,
        watchdog: Watchdog,
    ) -> None:
        """Saves and evaluates the restored step, where a kill prevented it."""
        self._enter(RESTORE)
        if not start.persistent:
            watchdog.enter(SAVE)
            place = start.position, start.data_state
            self._save(checkpoints, start.state, start.step, place, True)
        if start.step and Due.after(start.step, self._config).evaluation:
            evaluated = log.has_evaluation(start.step) if log else None
            if not agree.allgather_objects("evaluated", evaluated)[0]:
                watchdog.enter(EVALUATION)
                self._evaluate(start.state, start.step, log, progress)

    def _train(
        self,
        start: Start,
        stop: StopFlag,
        checkpoints: Checkpoints,
        record: RunRecord,
        log: MetricsLog | None,
        progress: Progress,
        watchdog: Watchdog,
    ) -> Any:
        """Runs the steps; reads a step's metrics while the next step runs."""
        self._enter(STEP)
        config, program = self._config, self._program
        state, step, position, data_state = start[:4]
        place = self._setup.place(position, data_state)
        batches = self._setup.run.data.training_batches(place)
        any_process = agree.make_any_process(program.mesh)
        hears = watchdog, self._callbacks, self._startup
        steps = StepLog(self._setup, step, position, log, progress, *hears)
        stopping = False
        watchdog.enter(FIRST_STEP)
        with contextlib.ExitStack() as trace:
            while step < config.steps and not stopping:
                self._trace(step - start.step, trace)
                batch = _next(batches, step)
                state, step_metrics = program.step(state, batch)
                step, position = step + 1, position + config.batch_size
                stops = stop.signal is not None or self._can_grow()
                steps.add(step, step_metrics, any_process(stops))
                record.look(steps.saved_step)
                self._callbacks.look()
                due = Due.after(step, config)
                first = step == start.step + 1  # Ends the startup.
                stopping = steps.read(keep=0 if first or any(due) else 1)
                saving = due.checkpoint or due.local_checkpoint or stopping
                if saving or due.replica_check:
                    self._check_replicas(state, step, steps.saved_step)
                if saving:
                    watchdog.enter(SAVE)
                    if log:
                        log.sync()
                    persistent = due.checkpoint or stopping
                    place = position, batches.state
                    good = steps.saved_step
                    self._save(checkpoints, state, step, place, persistent, good)
                    steps.saved_step = step
                if due.evaluation and (not stopping or step == config.steps):
                    watchdog.enter(EVALUATION)
                    self._evaluate(state, step, log, progress)
                if any(due):
                    steps.restart_clock()
                    watchdog.resume()
        return state

    def _trace(self, num_steps: int, trace: contextlib.ExitStack) -> None:
        """Profiles the fourth to sixth step; `trace` ends the profile in any case."""
        if self._setup.profile and num_steps == 3:
            folder = str(self._setup.folder / "profile")
            trace.enter_context(jax.profiler.trace(folder))
        elif num_steps == 6:
            trace.close()

    def _check_replicas(self, state: Any, step: int, good: int) -> None:
        """Compares all copies of the state, if the run is to.

        Raises:
          ReplicaError: copies differ; `good` is the step of the newest checkpoint, 0
            without one.
        """
        if self._replicas and (found := self._replicas.differences(state)):
            raise ReplicaError(
                f"step {step}: {len(found)} piece(s) of tensors have copies that "
                f"differ: {describe(found)}. The last good checkpoint is "
                f"{last_good(good)}, from which the same command goes on; a device "
                "that is named again is broken"
            )

    def _save(
        self,
        checkpoints: Checkpoints,
        state: Any,
        step: int,
        place: tuple[int, Any],
        persistent: bool,
        good: int = 0,
    ) -> None:
        """Starts writing a checkpoint; to the run's folder if `persistent`.

        Raises:
          NonFiniteError: a tensor of the state is not finite; `good` is the step of
            the newest checkpoint, 0 without one.
        """
        position, data_state = place
        metadata = {
            "position": position,
            "data_state": data_state,
            "layout": self._config.layout,
            "config": dataclasses.asdict(self._config),
            "code": self._config.code,
            "program": self._setup.step_program,
            **self._setup.identity,
        }
        portable = self._program.in_model_order(state)
        extra = self._program.extra_state(state)
        if tensor := self._finite.problem(portable, extra):
            raise NonFiniteError(
                f"step {step}: {tensor} is not finite, and is not saved; look at the "
                "optimizer and its rate, and at the loss of the steps before; the last "
                f"good checkpoint is {last_good(good)}, from which the same command "
                "goes on"
            )
        checkpoints.save(step, portable, metadata, extra, persistent=persistent)
        if persistent:
            self._callbacks.saving(step)

    def _evaluate(
        self, state: Any, step: int, log: MetricsLog | None, progress: Progress
    ) -> None:
        """Prints and logs the means of the held-out batches, if there are any."""
        if self._held_out is None:
            return
        program = self._program

        def evaluate(batch: Any, rows: int | None) -> Metrics:
            return program.evaluate(state, batch, rows)

        found = self._held_out.metric_sums(program, evaluate).result()
        drift = f", drift {found[DRIFT]:.4f}" if DRIFT in found else ""
        progress.say(f"step {step}: held-out loss {found['loss']:.4f}{drift}")
        if log:
            log.write(step, **of_evaluation(found))
        self._callbacks.evaluation(step, found, program, state)
