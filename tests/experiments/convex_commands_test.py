"""The commands sparse and batch as a user types them: tables, JSON, what they hold."""

import json

import numpy as np
import pytest
from support import commands

from experiments.convex import batch
from experiments.data import hashed_text
from meshpar.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two folders of text that share half of their words."""
    root, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for name, first in (("one", 0), ("two", 40)):
        (root / name).mkdir()
        for number in range(3 + (name == "one")):
            words = rng.integers(first, first + 80, size=(400, 4))
            lines = [" ".join(f"word{w}" for w in line) for line in words]
            (root / name / f"{number}.txt").write_text("\n".join(lines))
    return root


def run(name, folder, words, monkeypatch, capsys):
    words = [f"--data={folder}", "--hash_bits=12", *words]
    outcome = commands.run(name, words, monkeypatch, capsys)
    assert outcome.code == 0, outcome
    assert outcome.compilations == 0
    return outcome.out


DBPG = ["--blocks=8", "--passes=12", "--kkt_filter", "--l1=2", "--workers=2"]


def test_text_becomes_rows_of_hashed_words(folder):
    text = hashed_text.load(str(folder), hash_bits=12)
    assert (
        text.rows.shape == (280, 4096)
        and text.labels.tolist() == [1] * 160 + [-1] * 120
    )
    assert text.rows.has_canonical_format and set(text.rows.data) == {1.0}
    assert 60 < text.rows.nnz / 280 <= 79  # 40 words, 39 pairs.
    some = hashed_text.load(str(folder), hash_bits=12, max_rows=50, seed=1)
    assert some.rows.shape == (50, 4096)
    train, held_out = hashed_text.split(text, 0.2, seed=0)
    assert train.rows.shape[0] + held_out.rows.shape[0] == 280
    assert 30 < len(held_out.labels) < 85


def test_text_of_one_file_is_refused(folder):
    with pytest.raises(DataError, match="come from one file or folder.*give a fol"):
        hashed_text.load(f"{folder}/one/0.txt", 12)


def test_dbpg_prints_passes_and_the_bytes_of_every_filter(folder, monkeypatch, capsys):
    out = run("sparse", folder, DBPG, monkeypatch, capsys)
    assert "pass 12: objective" in out and "held-out accuracy" in out
    for words in ("saved by KKT", "saved by key caching", "without filters"):
        assert words in out


def test_dbpg_is_near_the_reference_and_its_bytes_add_up(folder, monkeypatch, capsys):
    monkeypatch.setattr("experiments.convex.reference.best_solver", lambda: "SciPy")
    words = [*DBPG, "--json", "--reference", "--passes=20"]
    found = json.loads(run("sparse", folder, words, monkeypatch, capsys))
    assert found["objective"] < found["reference"] * (1 + 1e-3)
    assert found["held_out_accuracy"] > 0.9
    saved = sum(row["saved"] for row in found["filters"])
    words = ["--key_caching=false", "--significant=-1", "--compression=none", "--json"]
    words += ["--passes=20"]
    plain = json.loads(
        run("sparse", folder, [*DBPG[:2], *DBPG[3:], *words], monkeypatch, capsys)
    )
    assert plain["filters"] == [] and plain["sent"] == found["sent"] + saved


@pytest.mark.slow
def test_dbpg_on_the_standard_library(monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="liblinear comes with scikit-learn")
    words = ["--data=stdlib", "--kkt_filter", "--reference", "--json"]
    outcome = commands.run("sparse", words, monkeypatch, capsys)
    found = json.loads(outcome.out)
    assert found["objective"] < found["reference"] * (1 + 1e-3)
    pushed = [done["pushed"] for done in found["passes"]]
    assert np.mean(pushed[5:]) < 0.25


def test_hogwild_compares_processes_on_sparse_and_dense_rows(
    folder, monkeypatch, capsys
):
    words = ["--algorithm=hogwild", "--workers=1", "--passes=3", "--json"]
    sparse, dense = json.loads(run("sparse", folder, words, monkeypatch, capsys))
    assert (sparse["data"], dense["data"]) == ("sparse", "dense")
    assert sparse["processes"] == 1 and sparse["excess"] == dense["excess"] == 0


def test_lbfgs_equals_scipy_and_says_what_a_straggler_costs(
    folder, monkeypatch, capsys
):
    words = ["--iterations=15", "--portions=20", "--backup", "--json"]
    found = json.loads(run("batch", folder, words, monkeypatch, capsys))
    assert len(found["iterations"]) == len(found["scipy"]) == 15
    assert found["largest_difference"] < 1e-6
    costs = found["straggler_costs"]
    assert costs["20 portions per worker, backups"] < 1.4
    assert costs["one portion per worker"] == pytest.approx(10)
    words = ["--iterations=2", "--portions=3"]
    out = run("batch", folder, words, monkeypatch, capsys)
    assert "iteration 2: objective" in out and "no schedule can be below" in out


def test_codes_descend_as_if_nobody_was_slow(folder):
    text = hashed_text.load(str(folder), 8)
    problem = batch.Problem(text.rows, text.labels, 1.0)
    naive, ignore, *coded = (
        batch.descend(problem, method, 6, 2, 10.0, rounds=25, seed=0)
        for method in (batch.NAIVE, batch.IGNORE, batch.CYCLIC, batch.REPETITION)
    )
    for found in coded:
        np.testing.assert_allclose(found.weights, naive.weights, rtol=0, atol=1e-6)
        assert (found.work, found.seconds) == (3, 75)
    assert naive.seconds == 250 and ignore.seconds == 25
    assert np.abs(ignore.weights - naive.weights).max() > 1e-3
    assert ignore.objective > naive.objective


def test_descents_are_printed_as_a_table(folder, monkeypatch, capsys):
    words = ["--algorithm=gradient_descent", "--iterations=3"]
    out = run("batch", folder, words, monkeypatch, capsys)
    for name in ("waited for", "ignored", "coded, cyclic", "coded, repetition"):
        assert name in out
    words += ["--workers=5", "--json"]
    rows = json.loads(run("batch", folder, words, monkeypatch, capsys))
    assert [row["method"] for row in rows] == ["naive", "ignore", "cyclic"]
