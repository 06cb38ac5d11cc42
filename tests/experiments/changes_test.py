"""Changes between two starts of a run: each one is refused, or stands out."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from support.tiny_runs import train_on_one_device as train

from experiments import data, recipes
from experiments.data import DataConfig, fingerprint
from meshpar.checkpoint import persistent
from meshpar.errors import ConfigError, MeshparError
from meshpar.runs import changes, metrics
from meshpar.runs.config import with_settings

TOKENS = np.random.default_rng(0).integers(0, 100, 200_000)


def config(folder, *settings):
    common = [
        *(f"data.path={folder}/ids.npy", f"workdir={folder}/run", "steps=2"),
        *("sample_tokens=0", "data.held_out=0.01"),
    ]
    return with_settings(recipes.get("tiny"), [*common, *settings])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The folder of a run of two steps, and its data."""
    folder = tmp_path_factory.mktemp("original")
    np.save(folder / "ids.npy", TOKENS)
    assert train(config(folder)) == 0
    return folder


@pytest.fixture
def trained(original, tmp_path):
    """A copy of that run."""
    return pathlib.Path(shutil.copytree(original, tmp_path, dirs_exist_ok=True))


def resumptions(folder):
    """The rows that mark where the run went on."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if metrics.RESUMED in row]


def fingerprint_of(folder, tokens):
    np.save(folder / "ids.npy", tokens)
    return data.load(DataConfig(path=f"{folder}/ids.npy", held_out=0.01)).fingerprint


def test_a_change_of_one_token_changes_the_fingerprint(tmp_path):
    first, tokens = fingerprint_of(tmp_path, TOKENS), TOKENS.copy()
    assert fingerprint_of(tmp_path, TOKENS.astype(np.uint16)) == first
    tokens[100_001] += 1
    assert fingerprint_of(tmp_path, tokens) != first


def test_the_hash_of_a_large_file_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "CACHED_BYTES", 1)
    first, path = fingerprint_of(tmp_path, TOKENS), f"{tmp_path}/ids.npy"
    kept = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert len(kept) == 1
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_digest", None)  # Nothing is hashed again.
        assert data.load(DataConfig(path=path, held_out=0.01)).fingerprint == first
    kept[0].write_text("torn")
    assert data.load(DataConfig(path=path, held_out=0.01)).fingerprint == first
    changed = np.memmap(path, mode="r+")
    changed[-8] ^= 1  # The size stays the same.
    changed.flush()
    assert data.load(DataConfig(path=path, held_out=0.01)).fingerprint != first


def test_other_data_needs_consent(trained, capsys):
    tokens = TOKENS.copy()
    tokens[np.arange(len(tokens)) % 3 != 0] = 7  # A sample would not see it.
    np.save(trained / "ids.npy", tokens)
    longer = config(trained, "steps=3")
    with pytest.raises(ConfigError, match="data=sha256-.*add --allow_changes"):
        train(longer)
    assert train(longer, changes=True) == 0
    assert "trains in another way:\n  data: 'sha256-" in capsys.readouterr().out
    (row,) = resumptions(trained)
    assert row["step"] == 2 and row["changes"][0].startswith("data: 'sha256-")


@pytest.mark.slow
def test_what_changes_training_stands_out(trained, capsys):
    assert train(config(trained)) == 0
    assert "WARNING" not in capsys.readouterr().out
    settings = {
        "optimizer.learning_rate": "0.4",
        "optimizer.weight_decay": "0.0",
        "optimizer.clip_norm": "0.0",
        "batch_size": "8",
        "compute_dtype": "bfloat16",
        "model.dropout": "0.1",
        "steps": "3",
    }
    changed = [f"{name}={value}" for name, value in settings.items()]
    assert train(config(trained, *changed, "evaluate_every=7")) == 0
    said = capsys.readouterr().out
    assert "changed since step 2:" in said and "evaluate_every: 10 -> 7" in said
    warning = said[said.index("WARNING: from step 2 on") :].splitlines()
    assert {line.split(":")[0].strip() for line in warning[1:8]} == settings.keys()
    assert "  batch_size: 16 -> 8" in warning
    first, second = resumptions(trained)
    assert first["changes"] == []
    assert second["changes"] == [line.strip() for line in warning[1:8]]


@pytest.mark.parametrize(
    "setting", ["model.norm_eps=0.5", "model.rope_theta=500", "model.norm=layernorm"]
)
def test_another_function_of_the_same_weights_is_refused(setting, original):
    checkpoint = persistent.find_checkpoints(original / "run/checkpoints")[-1]
    name, value = setting.split("=")
    settled = recipes.stored(checkpoint.metadata["config"])
    (line,) = changes.changes(
        checkpoint.metadata["config"], with_settings(settled, [setting])
    ).of_model
    assert line.startswith(f"{name}: ") and value in line
    if name == "model.norm_eps":
        with pytest.raises(
            ConfigError, match="another model: model.norm_eps: 1e-05 ->"
        ):
            train(config(original, setting), changes=True)


@pytest.mark.slow
def test_a_fingerprint_of_an_earlier_version_still_resumes(trained, capsys):
    """It covers a sample of the data; the next checkpoint holds that of all of it."""
    (path,) = (trained / "run/checkpoints").glob("2/metadata/metadata")
    stored = json.loads(path.read_text())
    del stored["checksum"]
    corpus = data.load(config(trained).data)
    parts = corpus.train, corpus.held_out
    stored["data"] = fingerprint.of_a_sample(corpus.vocab, parts)
    path.write_text(json.dumps(stored))
    assert train(config(trained, "steps=3")) == 0
    assert "step 2 holds an earlier version's fingerprint" in capsys.readouterr().out
    newest = persistent.find_checkpoints(trained / "run/checkpoints")[-1]
    assert newest.metadata["data"] == corpus.fingerprint
    np.save(trained / "ids.npy", (TOKENS + 1) % 100)
    path.write_text(json.dumps(stored))
    shutil.rmtree(trained / "run/checkpoints/3")
    with pytest.raises(ConfigError, match="add --allow_changes"):
        train(config(trained, "steps=3"))


def test_settings_that_this_version_does_not_know_are_said(original):
    stored = persistent.find_checkpoints(original / "run/checkpoints")[-1].metadata
    found = changes.changes(stored["config"] | {"sparsity": 0.5}, config(original))
    (line,) = found.of_training
    assert "cannot be compared" in line and "sparsity" in line


@pytest.mark.parametrize("highest, vocab", [(2**31, 0), (2**62, 0), (2**31 - 1, 512)])
def test_token_ids_beyond_the_vocabulary(highest, vocab, tmp_path):
    for kind in (np.int64, np.uint64):
        np.save(tmp_path / "ids.npy", np.array([1, highest] * 500, kind))
        with pytest.raises(MeshparError, match=f"holds (the )?token id {highest}"):
            wanted = config(tmp_path, f"model.vocab={vocab}")
            wanted.fitted(data.load(wanted.data))


def test_unsigned_ids_of_64_bits_are_counted(tmp_path):
    np.save(tmp_path / "ids.npy", TOKENS.astype(np.uint64))
    corpus = data.load(DataConfig(path=f"{tmp_path}/ids.npy"))
    assert corpus.train_counts.sum() == len(corpus.train)
