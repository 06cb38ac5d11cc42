"""Short runs of the recipe "tiny", in this process or in others; they print no text."""

import dataclasses
import pathlib
import sys

import jax

from experiments import recipes
from meshpar import layouts
from meshpar.runs import metrics
from meshpar.runs.config import with_settings
from meshpar.runs.start import Consent
from meshpar.runs.step_log import StepLog
from meshpar.runs.trainer import Trainer

ROOT = pathlib.Path(__file__).parents[2]


def config(text, workdir, **changes):
    tiny = with_settings(
        recipes.get("tiny"), [f"data.path={text}", "steps=12", "sample_tokens=0"]
    )
    return dataclasses.replace(tiny, workdir=str(workdir), **changes)


def train(config, layout="data=2,fsdp=2,tensor=2", profile=False):
    layout = layouts.parse(layout)
    config = dataclasses.replace(config, layout=str(layout))
    devices = jax.devices()[: layout.num_devices]
    return Trainer(config, layout, devices, profile).run()


def losses(workdir):
    rows = metrics.read(pathlib.Path(workdir) / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def command(text, workdir, *more):
    return [
        *(sys.executable, "-m", "experiments.run", "--recipe=tiny", "--steps=12"),
        *(f"--data={text}", f"--workdir={workdir}", "--set=sample_tokens=0", *more),
    ]


def stop_after(monkeypatch, step, action):
    """Acts once the metrics of a step have been read."""
    log_step = StepLog._log_step

    def acting(self, finished, *arguments):
        log_step(self, finished, *arguments)
        if finished == step:
            action()

    monkeypatch.setattr(StepLog, "_log_step", acting)


def train_on_one_device(config, **consent):
    layout = layouts.parse("data=1")
    config = dataclasses.replace(config, layout=str(layout))
    consent = Consent(**consent)
    return Trainer(config, layout, jax.devices()[:1], consent=consent).run()
