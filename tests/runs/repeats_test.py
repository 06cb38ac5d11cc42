"""A run's file that reads a clock or random numbers: errors that name what differs.

The file below reads a clock at the place that CHANGES names. It is a clock that never
shows the same twice: the number in a file of ticks.
"""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow

import meshpar
from meshpar.errors import ConfigError
from meshpar.runs import recipe_file, setup
from meshpar.runs.config import with_settings
from meshpar.runs.start import Consent
from meshpar.runs.trainer import Trainer

FILE = """
import pathlib

import jax.numpy as jnp, numpy as np, optax
from flax import nnx

import meshpar

CHANGES = "nothing"
TICKS = pathlib.Path(__file__).with_suffix(".ticks")


def tick():
    number = int(TICKS.read_text()) + 1 if TICKS.exists() else 1
    TICKS.write_text(str(number))
    return number


START = tick()


def clock(place, otherwise):
    return tick() + 1 if CHANGES == place else otherwise


def of_start(place, otherwise):
    return START + 1 if CHANGES == place else otherwise


class Rows:
    def __len__(self):
        return 32

    def __getitem__(self, i):
        x = np.full(4, i, np.float32)
        return {"x": x + np.float32(clock("a sample", 0)) * (i > 0)}


def parts(part, number, position):
    while True:
        yield {"x": np.full((8 // number, 4), clock("a batch", 1), np.float32)}


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean() * of_start("the loss", 1.0)


def net(batch_size: int = 8, steps: int = 1):
    x = np.full((32, 4), clock("an array", of_start("the file", 1)), np.float32)
    width = 4 + int(clock("the model", 0))
    data = {"a sample": Rows(), "a batch": parts}.get(CHANGES, {"x": x})
    rate = clock("the rate", 0.1)
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(int(1000 * clock("the weights", 1))))
    return meshpar.Run(
        model if CHANGES == "the weights" else lambda r: nnx.Linear(4, width, rngs=r),
        optax.sgd(0.1),
        data,
        loss,
        evaluation={"x": x * clock("the evaluation", 1)},
        learning_rate=lambda step: rate + 0 * step,
        clip_norm=clock("the norm", 1.0),
        identity={"tag": str(clock("a value", "a"))},
    )
"""


def trainer(tmp_path, changes, allowed=False):
    file = tmp_path / "my_run.py"
    file.write_text(FILE.replace('"nothing"', f'"{changes}"'))
    config = recipe_file.config_of(f"{file}:net")
    config = with_settings(config, [f"workdir={tmp_path / 'w'}"])
    layout = meshpar.Layout()
    return Trainer(config, layout, jax.devices()[:1], consent=Consent(changes=allowed))


@pytest.mark.parametrize(
    "changes, named",
    [
        ("an array", "data: "),
        ("a sample", "data: "),
        ("a batch", "data: "),
        ("the evaluation", "evaluation: "),
        ("the model", r"parameter (bias|kernel): float32\[.*then float32\["),
        ("the weights", "given weight kernel: "),
        ("the rate", "learning_rate: "),
        ("the norm", "clip_norm: "),
        ("a value", "identity: "),
    ],
)
def test_a_file_that_gives_something_else_each_time_is_refused(
    changes, named, tmp_path
):
    with pytest.raises(ConfigError, match=f"same settings: {named}") as caught:
        trainer(tmp_path, changes)
    assert "It reads a clock, random numbers without a seed" in str(caught.value)
    assert not (tmp_path / "w").exists()


def test_samples_that_are_drawn_anew_are_found_without_a_file(tmp_path):
    class Rows:
        def __len__(self):
            return 32

        def __getitem__(self, i):
            return {"x": np.random.default_rng().normal(size=4).astype(np.float32)}

    def model(rngs):
        return nnx.Linear(4, 4, rngs=rngs)

    def loss(model, batch):
        return (model(batch["x"]) ** 2).mean()

    run = meshpar.Run(model, optax.sgd(0.1), Rows(), loss)
    with pytest.raises(ConfigError, match="same settings: data: "):
        meshpar.train(run, steps=1, batch_size=8, workdir=tmp_path / "w")


def test_a_slow_function_is_called_once(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "_QUICK_S", 0.0)
    assert trainer(tmp_path, "an array").run() == 0


def test_a_file_that_reads_a_clock_when_it_is_imported_is_found_when_it_goes_on(
    tmp_path, capsys
):
    assert trainer(tmp_path, "the file").run() == 0
    with pytest.raises(ConfigError, match="same files with the same settings now give"):
        trainer(tmp_path, "the file").run()
    assert trainer(tmp_path, "the file", allowed=True).run() == 0
    assert "the run trains in another way:\n  data: " in capsys.readouterr().out


@pytest.mark.parametrize("changes", ["the loss", slow("nothing")])
def test_another_step_of_the_same_file_is_a_warning(changes, tmp_path, capsys):
    assert trainer(tmp_path, changes).run() == 0
    assert trainer(tmp_path, changes).run() == 0
    said = capsys.readouterr().out
    assert ("WARNING: the step is another program" in said) == (changes == "the loss")
