"""Reads the structure of a package from its sources: imports, sizes and literals.

Every check returns problems as strings, one per line that someone has to change.
"""

import ast
import dataclasses
import functools
import io
import pathlib
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence

LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
"""Tokens that are no code."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One file of a package.

    Attributes:
      name: dotted module name; a package's `__init__.py` has the package's name.
      path: path below the folder that holds the package.
      text: its source code.
    """

    name: str
    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def docstrings(self) -> set[int]:
        """The ids of string nodes that stand as statements."""
        return {
            id(node.value)
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }

    @functools.cached_property
    def imported(self) -> list[tuple[str, str]]:
        """(module, name from it, or "") of everything that is imported anywhere."""
        pairs = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                pairs += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    is_package = self.path.endswith("__init__.py")
                    parents = self.name.split(".")
                    kept = len(parents) + is_package - node.level
                    base = ".".join([*parents[:kept], *filter(None, [base])])
                pairs += [(base, alias.name) for alias in node.names]
        return pairs

    @functools.cached_property
    def room(self) -> str:
        """First name below the package: a sub-package, or a module beside them."""
        return ".".join(self.name.split(".")[1:2])

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())


def read_package(folder: pathlib.Path) -> dict[str, Source]:
    """Returns {module name: source} of all files below a package's folder."""
    sources = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder.parent)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = Source(name, str(relative), path.read_text())
    return sources


def imports(source: Source, names: Collection[str]) -> set[str]:
    """Returns the modules among `names` that a file imports, anywhere in it."""
    modules = set()
    for base, name in source.imported:
        module = f"{base}.{name}"
        modules.add(module if name and module in names else base)
    return {module for module in modules & set(names) if module != source.name}


def import_graph(sources: Mapping[str, Source]) -> dict[str, set[str]]:
    """Returns {module: modules of the package that it imports}."""
    return {name: imports(source, sources) for name, source in sources.items()}


def room_graph(sources: Mapping[str, Source]) -> dict[str, set[str]]:
    """Returns {room: other rooms that its files import}, without the facade."""
    rooms: dict[str, set[str]] = {}
    for name, imported in import_graph(sources).items():
        room = sources[name].room
        if room:
            targets = {sources[module].room for module in imported}
            rooms.setdefault(room, set()).update(targets - {room, ""})
    return rooms


def longest_chain(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the longest chain of imports, importer first; the graph has no circle."""

    @functools.cache
    def chain_from(node: str) -> tuple[str, ...]:
        below = (chain_from(target) for target in sorted(graph[node]))
        return node, *max(below, key=len, default=())

    return list(max(map(chain_from, sorted(graph)), key=len, default=()))


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Returns groups of nodes that import each other, directly or through others."""
    reachable = {node: set(targets) for node, targets in graph.items()}
    for middle in graph:
        for node in graph:
            if middle in reachable[node]:
                reachable[node] |= reachable[middle]
    groups = {
        tuple(sorted(other for other in reachable[node] if node in reachable[other]))
        for node in graph
        if node in reachable[node]
    }
    return sorted(map(list, groups))


def upward_imports(
    sources: Mapping[str, Source],
    order: Sequence[str],
    aside: Mapping[str, set[str]],
) -> list[str]:
    """Finds imports from a higher room, from the facade, and rooms nobody placed.

    Args:
      sources: files of the package.
      order: rooms from bottom to top.
      aside: {room: the only rooms it may import}, for rooms outside the order.
    """
    allowed = {room: set(order[:floor]) for floor, room in enumerate(order)} | aside
    problems = []
    for name, imported in import_graph(sources).items():
        source = sources[name]
        if not source.room:
            continue
        if source.room not in allowed:
            problems.append(f"{source.path}: room {source.room!r} has no place")
            continue
        for module in sorted(imported):
            room = sources[module].room
            lower = allowed[source.room] | {source.room}
            if source.room not in aside:
                lower |= set(aside)
            if room not in lower:
                problems.append(f"{source.path} imports {module}")
    return problems


def literals(
    sources: Mapping[str, Source], words: Collection[str], homes: Sequence[str]
) -> list[str]:
    """Finds strings equal to one of `words` outside the modules or rooms `homes`."""
    problems = []
    for name, source in sources.items():
        if any(name == home or name.startswith(home + ".") for home in homes):
            continue
        prose = source.docstrings
        problems += [
            f"{source.path}:{node.lineno}: {node.value!r}"
            for node in source.nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in words
            and id(node) not in prose
        ]
    return problems


def code_lines(source: Source) -> set[int]:
    """Returns numbers of lines with code: no docstring, comment or blank line."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in LAYOUT_TOKENS:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in source.nodes:
        if isinstance(node, ast.Expr) and id(node.value) in source.docstrings:
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def long_functions(sources: Mapping[str, Source], limit: int) -> list[str]:
    """Finds functions of more than `limit` lines of code."""
    problems = []
    for source in sources.values():
        lines = code_lines(source)
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = len(lines & set(range(node.lineno, node.end_lineno + 1)))
                if size > limit:
                    problems.append(f"{source.path}: {node.name} has {size}")
    return problems


def long_files(sources: Mapping[str, Source], limit: int) -> list[str]:
    """Finds files of more than `limit` lines."""
    return [
        f"{source.path} has {source.num_lines}"
        for source in sources.values()
        if source.num_lines > limit
    ]


def own_lines(sources: Mapping[str, Source]) -> Iterator[int]:
    """Yields the number of lines of every file that is no `__init__.py`."""
    for source in sources.values():
        if not source.path.endswith("__init__.py"):
            yield source.num_lines
