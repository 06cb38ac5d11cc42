"""Adds the API pages to the site: a page for each room, made from its docstrings.

A hook of mkdocs (mkdocs.yml). The public names of a room are those that its
``__init__.py`` imports as themselves. The code is read, and never imported or run.
"""

import ast
import pathlib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]


def public_names(init: pathlib.Path) -> dict[str, str]:
    """{public name of a room: where the room imports it from}."""
    imports = [
        node
        for node in ast.parse(init.read_text()).body
        if isinstance(node, ast.ImportFrom)
    ]
    return {
        alias.name: f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }


def rooms() -> dict[str, dict[str, str]]:
    """{room: its public names}, for the rooms that have any, the facade first."""
    found = {
        ".".join(init.parent.relative_to(ROOT).parts): public_names(init)
        for init in sorted((ROOT / "meshpar").rglob("__init__.py"))
    }
    return {room: names for room, names in sorted(found.items()) if names}


def definition(path: str, names_of: dict[str, dict[str, str]]) -> str:
    """Follows a name from room to room to the file that defines it."""
    room, _, name = path.rpartition(".")
    source = names_of.get(room, {}).get(name, path)
    return path if source == path else definition(source, names_of)


def page(
    room: str, names_of: dict[str, dict[str, str]], page_of: dict[str, str]
) -> str:
    """The Markdown of a room's page.

    Args:
      room: name of the package.
      names_of: {room: its public names}.
      page_of: {definition: room whose page has it}; gets what this page has. A name
        stands whole on one page, and the others link to it.
    """
    links, parts = [], []
    for name, path in names_of[room].items():
        home = definition(path, names_of)
        if home in names_of:
            links.append(f"[`{name}`]({home}.md)")
        elif page_of.setdefault(home, room) != room:
            links.append(f"[`{name}`][{home}]")
        else:
            is_module = ROOT.joinpath(*home.split(".")).with_suffix(".py").exists()
            option = "    options: {show_root_full_path: true}\n" if is_module else ""
            parts.append(f"::: {home}\n{option}")
    init = ROOT.joinpath(*room.split("."), "__init__.py")
    head = [f"# {room}\n", f"{ast.get_docstring(ast.parse(init.read_text()))}\n"]
    if links:
        head.append(f"On other pages: {', '.join(links)}.\n")
    return "\n".join(head + parts)


def on_config(config: MkDocsConfig) -> None:
    """Called by mkdocs; puts the rooms into the navigation."""
    (reference,) = (item["Reference"] for item in config.nav if "Reference" in item)
    (section,) = (item for item in reference if "API" in item)
    section["API"] = [{room: f"api/{room}.md"} for room in rooms()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs with the files of docs/."""
    names_of, page_of = rooms(), {}
    for room in names_of:
        text = page(room, names_of, page_of)
        files.append(File.generated(config, f"api/{room}.md", content=text))
    return files
