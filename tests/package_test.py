"""The files around the package say the same version, and parse."""

import pathlib
import re
import shutil
import tomllib

import pytest
import yaml

from docs import release_links

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


def test_a_release_links_to_the_files_of_its_tag(tmp_path):
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    address = "https://example.org/owner/name"
    release_links.write(tmp_path, address + "/")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    urls = project.pop("urls")
    assert project == PROJECT
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} == {*urls}
    pages = re.findall(r"\]\(([^)\s]+)", (tmp_path / "README.md").read_text())
    assert len(pages) > 20
    of_tag = rf"{address}/(?:blob|raw)/v{re.escape(PROJECT['version'])}/([^#]+)"
    for link in (*pages, urls["Documentation"], urls["Changelog"]):
        assert (ROOT / re.match(of_tag, link)[1]).is_file(), link
    with pytest.raises(ValueError, match="has .project.urls. already"):
        release_links.write(tmp_path, address)


@pytest.mark.parametrize("address", ["", "github.com/owner/name", "https://host/name"])
def test_a_release_needs_the_address_of_a_repository(address):
    with pytest.raises(ValueError, match="no address like https://github.com"):
        release_links.write(ROOT, address)
