"""What comes from elsewhere is data: no code of it runs, and no path of it leads out.

Nothing secret of this machine goes into logs, records or pages.
"""

import ast
import dataclasses
import functools
import re
import subprocess

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import processes
from support.explanations import explanation
from support.marks import slow
from support.tiny_runs import ROOT, command

from experiments.data import DataConfig
from experiments.generation.sources import newest_checkpoint
from meshpar import html_page
from meshpar.checkpoint import find_checkpoints
from meshpar.checkpoint.local import LocalTier
from meshpar.checkpoint.persistent import METADATA, STATE, PersistentTier
from meshpar.commands.reports import page
from meshpar.errors import CheckpointError, DataError

FORBIDDEN = re.compile(
    r"(c?pickle|cloudpickle|dill|joblib|marshal|shelve)\.(loads?|Unpickler|open)"
    r"|torch\.load|yaml\.(unsafe_|full_)?load|read_pickle|unpack_archive|extractall"
    r"|tarfile\.open|zipfile\.ZipFile|eval|exec|os\.system|os\.popen"
)
"""Calls that run code of a file, or write files that an archive names."""

TRUSTED = {
    "docs/make_pictures.py": "a program of a page of the same clone",
    "meshpar/islands/island_program.py": "a program that the same run has written",
}
"""{file: what it loads and runs}."""


@functools.cache
def calls():
    """(file, name of the function, call) of all code of the project."""
    found = []
    for room in ("meshpar", "experiments", "examples", "docs"):
        for path in (ROOT / room).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    found.append((file, ast.unparse(node.func), node))
                if isinstance(node, ast.ClassDef):
                    found += [(file, ast.unparse(base), None) for base in node.bases]
    return found


def test_no_file_is_loaded_that_could_run_code():
    found = {(file, name) for file, name, _ in calls() if FORBIDDEN.fullmatch(name)}
    assert {file for file, _ in found} == TRUSTED.keys(), found


def test_arrays_are_never_loaded_with_pickles():
    loads = [(file, call) for file, name, call in calls() if name == "np.load"]
    assert len(loads) > 4
    for file, call in loads:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("allow_pickle") == "False", file


def test_the_list_of_forbidden_calls_finds_them():
    for name in ("pickle.load", "pickle.Unpickler", "torch.load", "eval", "yaml.load"):
        assert FORBIDDEN.fullmatch(name)
    assert not FORBIDDEN.fullmatch("json.load")


@pytest.fixture
def stored(tmp_path):
    """A folder with one small checkpoint."""
    folder = tmp_path / "checkpoints"
    array = jax.device_put(
        np.ones(4, np.float32),
        NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec()),
    )
    folder.mkdir()
    tier = PersistentTier(folder, 1, 16)
    tier.save(3, {"x": array}, None, {"position": 0})
    tier.wait()
    tier.close()
    return folder


def test_a_checkpoint_whose_files_lead_elsewhere_is_not_read(stored, tmp_path):
    assert newest_checkpoint(str(stored)).step == 3
    (tmp_path / "moved").mkdir()
    file = next(x for x in (stored / "3" / STATE).rglob("*") if x.is_file())
    inside = file.with_name("inside")
    inside.symlink_to(file.name)
    assert newest_checkpoint(str(stored)).step == 3
    file.rename(tmp_path / "moved" / file.name)
    file.symlink_to(tmp_path / "moved" / file.name)
    (found,) = find_checkpoints(stored)
    assert "is a link out of the checkpoint" in found.problem
    with pytest.raises(CheckpointError, match="is complete"):
        newest_checkpoint(str(stored))
    tier = PersistentTier(stored, 1, 16)
    with pytest.raises(ValueError, match="has to hold its own files"):
        tier.metadata("3")
    tier.close()


def test_metadata_that_is_a_link_is_not_read(stored, tmp_path):
    file = stored / "3" / METADATA / METADATA
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "is a link out of the checkpoint" in find_checkpoints(stored)[0].problem


@pytest.mark.parametrize("planted", ["../../other", "/tmp/other", "", "a/b", "x" * 32])
def test_the_id_of_a_run_names_no_folder_elsewhere(tmp_path, planted):
    run, local = tmp_path / "run", tmp_path / "disk" / "local"
    run.mkdir()
    (run / "run_id").write_text(f"{planted}\n{run}")
    LocalTier.open(local, run, []).close()
    assert [re.fullmatch("[0-9a-f]{32}", x.name) for x in local.iterdir()] != [None]
    assert [x.name for x in (tmp_path / "disk").iterdir()] == ["local"]
    again = LocalTier.open(local, run, [])
    assert len(list(local.iterdir())) == 1
    again.close()


def test_another_tokenizer_than_the_runs_is_an_error(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    config = DataConfig(tokenizer=str(file))
    known = config.tokenizer_identity
    config.check_tokenizer(known)
    config.check_tokenizer({})  # An earlier version stored no hash.
    file.write_text("{} ")
    with pytest.raises(DataError, match="is not the file with which the run was"):
        config.check_tokenizer(known)
    DataConfig().check_tokenizer(known)  # Bytes have no file.


PLANTED = "<script>alert(1)</script>&\"'"


def test_pages_escape_all_names(tmp_path):
    found = explanation(PLANTED, 1e6)
    row = dataclasses.replace(found.traffic[0], why=(PLANTED,))
    found = dataclasses.replace(
        found,
        why_auto=PLANTED,
        device_kind=PLANTED,
        traffic=(row,),
        violations=(PLANTED,),
        warnings=(PLANTED,),
        mesh={PLANTED: 2},
        replicated={PLANTED: PLANTED},
    )
    path = tmp_path / "page.html"
    page.write(str(path), PLANTED, [found], PLANTED)
    table = html_page.table([PLANTED], [[PLANTED]])
    for text in (path.read_text(), table):
        assert "&lt;script&gt;" in text and "<script" not in text


SECRET = "planted-secret-5f1d"


@pytest.mark.parametrize("fails", [slow(False), True])
def test_no_secret_of_the_environment_is_written(tmp_path, text, fails):
    """Two processes that train, and two that end with an error and its stack."""
    token = f"{SECRET}-of-the-run-0123456789"
    names = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_PASSWORD")
    secrets = {name: f"{SECRET}-{name}" for name in names}
    words = command(text, tmp_path / "run", "--layout=data=2", "--steps=2")
    if fails:
        words += ["--recipe=nothing"]
    done = subprocess.run(
        ["launch/local.sh", f"--log_dir={tmp_path / 'logs'}", "2", "--", *words],
        cwd=ROOT,
        env=processes.environment() | secrets | {"MESHPAR_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode == 0) is not fails, done.stdout + done.stderr
    written = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert len(written) >= (3 if fails else 10)
    assert SECRET not in done.stdout + done.stderr
    for file in written:
        assert SECRET.encode() not in file.read_bytes(), file
