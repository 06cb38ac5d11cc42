"""The training loop: resume, step, log, evaluate, checkpoint, stop in order."""

import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import meshpar
from experiments import building, data, metrics, sampling
from experiments.config import Config, ConfigError
from experiments.guards import StopFlag, own_folder
from experiments.progress import Progress
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import MeshparError
from meshpar.mesh import chips
from meshpar.multihost import agree
from meshpar.multihost.watchdog import Watchdog

RESTART = 75
"""Exit code of a run stopped by a signal: run the same command again to go on."""


class NonFiniteError(MeshparError):
    """The loss or gradient is not a number."""


class Trainer:
    """One run of a configuration in its folder."""

    def __init__(
        self,
        config: Config,
        layout: meshpar.Layout,
        devices: Sequence[jax.Device],
        profile: bool = False,
    ):
        """Reads the data and lowers the program; nothing is written or compiled yet.

        Args:
          config: the run.
          layout: its layout.
          devices: the devices to fill.
          profile: whether to write a profiler trace of a few steps.

        Raises:
          MeshparError: data, layout or model that do not fit.
        """
        if "://" in config.workdir:
            raise ConfigError(
                f"workdir={config.workdir}: give a folder that all hosts see, such as "
                "a mounted bucket"
            )
        every = config.checkpoint_local_every
        if every < 0 or (every and not config.checkpoint_local_dir):
            raise ConfigError(
                f"checkpoint_local_every={every}: use 0 or more, and name a "
                "--checkpoint_local_dir"
            )
        self.corpus = data.load(config.data)
        self.config = config = building.fit_vocabulary(config, self.corpus)
        self.program = building.make_program(config, layout, devices)
        self.floor = data.unigram_loss(self.corpus)
        self.folder = pathlib.Path(config.workdir or f"runs/{config.recipe}").absolute()
        self.profile = profile
        shape = dict(length=config.model.length, batch_size=config.batch_size)
        self._batch_shape = dict(**shape, rows=self.program.batch_rows)
        self._held_out = data.held_out_batches(
            self.corpus, limit=config.evaluation_batches, **self._batch_shape
        )
        schedule = building.learning_rates(config.optimizer, config.steps)
        self._learning_rates = np.asarray(schedule(np.arange(config.steps)))
        peak = chips.peak_flops(devices[0].device_kind)
        self._peak_flops = peak and peak * self.program.mesh.size
        self._clock = time.perf_counter()
        self._start = self._position = 0  # Steps done and samples used before.
        self._watchdog = Watchdog(config.watchdog_seconds)
        self._note = ""  # What restoring changed.

    def run(self) -> int:
        """Trains to the last step; returns the exit code.

        Raises:
          MeshparError: a folder that cannot be used, or a loss that is not finite.
        """
        self._check_others()
        with own_folder(self.folder), StopFlag() as stop:
            checkpoints = Checkpoints(
                self.folder / "checkpoints",
                self.program.portable_state,
                self.config.keep_checkpoints,
                local_folder=self.config.checkpoint_local_dir,
                num_replicas=self.program.layout.replica,
                abstract_extra=self.program.abstract_extra,
                extra_identity=self.program.extra_identity,
            )
            with contextlib.closing(checkpoints):
                state = self._start_state(checkpoints)
                log = None
                if jax.process_index() == 0:
                    log = metrics.MetricsLog(self.folder, self._start)
                progress = Progress(self.config.steps, self._start, log is not None)
                for note in (self.program.why_auto, self._note):
                    if note:
                        progress.say(note)
                progress.say(self._describe(self._start))
                try:
                    with progress:
                        state = self._train(state, stop, checkpoints, log, progress)
                finally:
                    if log:
                        log.close()
                checkpoints.wait()
                if int(state.step) < self.config.steps:
                    progress.say(
                        f"stopped at step {int(state.step)}, saved; the same command "
                        "goes on from here"
                    )
                    return RESTART
                self._report(state, log, progress)
        return 0

    def _identity(self) -> dict[str, Any]:
        return building.identity(self.config, self.corpus)

    def _check_others(self) -> None:
        """All processes must be about to run the same."""
        local = "set" if self.config.checkpoint_local_dir else ""
        agree.check_fingerprint(
            {
                "config": dataclasses.replace(
                    self.config, workdir="", checkpoint_local_dir=local
                ),
                "layout": self.program.layout,
                "jax": jax.__version__,
                "devices": [
                    (d.process_index, d.id) for d in self.program.mesh.devices.flat
                ],
                "data": self.corpus.fingerprint,
                "program": self.program.fingerprint,
            }
        )

    def _start_state(self, checkpoints: Checkpoints) -> Any:
        """Restores the newest checkpoint or starts anew."""
        if restored := checkpoints.restore():
            metadata = restored.metadata
            for name, here in self._identity().items():
                if metadata[name] != here:
                    raise ConfigError(
                        f"the run in {self.folder} has {name}={metadata[name]}, this "
                        f"command has {name}={here}; use another --workdir, or the "
                        "flags of that run"
                    )
            self._start, self._position = (
                int(restored.state.step),
                metadata["position"],
            )
            agree.check_fingerprint({"data position": self._position})
            self._note = restored.note
            return self.program.as_stored(restored.state, restored.extra)
        return self.program.init(self.config.seed)

    def _train(
        self,
        state: Any,
        stop: StopFlag,
        checkpoints: Checkpoints,
        log: metrics.MetricsLog | None,
        progress: Progress,
    ) -> Any:
        """Runs the steps; metrics are read one step late, beside the next step."""
        config, step = self.config, self._start
        batches = data.training_batches(
            self.corpus,
            seed=config.seed,
            position=self._position,
            **self._batch_shape,
        )
        any_process = agree.make_any_process(self.program.mesh)
        pending: collections.deque = collections.deque()
        self._clock, stopping, saved = time.perf_counter(), False, step
        with contextlib.ExitStack() as tracing, self._watchdog:
            while step < config.steps and not stopping:
                self._trace(step, tracing)
                state, step_metrics = self.program.step(state, next(batches))
                step += 1
                pending.append(
                    (step, step_metrics, any_process(stop.signal is not None))
                )
                evaluates = step % config.evaluate_every == 0 or step == config.steps
                saves = step % config.checkpoint_every == 0 or step == config.steps
                every = config.checkpoint_local_every or config.checkpoint_every
                saves_here = config.checkpoint_local_dir and step % every == 0
                boundary = evaluates or saves or saves_here
                while ready := len(pending) - (0 if boundary or stopping else 1):
                    finished = [pending.popleft() for _ in range(ready)]
                    stopping |= self._record(finished, log, progress, saved)
                if boundary or stopping:
                    self._watchdog.pause()
                if saves or saves_here or stopping:
                    saved = step
                    used = (step - self._start) * config.batch_size
                    about = {
                        "position": self._position + used,
                        "layout": config.layout,
                        "config": dataclasses.asdict(config),
                    }
                    portable = self.program.in_model_order(state)
                    extra = self.program.extra_state(state)
                    checkpoints.save(
                        step,
                        portable,
                        about | self._identity(),
                        extra,
                        persistent=bool(saves or stopping),
                    )
                if evaluates and (not stopping or step == config.steps):
                    found = [self.program.evaluate(state, b) for b in self._held_out]
                    means = {
                        name: float(np.mean([m[name] for m in jax.device_get(found)]))
                        for name in found[0]
                        if name in ("loss", "drift")
                    }
                    apart = f", drift {means['drift']:.4f}" if "drift" in means else ""
                    progress.say(
                        f"step {step}: held-out loss {means['loss']:.4f}{apart}"
                    )
                    if log:
                        means["evaluation_loss"] = means.pop("loss")
                        log.write(step, **means)
                if boundary:
                    self._clock = time.perf_counter()
                    self._watchdog.resume()
        return state

    def _trace(self, step: int, tracing: contextlib.ExitStack) -> None:
        """Profiles three steps, from the fourth on; `tracing` ends it in any case."""
        if self.profile and step == self._start + 3:
            folder = str(self.folder / "profile")
            tracing.enter_context(jax.profiler.trace(folder))
        elif step == self._start + 6:
            tracing.close()

    def _record(
        self,
        finished: Sequence[tuple[int, Any, Any]],
        log: metrics.MetricsLog | None,
        progress: Progress,
        saved: int,
    ) -> bool:
        """Logs finished steps; returns whether any process was told to stop."""
        steps = [(step, jax.device_get(values)) for step, values, _ in finished]
        now = time.perf_counter()
        seconds, self._clock = (now - self._clock) / max(1, len(steps)), now
        for step, step_metrics in steps:
            self._watchdog.finished(step)
            self._log_step(step, step_metrics, seconds, log, progress)
            self._check_finite(step, step_metrics, saved)
        progress_file = os.environ.get("MESHPAR_PROGRESS")
        if progress_file and steps and jax.process_index() == 0:
            # For launchers; replaced at once, so that a kill leaves a whole number.
            written = pathlib.Path(f"{progress_file}.partial")
            written.write_text(str(steps[-1][0]))
            os.replace(written, progress_file)
        return any(bool(stop) for _, _, stop in finished)

    def _log_step(
        self,
        step: int,
        step_metrics: Any,
        seconds: float,
        log: metrics.MetricsLog | None,
        progress: Progress,
    ) -> None:
        values = {name: float(value) for name, value in step_metrics.items()}
        tokens = self.config.batch_size * self.config.model.length
        values |= {
            "learning_rate": float(self._learning_rates[step - 1]),
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
        }
        if self._peak_flops:
            flops = self.config.model.flops_per_token() * tokens
            values["mfu"] = flops / seconds / self._peak_flops
        if log:
            log.write(step, **values)
        progress.update(step, values["loss"], values["tokens_per_second"])

    def _check_finite(self, step: int, step_metrics: Any, saved: int) -> None:
        loss, grad_norm = (float(step_metrics[k]) for k in ("loss", "grad_norm"))
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            size = self.config.batch_size
            first = self._position + (step - 1 - self._start) * size
            rate = self._learning_rates[step - 1]
            raise NonFiniteError(
                f"step {step}: loss={loss}, grad_norm={grad_norm}; look at "
                f"learning_rate={rate:.3g}, at the grad_norm of the steps before "
                f"({self.folder / 'metrics.jsonl'}), at samples "
                f"{first} to {first + size - 1} and at "
                f"compute_dtype={self.config.compute_dtype}; the last good checkpoint "
                f"is {f'that of step {saved}' if saved else 'none yet'}"
            )

    def _describe(self, start: int) -> str:
        mesh, config = self.program.mesh, self.config
        weights = sum(p.size for p in self.program.model.params.values())
        device = mesh.devices.flat[0]
        lines = [
            f"model: {config.recipe}, {weights:,} parameters",
            f"data: {self.corpus.name}, {len(self.corpus.train):,} tokens, held out "
            f"{len(self.corpus.held_out):,}",
            f"layout: {self.program.layout} on {mesh.size} {device.platform} "
            f"device(s), {jax.process_count()} process(es)",
            *([str(self.program)] if self.program.layout.replica > 1 else []),
            f"floor: a unigram model of this data reaches {self.floor:.4f}",
            f"workdir: {self.folder}"
            + (f", going on from step {start}" if start else ""),
        ]
        if start >= config.steps:
            lines.append(f"already at step {start} of {config.steps}; raise --steps")
        return "\n".join(lines)

    def _report(
        self, state: Any, log: metrics.MetricsLog | None, progress: Progress
    ) -> None:
        """Prints a sample and where everything lies."""
        config = self.config
        if config.sample_tokens:
            prompt = np.asarray(self.corpus.held_out[: config.model.length // 2])
            ids = sampling.sample(
                self.program,
                self.program.weights(state),
                prompt.tolist(),
                config.sample_tokens,
                length=config.model.length,
                seed=config.seed,
            )
            text = self.corpus.decode(ids)
            progress.say(f"sample:\n{text}\n")
        if not log:
            return
        rows = metrics.read(log.path)
        metrics.plot(rows, self.folder / "loss.png", self.floor)
        held_out = [r["evaluation_loss"] for r in rows if "evaluation_loss" in r]
        if held_out:
            progress.say(
                f"held-out loss {held_out[-1]:.4f}, unigram floor {self.floor:.4f}"
            )
        where = {
            "metrics": log.path,
            "tensorboard": log.tensorboard,
            "checkpoints": self.folder / "checkpoints",
            "plot": self.folder / "loss.png",
        }
        if self.profile:
            where["profile"] = self.folder / "profile"
        for name, path in where.items():
            progress.say(f"{name}: {os.path.relpath(path)}")
