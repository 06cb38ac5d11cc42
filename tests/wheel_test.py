"""The archives of this checkout hold all of the library, and work without the rest."""

import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS = "run", "verify", "explain", "plan", "checkpoint", "score", "goodput", "check"


def build(folder, kind, out):
    """Builds an archive of a folder, "sdist" or "wheel", and returns its path."""
    backend = PROJECT["build-system"]["build-backend"]
    code = f"import {backend} as backend; backend.build_{kind}({str(out)!r})"
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True
    )
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder with what an sdist of this checkout holds."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("meshpar", "experiments", "examples", "tests"):
        # Only one of them belongs in.
        shutil.copytree(
            ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    archive = build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel of the sdist, as `python -m build` makes it."""
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    """Folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files(folder):
    paths = (folder / "meshpar").rglob("*.*")
    kept = (path for path in paths if "__pycache__" not in path.parts)
    return sorted(str(path.relative_to(folder)) for path in kept)


def test_the_archives_hold_every_file_of_the_library_and_no_other(source, unpacked):
    assert files(unpacked) == files(source) == files(ROOT)
    (info,) = {path.name for path in unpacked.iterdir()} - {"meshpar"}
    assert info.endswith(".dist-info")
    others = {path.name for path in source.iterdir()} - {"meshpar"}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= others
    assert not others & {"experiments", "examples", "tests", "docs"}


def test_the_wheel_says_what_it_is_and_needs(unpacked):
    project = PROJECT["project"]
    (info,) = unpacked.glob("*.dist-info")
    said = email.message_from_string((info / "METADATA").read_text())
    assert (said["Name"], said["Version"]) == (project["name"], project["version"])
    assert said["Requires-Python"] == project["requires-python"]
    assert set(said.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    needed = [x for x in said.get_all("Requires-Dist") if "extra ==" not in x]
    assert sorted(needed) == sorted(project["dependencies"])
    assert said.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    scripts = (info / "entry_points.txt").read_text()
    assert "meshpar = meshpar.commands.main:main" in scripts
    assert (info / "licenses" / "LICENSE").is_file()


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


@pytest.mark.slow
def test_a_new_environment_runs_the_readme_and_the_commands(wheel, tmp_path):
    """Nothing but the wheel, and what it needs from the package index, is installed."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*words):
        options = dict(cwd=tmp_path, env=own, capture_output=True, text=True)
        done = subprocess.run([programs / words[0], *words[1:]], **options)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    run("pip", "install", "--quiet", f"{wheel}[commands]")
    readme = (ROOT / "README.md").read_text()
    program, of_a_run = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    (tmp_path / "program.py").write_text(program)
    assert "dense/kernel" in run("python", "program.py")
    (tmp_path / "my_run.py").write_text(program.partition("program =")[0] + of_a_run)
    for name in COMMANDS:
        assert "--" in run("meshpar", name, "--help"), name
    words = "my_run.py:net", "--layout=data=2,fsdp=2", "--steps=2", "--workdir=w"
    assert "step 2" in run("meshpar", "run", *words)
