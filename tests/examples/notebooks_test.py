"""The notebooks run from their first cell to the last, and print what they promise."""

import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
PROMISED = {
    "first_layout": ["loss 0.", "all_gather", "pipe=4,data=2,microbatches=4"],
    "proof": ["EQUAL to your loop", "DIFFERENT from your loop", "refused: "],
    "plan": ["layouts fit 16 v5e devices"],
}


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PROMISED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_a_notebook_runs_from_top_to_bottom(name):
    """In a process of its own, as its first cell simulates devices."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code), "keep notebooks without outputs"
    sources = ["".join(cell["source"]) for cell in code]
    install, *rest = sources
    assert install.startswith("%pip install")
    program = [sys.executable, "-c", "\n".join(rest)]
    done = subprocess.run(program, cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in PROMISED[name]:
        assert words in done.stdout
