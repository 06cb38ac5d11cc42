"""Local SGD as a user types it: settings, a run that resumes, and the sweep."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from support import commands

import meshpar
from experiments import data, local_sgd_sweep, recipes
from experiments.reports import sweep
from meshpar.errors import ConfigError, StalenessError
from meshpar.runs import metrics, programs
from meshpar.runs.config import with_settings
from meshpar.runs.modes import LocalSGDConfig
from meshpar.runs.trainer import Trainer

SETTINGS = [
    "optimizer_mode=local_sgd",
    "local_sgd.period=4",
    "local_sgd.staleness=2",
    "local_sgd.fragments=2",
    "local_sgd.outer=nesterov",
    "local_sgd.merge=lerp",
    "local_sgd.wire=int8",
]


def configured(*settings):
    return with_settings(recipes.get("tiny"), [*SETTINGS, *settings])


def test_settings_become_the_mode():
    mode = programs.make_mode(configured("local_sgd.merge_weight=0.25"))
    assert (mode.period, mode.staleness, mode.fragments) == (4, 2, 2)
    assert mode.merge == meshpar.local_sgd.Lerp(0.25) and mode.wire == "int8"
    assert isinstance(mode.outer, optax.GradientTransformation)
    warm = programs.make_mode(configured("local_sgd.warmup_steps=8"))
    assert warm.period(7) == 1 and warm.period(8) == 4
    assert programs.make_mode(recipes.get("tiny")) is None


@pytest.mark.parametrize(
    "settings, error, words",
    [
        (["local_sgd.outer=nestorov"], ConfigError, "did you mean 'nesterov'"),
        (["local_sgd.merge=mean"], ConfigError, "local_sgd.merge=mean: use"),
        (["local_sgd.staleness=3"], StalenessError, "use at most 2"),
        (["optimizer_mode=synchronous"], ConfigError, "add --optimizer_mode=local"),
    ],
)
def test_settings_that_cannot_be_meant(settings, error, words):
    with pytest.raises(error, match=words):
        programs.make_mode(configured(*settings))


@pytest.mark.slow
def test_a_run_of_replicas_resumes_onto_synchronous_training(tmp_path, capsys):
    path = tmp_path / "text.txt"
    words = ["alpha ", "beta ", "gamma ", "delta "]
    path.write_text("".join(np.random.default_rng(0).choice(words, 20_000)))
    common = [f"data.path={path}", f"workdir={tmp_path}", "sample_tokens=5"]

    def train(config, layout):
        layout = meshpar.layouts.parse(layout)
        config = dataclasses.replace(config, layout=str(layout))
        devices = jax.devices()[: layout.num_devices]
        assert Trainer(config, layout, devices).run() == 0

    train(configured(*common, "steps=10"), "replica=2,fsdp=2")
    said = capsys.readouterr().out
    assert "local SGD: 2 replicas, 2 fragment(s) every 4 steps, 2 steps late" in said
    assert "drift" in said
    rows = metrics.read(tmp_path / "metrics.jsonl")
    sent = [row["replica_bytes"] for row in rows if "replica_bytes" in row]
    assert len(sent) == 10 and sent[0] == 0 and max(sent) > 0
    assert max(row["sync_age"] for row in rows if "sync_age" in row) <= 2 * 4
    train(with_settings(recipes.get("tiny"), [*common, "steps=12"]), "data=2")
    assert "of 2 replicas, replaced by their average" in capsys.readouterr().out


def test_results_of_other_settings_data_or_code_are_old(tmp_path, monkeypatch):
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for number, text in enumerate(texts):
        text.write_text(f"alpha {number} beta " * 500)

    def made(*settings, text=texts[0]):
        config = with_settings(
            recipes.get("tiny"), [f"data.path={text}", "layout=data=4", *settings]
        )
        return local_sgd_sweep.made_by(config, data.load(config.data))

    row = json.loads(json.dumps({"made_by": made("seed=3"), "loss": 1.0}))
    for same in ("seed=5", "workdir=x", "checkpoint_every=7", "sample_tokens=3"):
        assert not local_sgd_sweep.why_old(row, made(same))
    for other in ("steps=7", "evaluation_batches=3", "layout=data=2", "model.depth=1"):
        assert local_sgd_sweep.why_old(row, made(other)) == "settings"
    assert local_sgd_sweep.why_old(row, made(text=texts[1])) == "data"
    assert local_sgd_sweep.why_old({}, made()) == "settings and data and code"
    monkeypatch.setattr(local_sgd_sweep, "code_hash", lambda *_: "new")
    assert local_sgd_sweep.why_old(row, made()) == "code"


@pytest.mark.slow
def test_a_sweep_over_a_folder_of_old_results_says_so(tmp_path, monkeypatch, capsys):
    """Results that were written before are not those of another number of steps."""
    (tmp_path / "text.txt").write_text("alpha beta gamma " * 2000)
    words = ["--recipe=tiny", f"--data={tmp_path}/text.txt", "--batch_size=4"]
    words += ["--periods=4", "--staleness=0", "--wires=f32", "--seeds=1"]
    words += ["--replicas=2", "--devices=2", f"--workdir={tmp_path}/sweep"]

    def sweeps(steps):
        done = commands.run(
            "local_sgd_sweep", [*words, f"--steps={steps}"], monkeypatch, capsys
        )
        assert not done.code, done.err
        return done.out

    assert sweeps(2).count(", seed 0: loss") == 3
    assert ", seed 0: loss" not in sweeps(2)
    said = sweeps(3)
    assert "3 result(s)" in said and "other settings made them" in said
    assert said.count(", seed 0: loss") == 3
    summary = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    assert len(summary) == 3 and {row["spread"] for row in summary} == {0.0}


def test_the_sweep_runs_each_case_once_and_says_what_it_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(local_sgd_sweep, "PERIODS", type("F", (), {"value": ["4"]}))
    monkeypatch.setattr(
        local_sgd_sweep, "STALENESS", type("F", (), {"value": ["0", "4"]})
    )
    monkeypatch.setattr(local_sgd_sweep, "WIRES", type("F", (), {"value": ["int8"]}))
    found = local_sgd_sweep.cases(recipes.get("tiny"))
    assert [*found] == ["synchronous", "H=4 s=0 int8", "independent"]
    assert found["independent"].local_sgd.period == 21  # Longer than the run.
    assert found["H=4 s=0 int8"].local_sgd == LocalSGDConfig(period=4, wire="int8")
    rows = [
        {"case": case, "seed": seed, "loss": loss + seed, "bytes_per_step": sent}
        for case, loss, sent in (("synchronous", 2.0, 100.0), ("H=4 s=0 int8", 2.1, 7))
        for seed in (0, 1)
    ]
    first, second = sweep.summary(json.loads(json.dumps(rows)))
    assert first["loss"] == 2.5 and first["spread"] == 0.5
    assert second["bytes_per_step"] == 7
    sweep.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert sweep.table(rows).row_count == 2
