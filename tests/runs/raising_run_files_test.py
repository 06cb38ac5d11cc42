"""Code of a user that raises: every command names its line, and leaves nothing.

The good file below plants an error at the place that PLANTED names.
"""

import jax
import pytest
from support import bad_input, commands

import meshpar
from meshpar.runs import recipe_file
from meshpar.runs.config import with_settings
from meshpar.runs.trainer import Trainer

FILE = """
import grain, jax, numpy as np, optax
from flax import nnx
import meshpar

PLANTED = ""


def fail_in(place):
    if place == PLANTED:
        raise KeyError("planted")


class Net(nnx.Module):
    def __init__(self, rngs):
        fail_in("model")
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        fail_in("call")
        return x


def loss(model, batch):
    fail_in("loss")
    return (model(batch["x"]) ** 2).mean(), {"rate": metric()}


def metric():
    fail_in("metric")
    return 1.0


def evaluation_loss(model, batch):
    fail_in("evaluation_loss")
    return loss(model, batch)


def init(params):
    fail_in("init")
    return optax.sgd(1e-2).init(params)


def update(grads, state, params=None):
    fail_in("update")
    return optax.sgd(1e-2).update(grads, state, params)


class Rows:
    def __len__(self):
        fail_in("length")
        return 64

    def __getitem__(self, i):
        fail_in("first row" if i == 0 else "row")
        return row(i)


def row(i):
    return {"x": np.full(4, i, np.float32)}


def mapped(i):
    fail_in("mapped row")
    return row(i)


def part(part, number, position):
    fail_in("function")
    return batches(16 // number)


def batches(rows):
    fail_in("first batch")
    yield {"x": np.ones((rows, 4), np.float32)}
    fail_in("second batch")
    yield {"x": np.ones((rows, 4), np.float32)}


def held_out(part, number, position):
    if not position:
        yield {"x": np.ones((16 // number, 4), np.float32)}
    fail_in("held-out batch")


def padded(batch):
    fail_in("padded")
    return batch


def learning_rate(step):
    fail_in("learning_rate")
    return 0 * step


def floor():
    fail_in("baseline")
    return 0.0


def net(batch_size: int = 16, steps: int = 2):
    indexed = grain.MapDataset.source(range(64)).map(mapped)
    forms = {"rows": Rows(), "function": part, "indexed": indexed}
    forms["stream"] = indexed.to_iter_dataset()
    return meshpar.Run(
        model=Net,
        optimizer=optax.GradientTransformation(init, update),
        data=forms["rows"],
        loss=loss,
        evaluation=held_out,
        evaluation_loss=evaluation_loss,
        layers="layers",
        padded=padded,
        learning_rate=learning_rate,
        baseline=("floor", floor),
    )
"""

LAYOUT = ["--layout=data=2", "--devices=2"]
EVERY = {
    "run": LAYOUT,
    "verify": [*LAYOUT, "--verify_steps=2", "--padded"],
    "verify --random=1": ["--devices=2", "--verify_steps=2"],
    "explain": LAYOUT,
    "plan": ["--devices=2"],
    "scaling": ["--topologies=v5e:2x2"],
    "checkpoint": ["--can_resume=data=2"],
    "score": LAYOUT,
}
"""{command that runs code of a recipe: its words}."""

VERIFY = ("verify", "verify --random=1")
CASES = [
    *((place, "rows", EVERY) for place in ("model", "call", "loss", "metric")),
    *((place, "rows", EVERY) for place in ("evaluation_loss", "init", "update")),
    *((place, "rows", EVERY) for place in ("learning_rate", "length", "first row")),
    ("row", "rows", ("run", *VERIFY)),
    ("mapped row", "indexed", EVERY),
    ("mapped row", "stream", EVERY),
    ("function", "function", EVERY),
    ("first batch", "function", EVERY),
    ("second batch", "function", VERIFY),
    ("held-out batch", "rows", ("run", "score")),
    ("padded", "rows", ("verify",)),
    ("baseline", "rows", ("run",)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint of the good file with each form of data."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = _file_of(folder, "", "rows")
    config = with_settings(recipe_file.config_of(recipe), [f"workdir={folder}/w"])
    assert Trainer(config, meshpar.Layout(), jax.devices()[:1]).run() == 0
    return folder


def _file_of(folder, place, form):
    """The recipe of a file that raises at a place, with data of a form."""
    file = folder / "my_run.py"
    text = FILE.replace('PLANTED = ""', f'PLANTED = "{place}"')
    file.write_text(text.replace('forms["rows"]', f'forms["{form}"]'))
    return f"{file}:net"


@pytest.mark.parametrize("place, form, names", CASES, ids=lambda x: str(x)[:16])
def test_an_error_of_the_users_code_is_a_line_in_every_command(
    place, form, names, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    recipe = _file_of(folder, place, form)
    for name in names:
        command, *more = name.split()
        if command in ("checkpoint", "score"):
            more = [str(folder / "w")]
        words = [*more, *EVERY[name], f"--recipe={recipe}"]
        done = commands.run(command, words, monkeypatch, capsys)
        bad_input.check_refused(done, r"KeyError: 'planted'.*my_run.py:\d+\)", 600)
    assert not list(tmp_path.iterdir())
