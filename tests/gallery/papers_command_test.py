"""The command `experiments.papers`: lists, refuses, writes, and says what failed."""

import json
import subprocess
import sys

import pytest
from support import commands

from experiments.gallery import catalog
from experiments.gallery.paper import Claim, Paper, Result, Setting

HOLDS = Claim("one is one", "1", "1", True)
FAILS = Claim("one is two", "2", "1", False)


def paper(name, *claims):
    def run(setting: Setting) -> Result:
        setting.progress("computes", 0.5)
        draw = lambda figure: figure.subplots().plot([1, 2])  # noqa: E731
        numbers = {"seeds": list(setting.seeds)}
        return Result(("a", "b"), (("1", "2"),), claims, numbers, draw)

    return Paper(name, f"Title of {name}", "Author, 1999", "a line", run)


@pytest.fixture
def papers(monkeypatch, capsys):
    """Runs the command with two papers, one of which fails."""
    known = [paper("good", HOLDS), paper("bad", HOLDS, FAILS)]
    monkeypatch.setattr(catalog, "PAPERS", {entry.name: entry for entry in known})
    return lambda *words: commands.run("papers", words, monkeypatch, capsys)


def test_papers_are_listed(papers):
    outcome = papers("--list")
    assert outcome.code == 0
    assert "good" in outcome.out and "Author, 1999" in outcome.out


def test_an_accepted_paper_writes_its_files(papers, tmp_path):
    outcome = papers("good", "--quick", f"--outputs={tmp_path}")
    assert outcome.code == 0 and "good: accepted" in outcome.out
    assert (tmp_path / "good.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "good.json").read_text())
    assert found["accepted"] and found["quick"] and found["numbers"]["seeds"] == [0]


def test_a_claim_that_fails_is_named_and_ends_with_code_1(papers, tmp_path):
    outcome = papers("--all", f"--outputs={tmp_path}")
    assert outcome.code == 1
    assert "good: accepted" in outcome.out and "bad: FAILED: one is two" in outcome.out
    assert "1 of 2 accepted; failed: bad" in outcome.out
    assert not json.loads((tmp_path / "bad.json").read_text())["accepted"]


@pytest.mark.slow
def test_quick_papers_are_computed_side_by_side(tmp_path):
    names = "pipeline_bubbles", "scaling"
    words = [*names, "--quick", "--jobs=2", f"--outputs={tmp_path}"]
    command = [sys.executable, "-m", "experiments.papers", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=commands.ROOT)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 accepted" in done.stdout
    first, second = (done.stdout.index(f"{name}: accepted") for name in names)
    assert first < second
    for name in names:
        assert (tmp_path / f"{name}.png").exists()
        assert json.loads((tmp_path / f"{name}.json").read_text())["accepted"]


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "give names, --all, or --list"),
        (("goood",), "did you mean 'good'"),
        (("good", "--all"), "give one of the two"),
        (("good", "--layout=data=2"), "--layout is not read by this command"),
    ],
)
def test_words_that_cannot_be_meant(papers, words, message):
    outcome = papers(*words)
    assert outcome.code == 2 and message in outcome.err
