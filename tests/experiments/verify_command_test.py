"""The verify command: proofs and differences, random layouts, weighted losses."""

import json

import pytest
from support import commands


@pytest.fixture
def verify(text, monkeypatch, capsys):
    def run(*flags):
        words = ["--recipe=tiny", f"--data={text}", *flags]
        return commands.run("verify", words, monkeypatch, capsys)

    return run


TWO = "--verify_steps=1", "--devices=2"


@pytest.mark.slow
def test_random_layouts_are_drawn_counted_and_judged(verify):
    done = verify(*TWO, "--padded", "--random=2", "--seed=4")
    assert not done.code, done.out + done.err
    *outcomes, counts = done.out.splitlines()
    verdicts = [line.split()[0] for line in outcomes]
    assert len(verdicts) == 2 and "equal" in verdicts
    assert counts == (
        f"{verdicts.count('equal')} equal, {verdicts.count('refused')} refused, 0 WRONG"
    )


@pytest.mark.slow
def test_a_random_layout_that_differs_is_wrong(verify):
    done = verify(*TWO, "--random=1", "--seed=4", "--tolerance=1e-12")
    assert done.code == 1 and "WRONG" in done.out
    assert done.out.splitlines()[-1] == "0 equal, 0 refused, 1 WRONG"


def test_random_layouts_leave_out_the_layout(verify):
    done = verify(*TWO, "--random=3", "--layout=data=2")
    assert done.code == 2 and "leave out --layout" in done.err


def test_verify_command_proves_and_names_differences(verify):
    words = "--layout=fsdp=2,tensor=2", "--devices=4", "--verify_steps=2"
    done = verify(*words)
    assert not done.code, done.out + done.err
    last = done.out.strip().splitlines()[-1]
    assert last.startswith("EQUAL: fsdp=2,tensor=2,zero=3"), last
    # A tolerance below rounding finds a difference, names it and exits 1.
    done = verify(*words, "--json", "--tolerance=1e-12")
    assert done.code == 1, done.err
    found = json.loads(done.out)
    assert not found["equal"]
    first = next(c for c in found["comparisons"] if c["error"] > 1e-12)
    assert found["first_difference"] == first
    kinds = {c["kind"] for c in found["comparisons"]}
    assert kinds == {
        "evaluation",
        "loss",
        "gradient",
        "grad_norm",
        "optimizer",
        "weight",
    }
