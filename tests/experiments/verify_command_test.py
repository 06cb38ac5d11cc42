"""The verify command: proofs and differences, random layouts, weighted losses."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def verify(text, *flags):
    run = [sys.executable, "-m", "experiments.verify", "--recipe=tiny"]
    run += [f"--data={text}", "--verify_steps=1", "--devices=2", *flags]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_random_layouts_are_drawn_counted_and_judged(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A line of the data, and then another one. " * 400)
    done = verify(text, "--padded", "--random=2", "--seed=4")
    *outcomes, counts = done.stdout.splitlines()
    verdicts = [line.split()[0] for line in outcomes]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(verdicts) == 2 and "equal" in verdicts
    assert counts == (
        f"{verdicts.count('equal')} equal, {verdicts.count('refused')} refused, 0 WRONG"
    )
    done = verify(text, "--random=1", "--seed=4", "--tolerance=1e-12")
    assert done.returncode == 1 and "WRONG" in done.stdout
    done = verify(text, "--random=3", "--layout=data=2")
    assert done.returncode == 2 and "leave out --layout" in done.stderr


def test_verify_command_proves_and_names_differences(text):
    run = [sys.executable, "-m", "experiments.verify", "--recipe=tiny"]
    run += [f"--data={text}", "--layout=fsdp=2,tensor=2", "--verify_steps=2"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("EQUAL: fsdp=2,tensor=2,zero=3"), last
    # A tolerance below rounding finds a difference, names it and exits 1.
    done = subprocess.run(
        [*run, "--json", "--tolerance=1e-12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
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
