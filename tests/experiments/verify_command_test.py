"""The verify command draws layouts and compares weighted losses."""

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
    flags = ["--padded", "--random=3", "--seed=4"]
    done = verify(text, *flags)
    *outcomes, counts = done.stdout.splitlines()
    verdicts = [line.split()[0] for line in outcomes]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(verdicts) == 3 and "equal" in verdicts
    assert counts == (
        f"{verdicts.count('equal')} equal, {verdicts.count('refused')} refused, 0 WRONG"
    )
    done = verify(text, *flags, "--tolerance=1e-12")
    assert done.returncode == 1 and "WRONG" in done.stdout
    done = verify(text, "--random=3", "--layout=data=2")
    assert done.returncode == 2 and "leave out --layout" in done.stderr
