"""The rooms of the package: who imports whom, how long things are, where names live."""

import ast
import pathlib
import re
import statistics

import pytest
from support import structure

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = structure.read_package(ROOT / "meshpar")
EXPERIMENTS = structure.read_package(ROOT / "experiments")

ROOMS = (
    *(
        "arrays",
        "errors",
        "once",
        "compat",
        "settings",
        "units",
        "html_page",
        "replicated",
        "jaxprs",
        "metrics",
        "schedules",
        "layouts",
        "contracts",
        "mesh",
    ),
    *("collectives", "rows", "models", "ops", "fsdp", "lowering", "pipeline"),
    *("local_sgd", "islands", "generation", "compose", "explain", "checker"),
    *("testing", "planner", "checkpoint", "methods", "runs", "commands"),
)
"""Bottom to top: a room imports rooms to its left."""

ASIDE = {"multihost": {"errors", "compat"}}
"""Rooms beside the tower, and all that they may import; every room may import them."""

AXES = {"replica", "pipe", "data", "fsdp", "expert", "context", "tensor"}
PLATFORMS = {"cpu", "tpu", "gpu", "cuda"}

MAX_FLOORS = 12
MAX_LINES = 449
MAX_MEDIAN_LINES = 149
MAX_FUNCTION_LINES = 59


def test_rooms_import_only_rooms_below_them():
    problems = structure.upward_imports(LIBRARY, ROOMS, ASIDE)
    assert problems == []


def test_floors_are_few():
    chain = structure.longest_chain(structure.room_graph(LIBRARY))
    assert len(chain) <= MAX_FLOORS, " > ".join(chain)


@pytest.mark.parametrize("package", [LIBRARY, EXPERIMENTS], ids=["library", "runs"])
def test_no_files_import_each_other_in_a_circle(package):
    assert structure.circles(structure.import_graph(package)) == []


def test_methods_of_papers_know_nothing_of_each_other():
    def paper(module):
        rooms = module.split(".")[1:]
        return rooms[1] if rooms[:1] == ["methods"] and len(rooms) > 1 else None

    graph = structure.import_graph(LIBRARY)
    assert sum(paper(module) is not None for module in graph) > 15
    others = [
        (module, used)
        for module, imported in graph.items()
        for used in imported
        if paper(used) and paper(used) != paper(module) and module != "meshpar"
    ]
    assert others == []


def test_files_and_functions_are_short():
    files = LIBRARY | EXPERIMENTS
    assert structure.long_files(files, MAX_LINES) == []
    assert structure.long_functions(files, MAX_FUNCTION_LINES) == []
    assert statistics.median(structure.own_lines(LIBRARY)) <= MAX_MEDIAN_LINES


def test_names_of_axes_and_platforms_have_one_home():
    runs = {
        name: x
        for name, x in LIBRARY.items()
        if name.startswith(("meshpar.runs", "meshpar.commands"))
    }
    assert len(runs) > 15
    rest = {name: x for name, x in LIBRARY.items() if name not in runs}
    assert structure.literals(rest, AXES, ["meshpar.layouts.axes"]) == []
    # What a run reads is its data, and a row of a report is a tensor.
    assert structure.literals(runs, AXES - {"data", "tensor"}, []) == []
    assert structure.literals(LIBRARY, PLATFORMS, ["meshpar.mesh"]) == []


# Each check finds what it is for.


@pytest.fixture
def package(tmp_path):
    """Writes files {path: text} of a package `toy` and reads them."""

    def write(files):
        for path, text in files.items():
            target = tmp_path / "toy" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return structure.read_package(tmp_path / "toy")

    return write


IMPORTS_OF_HIGH = {
    "plain": "import toy.high.roof\n",
    "from a room": "from toy.high import roof\n",
    "from a module": "from toy.high.roof import TILE\n",
    "relative": "from ..high import roof\n",
    "in a function": "def f():\n    from toy.high import roof\n",
    "for types": "if TYPE_CHECKING:\n    from toy.high import roof\n",
}


@pytest.mark.parametrize("text", IMPORTS_OF_HIGH.values(), ids=IMPORTS_OF_HIGH)
def test_an_import_from_a_higher_room_is_found(package, text):
    files = package({"low/floor.py": text, "high/roof.py": "TILE = 1\n"})
    (problem,) = structure.upward_imports(files, ["low", "high"], {})
    assert problem == "toy/low/floor.py imports toy.high.roof"
    assert structure.upward_imports(files, ["high", "low"], {}) == []


def test_an_import_of_the_facade_and_a_room_without_a_place_are_found(package):
    files = package(
        {
            "__init__.py": "from toy.low.floor import x\n",
            "low/floor.py": "import toy\n",
            "odd.py": "",
        }
    )
    assert structure.upward_imports(files, ["low"], {}) == [
        "toy/low/floor.py imports toy",
        "toy/odd.py: room 'odd' has no place",
    ]


def test_a_room_aside_imports_only_what_it_may(package):
    files = package({"base.py": "", "low.py": "", "aside.py": "from toy import low\n"})
    order, aside = ["base", "low"], {"aside": {"base"}}
    assert structure.upward_imports(files, order, aside) == [
        "toy/aside.py imports toy.low"
    ]


def test_floors_are_counted_along_the_longest_chain(package):
    files = package(
        {
            "a.py": "from toy import b, d\n",
            "b/x.py": "from toy.b import y\n",
            "b/y.py": "from toy.c.z import w\n",
            "c/z.py": "from toy import d\n",
            "d.py": "",
            "b/__init__.py": "",
        }
    )
    graph = structure.room_graph(files)
    assert structure.longest_chain(graph) == ["a", "b", "c", "d"]
    del files["toy.b.y"]
    assert len(structure.longest_chain(structure.room_graph(files))) == 2


def test_a_circle_is_found_through_a_third_file_and_through_types(package):
    files = package(
        {
            "a.py": "from toy import b\n",
            "b.py": "def f():\n    import toy.c\n",
            "c.py": "if TYPE_CHECKING:\n    from toy.a import X\n",
            "d.py": "from toy import a\n",
        }
    )
    graph = structure.import_graph(files)
    assert structure.circles(graph) == [["toy.a", "toy.b", "toy.c"]]


def test_literals_are_found_outside_docstrings_and_their_home(package):
    text = '"""data"""\nx = "data"\ny = f"data={x}"\ndef f(data):\n    "data"\n'
    files = package({"a.py": text, "home.py": text})
    assert structure.literals(files, {"data"}, ["toy.home"]) == ["toy/a.py:2: 'data'"]


def test_long_files_and_functions_are_found(package):
    body = '    """Two\n    lines."""\n    # A comment.\n\n    x = """1\n    2"""\n'
    files = package({"a.py": f"def f():\n{body}    return x\n"})
    assert structure.long_functions(files, 4) == []
    assert structure.long_functions(files, 3) == ["toy/a.py: f has 4"]
    assert structure.long_files(files, 8) == []
    assert structure.long_files(files, 7) == ["toy/a.py has 8"]


def test_the_first_line_of_a_docstring_stands_alone():
    """It says what a thing is or does, and does not lean on another docstring."""
    leaning = re.compile(r"(What|Those|The same|As `|Likewise)")
    found = []
    for path in [
        *(ROOT / "meshpar").rglob("*.py"),
        *(ROOT / "experiments").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            said = ast.get_docstring(node) if isinstance(node, kinds) else None
            if said and leaning.match(said):
                found.append(f"{path.relative_to(ROOT)}: {said.splitlines()[0]}")
    assert found == []
