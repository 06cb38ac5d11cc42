"""The wheel of this checkout holds all of the library, and works without the rest."""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Folder with what a wheel of this checkout installs."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in (
        "meshpar",
        "experiments",
        "examples",
        "tests",
    ):  # Only one of them belongs in.
        shutil.copytree(
            ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    out = tmp_path_factory.mktemp("wheel")
    backend = PROJECT["build-system"]["build-backend"]
    build = f"import {backend} as backend; backend.build_wheel({str(out)!r})"
    subprocess.run(
        [sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True
    )
    (wheel,) = out.glob("*.whl")
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_every_file_of_the_library_and_no_other(unpacked):
    def files(folder):
        paths = (folder / "meshpar").rglob("*.*")
        kept = (path for path in paths if "__pycache__" not in path.parts)
        return sorted(str(path.relative_to(folder)) for path in kept)

    assert files(unpacked) == files(ROOT)
    (info,) = {path.name for path in unpacked.iterdir()} - {"meshpar"}
    assert info.endswith(".dist-info")


@pytest.mark.slow
def test_the_wheel_imports_and_trains(unpacked, tmp_path):
    script = ROOT / "tests" / "support" / "import_and_train.py"
    done = subprocess.run(
        [sys.executable, str(script), str(unpacked)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    modules = {path.parent if path.name == "__init__.py" else path.with_suffix("")
               for path in (unpacked / "meshpar").rglob("*.py")}  # fmt: skip
    names = {".".join(path.relative_to(unpacked).parts) for path in modules}
    assert set(done.stdout.splitlines()) == names - {"meshpar"}


def test_the_commands_of_the_wheel_train_a_recipe_of_ones_own(unpacked, tmp_path):
    shutil.copy(ROOT / "tests" / "support" / "own_run.py", tmp_path)
    main = "import sys; from meshpar.commands.main import main; main()"
    words = ["run", "own_run.py:net", "--steps=2", "--layout=fsdp=2", "--workdir=w"]
    done = subprocess.run(
        [sys.executable, "-c", main, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2: held-out loss" in done.stdout
    assert (tmp_path / "w" / "checkpoints" / "2").is_dir()
