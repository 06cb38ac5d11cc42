"""README and docs: their programs run, their links, commands and tables are right."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import tiny_stack
from support.marks import slow

import meshpar
from meshpar import layouts, schedules
from meshpar.planner.compiled import MOST_COMPILED
from meshpar.planner.plans import FROM_PROGRAMS

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def programs(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) < 100


@pytest.mark.parametrize(
    "name",
    [
        *("docs/index.md", "docs/faults.md", "docs/memory.md", "docs/sparse.md"),
        *map(slow, ("docs/models.md", "docs/generation.md")),
        *map(slow, ("docs/experts.md", "docs/long_sequences.md", "docs/proof.md")),
    ],
)
def test_programs_run_as_they_stand(name, monkeypatch, capsys):
    # The devices of this process are simulated already.
    monkeypatch.setattr(meshpar, "simulate", lambda num_devices: None)
    for program in programs(ROOT / name):
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out


def test_the_readme_has_a_program_and_a_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(meshpar, "simulate", lambda num_devices: None)
    program, of_a_run = programs(README)
    scope = {"__name__": "__main__"}
    exec(compile(program, "README.md", "exec"), scope)
    assert "dense/kernel" in capsys.readouterr().out
    exec(compile(of_a_run, "my_run.py", "exec"), scope)
    run, workdir = scope["net"](rate=1e-3), str(tmp_path)
    done = meshpar.train(run, layout="data=2,fsdp=4", steps=2, workdir=workdir)
    assert int(done.state.step) == 2 and done.program.violations() == []


@pytest.mark.parametrize(
    "name",
    [
        *map(slow, ("docs/your_model.md", "docs/layout_steps.md")),
        *map(slow, ("docs/first_pipeline.md", "docs/fine_tuning.md")),
        *("docs/your_run.md", "docs/check.md", "docs/coming_from.md"),
    ],
)
def test_the_programs_of_a_page_run_from_top_to_bottom(
    name, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(meshpar, "simulate", lambda num_devices: None)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for number, program in enumerate(programs(ROOT / name)):
        exec(compile(program, f"program {number}", "exec"), scope)
        assert number == 0 or capsys.readouterr().out


def test_a_loader_and_a_loop_of_ones_own_train_alike(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    script, loop, _ = programs(ROOT / "docs/own_scripts.md")
    scope = {"__name__": "__main__"}
    exec(compile(script, "train.py", "exec"), scope)
    of_run = float(capsys.readouterr().out.splitlines()[-1])
    exec(compile(loop, "train.py", "exec"), scope)
    of_loop, *_ = capsys.readouterr().out.split()
    assert of_run == pytest.approx(float(of_loop), rel=1e-6)


@pytest.mark.slow
def test_a_script_of_ones_own_runs_in_two_processes_of_ray(tmp_path):
    pytest.importorskip("ray", reason='ray is missing: pip install -e ".[islands]"')
    script, _, on_ray = programs(ROOT / "docs/own_scripts.md")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "on_ray.py").write_text(on_ray)
    words = [sys.executable, "on_ray.py", sys.executable, str(tmp_path / "train.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    environment["RAY_worker_niceness"] = "0"  # Else other work would starve it.
    options = dict(capture_output=True, text=True, cwd=tmp_path, env=environment)
    done = subprocess.run(words, **options)
    assert done.returncode == 0, done.stderr
    assert "8 cpu device(s), 2 process(es)" in done.stdout + done.stderr


def test_the_program_of_local_sgd_runs(capsys):
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    dims = {"out_sharding": ("embed", "mlp")}
    scope = {
        **{"meshpar": meshpar, "optax": optax, "inner_optimizer": optax.sgd(0.1)},
        "model": meshpar.from_nnx(
            lambda rngs: nnx.Linear(
                16, 16, use_bias=False, kernel_metadata=dims, rngs=rngs
            ),
            lambda linear, batch: ((linear(batch["x"]) - batch["x"]) ** 2).mean(),
        ),
        "batch": {"x": x},
    }
    (program,) = programs(ROOT / "docs/local_sgd.md")
    exec(program, scope)
    assert "32" in capsys.readouterr().out and np.isfinite(scope["metrics"]["loss"])


def test_the_program_of_islands_runs():
    scope = {"optax": optax, "gradient": np.ones(250, np.float32), "np": np}
    program, halves, own_filter = programs(ROOT / "docs/islands.md")
    exec(program, scope)
    assert scope["read"].version == 0  # The first pull waits for nobody.
    exec(halves, scope)
    (half,), turn = scope["mode"].filters, scope["islands"].Turn("w", "a", 1, None, {})
    assert half.encode((None, np.arange(5)), turn)[1].tolist() == [1, 3]
    exec(own_filter, scope)
    values = scope["own"].pull("own").values
    wanted = np.float32([0.5, 0, 0] * 300 + [1.0] * 100) / -10
    np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6)
    sent = scope["packed"](np.float32([0.5, 0, 2e-4] * 300)).data
    assert len(sent) < 4 * 300


def test_the_program_of_planning_runs(capsys):
    rows = {
        k: np.tile(x, (8, *[1] * (x.ndim - 1))) for k, x in tiny_stack.batch().items()
    }
    optimizer = optax.adam(1e-3)
    scope = {"meshpar": meshpar, "jnp": jnp, "optimizer": optimizer, "batch": rows}
    program, _ = programs(ROOT / "docs/planning.md")
    exec(program, scope | {"model": tiny_stack.model()})
    assert capsys.readouterr().out.count("zero=3") >= 2


@pytest.mark.slow
def test_the_program_of_a_model_without_layers_compiles_its_layouts(
    monkeypatch, capsys
):
    monkeypatch.setattr(meshpar, "simulate", lambda num_devices: None)
    _, program = programs(ROOT / "docs/planning.md")
    exec(program, scope := {"__name__": "__main__"})
    plans = scope["plans"]
    assert f"7 {FROM_PROGRAMS} {plans.layout}" in capsys.readouterr().out
    page = (ROOT / "docs/planning.md").read_text()
    assert f"At most {MOST_COMPILED} layouts are compiled" in " ".join(page.split())


@pytest.mark.slow
def test_the_programs_of_methods_run(capsys):
    batch, optimizer = tiny_stack.batch(), optax.adam(1e-3)
    program = tiny_stack.lower("fsdp=8")
    given = {
        **{"meshpar": meshpar, "jax": jax, "optax": optax, "optimizer": optimizer},
        **{"model": tiny_stack.model(), "batch": batch, "batches": [batch] * 2},
        **{"held_out": batch, "program": program, "state": program.init()},
        **{"mesh": meshpar.mesh.make_mesh(layouts.parse("data=8"), jax.devices())},
        **{"gradient": lambda params, part: params * part, "params": jnp.ones(3)},
        **{"parts": np.ones((8, 3), np.float32), "alive": [0, 1, 2, 4, 5, 7]},
        "samples": {name: np.concatenate([x] * 10) for name, x in batch.items()},
    }
    given["labels"] = np.arange(10 * len(next(iter(batch.values())))) % 10
    *most, _ = programs(ROOT / "docs/methods.md")  # The last one is for a shard_map.
    scope: dict = {}
    for text in most:
        scope |= given
        if "island_trials" in text:  # Every trial compiles a program of its own.
            scope["values"] = {name: x[:3] for name, x in scope["values"].items()}
        exec(text, scope)
    assert len(scope["losses"]) == 3
    layout = str(scope["found"].layout)
    assert layout.startswith("expert=8") and scope["plans"].layout == layouts.parse(
        layout
    )
    assert "paths.^wide/kernel$=none/expert" in layout
    assert np.isfinite(scope["losses"]).all() and capsys.readouterr().out
    np.testing.assert_allclose(scope["gradients"], 8 * np.ones(3), rtol=1e-5)
    np.testing.assert_allclose(scope["means"], np.ones((8, 3)), rtol=1e-5)


def test_pipelines_of_stages_and_a_schedule_of_ones_own_run():
    stages, program = programs(ROOT / "docs/pipelines.md")
    exec(stages, scope := {})
    assert scope["trained"].held == [2, 2, 1]
    exec(program, {})
    try:
        assert schedules.make_schedule("one_at_a_time", 4, 8).num_stages == 4
    finally:
        del schedules.SCHEDULES["one_at_a_time"]


@every_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
        assert not anchor or anchor in map(slug, headings), f"{page.name}: {link}"


@every_page
def test_files_that_are_named_exist(page):
    text = re.sub(r"\]\([^)]*\)", "", page.read_text())
    rooms = (
        r"(?<![\w/.])(?:meshpar|experiments|examples|tests|launch|docs)/[\w./-]*[\w/]"
    )
    missing = [path for path in re.findall(rooms, text) if not (ROOT / path).exists()]
    assert not missing


@every_page
def test_commands_name_modules_and_layouts_that_exist(page):
    text = page.read_text()
    for module in re.findall(r"python -m (experiments[\w.]*)", text):
        assert importlib.util.find_spec(module.rstrip(".")), module
    for layout in re.findall(r'--(?:layout|diff|can_resume)="([^"]+)"', text):
        layouts.parse(layout)
    assert 'install "meshpar[' not in text  # The package is in no registry.


def test_the_pages_of_commands_have_every_flag():
    folders = ROOT / "experiments", ROOT / "meshpar/commands"
    files = [path for folder in folders for path in folder.rglob("*.py")]
    code = "".join(path.read_text() for path in files)
    defined = set(re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', code))
    defined |= set(re.findall(r'"--([a-z0-9_]+)"[,)]', code))  # Of argparse.
    pages = (ROOT / "docs" / name for name in ("commands.md", "studies.md"))
    said = set(re.findall(r"--([a-z0-9_]+)", "".join(p.read_text() for p in pages)))
    assert defined - {"help"} == said - {"help"}


def test_the_page_of_layouts_has_every_item():
    page = (ROOT / "docs/layouts.md").read_text()
    for field in dataclasses.fields(layouts.Layout):
        rules = "axes", "params", "activations", "paths"
        form = "." if field.name in rules else "="
        assert f"`{field.name}{form}" in page, field.name


@every_page
def test_generated_tables_are_up_to_date(page):
    with_tables = runpy.run_path(str(ROOT / "docs/tables.py"))["with_tables"]
    assert page.read_text() == with_tables(page.read_text()), "run docs.tables"


def sentences(text):
    """The sentences of a page, without its programs, tables and addresses."""
    text = re.sub(r"```.*?```|<!--.*?-->|\]\([^)]*\)", "", text, flags=re.DOTALL)
    apart = re.sub(r"^( *\|| {4}).*$", "", text, flags=re.MULTILINE)
    apart = re.sub(r"^(#.*)$", r"\n\1\n", apart, flags=re.MULTILINE)
    apart = re.sub(r"^( *([-*]|\d+\.) )", r"\n\1", apart, flags=re.MULTILINE)
    for paragraph in apart.split("\n\n"):
        yield from re.split(r"(?<=[.!?:;])\s+", paragraph)


_UNIT = r"(?:[kMGT]i?B(?:/s)?|ms|µs|s|tokens/s|TFLOP/s|MFU)(?![\w/=-])"
_NUMBER = r"(?<![\w.])\d(?:[\d,.]*\d)?"
MEASURED = re.compile(rf"{_NUMBER}(?:(?:-| to | and ){_NUMBER})? ?{_UNIT}")
"""A number with the unit of something that was measured."""
_HEAD = re.compile(r"^\|.*\b(?:[kMGT]B|ms|seconds|MFU)\b.*(?=\n\| ?---)", re.MULTILINE)
"""The head of a table with such a unit."""


def pages_of_figures():
    """Names of the pages of the site that may hold figures: those of Measured."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\n  - Measured:\n")
    return set(re.findall(r": ([\w/]+\.md)$", nav, re.MULTILINE))


def measured(text):
    """Numbers with units, without programs, output, and the limits that code has."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    return MEASURED.findall(text) + _HEAD.findall(text)


def test_a_number_with_a_unit_is_found():
    assert measured("It took 0.9 s and 7.4 to 9 GB, at 666 TFLOP/s.") == [
        *("0.9 s", "7.4 to 9 GB", "666 TFLOP/s")
    ]
    head = "| layout | memory, GB |"
    assert measured(f"{head}\n|---|---|\n| `fsdp=8` | 7.43 |") == [head]
    text = "In 8 steps of `64 MB`, A100s with H=1, s=0: [x](a.md#2-ms)"
    assert measured(f"{text}\n| `--mb=N` | seconds to wait |") == []


PAGES_WITHOUT_FIGURES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name not in pages_of_figures()
]


@pytest.mark.parametrize("page", PAGES_WITHOUT_FIGURES, ids=lambda page: page.name)
def test_figures_stand_on_the_pages_of_measured_alone(page):
    """How-tos do not age with figures; a limit of the code stands in backquotes."""
    assert measured(page.read_text()) == [], "move them to a page of Measured"


@every_page
def test_sentences_are_short(page):
    """A reader should not have to begin a sentence again."""
    found = [s for s in sentences(page.read_text()) if len(s.split()) > 35]
    assert found == []
