r"""Gives a release the address of its repository: links of its package and its README.

    python -m docs.release_links https://github.com/OWNER/NAME

The index of packages shows the README alone, where links to files lead nowhere. The
workflow of a release rewrites its own checkout so; nothing of it is committed.
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|#)([^)\s]+)")
"""The text of a Markdown link or picture, and the file that it leads to."""


def urls(address: str, version: str) -> dict[str, str]:
    """The links of the package, {label: URL}."""
    files = f"{address}/blob/v{version}"
    return {
        "Homepage": address,
        "Documentation": f"{files}/docs/index.md",
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{files}/CHANGELOG.md",
    }


def linked(text: str, address: str, version: str) -> str:
    """A page whose links to files of the project lead to the repository.

    Args:
      text: Markdown.
      address: of the repository.
      version: whose tag the files are read at.
    """

    def absolute(match: re.Match) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}{address}/{kind}/v{version}/{match[2]}"

    return _LINK.sub(absolute, text)


def write(root: pathlib.Path, address: str) -> None:
    """Writes the address into the README and the pyproject.toml of a checkout.

    Args:
      root: of the checkout.
      address: of the repository.

    Raises:
      ValueError: no address of a repository, or links that are there already.
    """
    address = address.rstrip("/")
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+){2,}", address):
        raise ValueError(
            f"{address!r} is no address like https://github.com/OWNER/NAME"
        )
    project, readme = root / "pyproject.toml", root / "README.md"
    text = project.read_text()
    facts = tomllib.loads(text)["project"]
    if "urls" in facts:
        raise ValueError(f"{project} has [project.urls] already")
    lines = (f'{k} = "{v}"\n' for k, v in urls(address, facts["version"]).items())
    project.write_text(f"{text}\n[project.urls]\n{''.join(lines)}")
    readme.write_text(linked(readme.read_text(), address, facts["version"]))


if __name__ == "__main__":
    (given,) = sys.argv[1:] or [""]
    try:
        write(ROOT, given)
    except ValueError as error:
        sys.exit(f"release_links: {error}")
