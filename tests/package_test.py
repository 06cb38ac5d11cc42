"""The files around the package say the same version, and parse."""

import pathlib
import re
import tomllib

import yaml

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_all_files_name_the_version_of_the_project():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert PROJECT["version"] == cited["version"] == newest[1]


def test_the_workflows_test_every_python_of_the_project():
    classifiers = " ".join(PROJECT["classifiers"])
    known = re.findall(r"Python :: (3\.\d+)", classifiers)
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == known
    assert jobs["test"]["steps"][-1]["run"] == ".ci/run"
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text()), path
