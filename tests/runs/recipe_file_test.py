"""Recipes of your own: their arguments are settings; bad files are clear errors."""

import dataclasses
import os
import re
import sys
import textwrap

import jax
import pytest

import meshpar
from experiments import recipes
from meshpar.errors import ConfigError
from meshpar.runs import recipe_file
from meshpar.runs.catalog import FILES_ALONE
from meshpar.runs.changes import changed_files
from meshpar.runs.config import settings_of, with_settings
from meshpar.runs.trainer import Trainer

GOOD = """
import dataclasses, typing
import numpy as np, optax
from flax import nnx
import meshpar

@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 8
    bias: bool = True

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()

def net(sizes: Sizes = Sizes(), rate=0.1, kind: typing.Literal["sgd", "adam"] = "sgd",
        batch_size: int = 4, steps: int = 7):
    \"\"\"A model.

    Args:
      rate: learning rate.
    \"\"\"
    make = lambda rngs: nnx.Linear(8, sizes.width, use_bias=sizes.bias, rngs=rngs)
    optimizer = getattr(optax, kind)(optax.linear_schedule(rate, 0, steps))
    data = {"x": np.ones((10 * batch_size, 8), np.float32)}
    return meshpar.Run(make, optimizer, data, loss)
"""


def written(tmp_path, text, name="own.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def test_arguments_are_settings_and_those_of_every_run_get_its_values(tmp_path):
    config = recipes.get(f"{written(tmp_path, GOOD)}:net")
    assert (config.batch_size, config.steps, config.sizes.width) == (4, 7, 8)
    settings = settings_of(type(config))
    assert settings["rate"].help == "learning rate."
    assert settings["steps"].default == 7
    changed = ["sizes.width=3", "sizes.bias=false", "kind=adam", "batch_size=2"]
    config, run = with_settings(config, changed).prepared()
    shapes = {path: param.shape for path, param in run.model.params.items()}
    assert shapes == {"kernel": (8, 3)}
    assert run.data.abstract_batch(2)["x"].shape == (2, 8)
    assert "20 samples" == run.data.name


def test_a_stored_configuration_is_read_back_with_the_file_as_it_is_now(tmp_path):
    path = written(tmp_path, GOOD)
    recipe = f"{path}:net"
    config = with_settings(recipes.get(recipe), ["sizes.width=3", "rate=0.5"])
    assert recipes.stored(dataclasses.asdict(config), recipe) == config
    path.write_text(GOOD.replace("rate=0.1", "speed=0.1"))
    with pytest.raises(ConfigError, match="'rate', which this version does not know"):
        recipes.stored(dataclasses.asdict(config), recipe)


@pytest.mark.parametrize("named", ["", "other.py:net"])
def test_the_code_of_a_recipe_that_a_checkpoint_names_is_not_run(tmp_path, named):
    path = written(tmp_path, "import pathlib\npathlib.Path(__file__ + '.ran').touch()")
    values = {"recipe": f"{path}:net"}
    for known in (recipes.CATALOG, FILES_ALONE):
        with pytest.raises(ConfigError, match="whose code this command would run"):
            known.stored(values, named)
    assert not list(tmp_path.glob("*.ran"))


def test_a_module_on_the_path_and_a_file_give_the_same_run(tmp_path, monkeypatch):
    written(tmp_path, GOOD, "own_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    by_name = recipes.get("own_module:net")
    by_file = recipes.get(f"{tmp_path}/own_module.py:net")
    assert by_name.code == by_file.code != ""
    assert dataclasses.replace(by_name, recipe="") == dataclasses.replace(
        by_name, recipe=""
    )


def test_the_code_of_a_recipe_is_all_that_it_imports_from_beside_it(
    tmp_path, capfd, monkeypatch
):
    folder, installed = tmp_path / "beside", tmp_path / "beside/lib/site-packages"
    installed.mkdir(parents=True)
    monkeypatch.syspath_prepend(installed)
    written(installed, "TWO = 2\n", "beside_installed.py")
    written(folder, "from beside_installed import TWO\n", "beside_sizes.py")
    written(folder, "RATE = 0.1\n", "beside_rates.py")  # The function imports it.
    text = GOOD.replace("import dataclasses", "import beside_sizes, dataclasses")
    text = text.replace("    make =", "    import beside_rates\n    make =", 1)
    own = written(folder, text)

    def train(steps):
        settings = [f"steps={steps}", f"workdir={tmp_path / 'run'}"]
        config = with_settings(recipes.get(f"{own}:net"), settings)
        Trainer(config, meshpar.Layout(), jax.devices()[:1]).run()
        return config.code, capfd.readouterr().out

    code, said = train(1)
    assert list(code) == ["own.py", "beside_rates.py", "beside_sizes.py"]
    assert "has changed" not in train(2)[1]
    written(folder, "TWO = 3\n", "beside_sizes.py")
    for name in ("beside_sizes", "beside_rates"):  # As in a new process.
        del sys.modules[name]
    os.utime(own, (1, 1))
    now, said = train(3)
    assert re.search(r"the code has changed since step 2: beside_sizes.py$", said, re.M)
    assert changed_files(code["own.py"], now) == []  # As earlier versions kept it.
    assert changed_files("other", now) == ["own.py"]
    assert changed_files({"own.py": "", "a.py": ""}, {"own.py": "", "b.py": ""}) == [
        *("b.py is new", "a.py is gone")
    ]


@pytest.mark.parametrize(
    "setting, words",
    [
        ("sizes.widht=3", "did you mean 'width'"),
        ("rate=fast", "rate=fast: use a number"),
        ("kind=adan", "did you mean 'adam'"),
        ("sizes=3", "set one of sizes.width, sizes.bias"),
        ("sizes.bias=1", "use true or false"),
        ("steps=0", "steps=0: use a whole number of steps, at least 1"),
    ],
)
def test_bad_settings_name_the_remedy(tmp_path, setting, words):
    config = recipes.get(f"{written(tmp_path, GOOD)}:net")
    with pytest.raises(ConfigError, match=words):
        with_settings(config, [setting])


BODY = "import meshpar, optax, numpy as np\nfrom flax import nnx\n"


@pytest.mark.parametrize(
    "text, words",
    [
        ("def net(:\n", r"SyntaxError.*own.py:1\)"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError.*own.py:1"),
        ("1 / 0\n", "ZeroDivisionError.*own.py:1"),
        ("net = 3\n", "no function 'net'.*it has none"),
        ("def nett(): pass\n", "no function 'net'.*did you mean 'nett'"),
        ("def net(width): pass\n", "width: it has no default.*--set=width=VALUE"),
        ("def net(*sizes): pass\n", "settings are given by name"),
        ("def net(**sizes): pass\n", "settings are given by name"),
        ("def net(width=None): pass\n", "argument width: a setting of type NoneType"),
        ("def net(code=1): pass\n", "argument code: the name has a meaning.*rename"),
        ("def net(prepared=1): pass\n", "argument prepared: the name has a meaning"),
        ("def net(width: 'Wide' = 1): pass\n", "name 'Wide' is not defined; import it"),
        ("def net(sizes=(1, 2)): pass\n", "argument sizes: a setting of type tuple"),
        ("def net(): pass\n", "returned a NoneType; return a meshpar.Run"),
        ("def net(width=3): return 1 / (width - 3)\n", "ZeroDivisionError.*own.py:1"),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Sizes:\n"
            "    width: int = 3\ndef net(sizes=Sizes()): pass\n",
            "dataclasses must be frozen",
        ),
        (
            f"{BODY}def net(): return meshpar.Run(3, optax.sgd(0.1), [1], len)\n",
            r"Run\(model=3\): give a model from from_nnx",
        ),
        (
            f"{BODY}def net(): return meshpar.Run(nnx.Rngs, optax.sgd(0.1), [1])\n",
            "without loss; add loss=",
        ),
        (
            f"{BODY}import flax.linen as nn\n"
            "def net(): return meshpar.Run(nn.Dense(3), optax.sgd(0.1), [1], len)\n",
            "give a model from from_nnx or from_linen",
        ),
    ],
)
def test_bad_files_are_clear_errors(tmp_path, text, words):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        recipes.get(f"{path}:net").prepared()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "data, words",
    [
        ("3", "data=3: give {name: array}"),
        ("[]", "hold no sample"),
        ("{'x': np.ones(3), 'y': np.ones(4)}", "same number of rows"),
        ("{'x': 3.0}", "same number of rows"),
    ],
)
def test_bad_data_are_clear_errors(tmp_path, data, words):
    text = GOOD.replace(
        'data = {"x": np.ones((10 * batch_size, 8), np.float32)}', f"data = {data}"
    )
    with pytest.raises(recipe_file.MeshparError, match=words):
        recipes.get(f"{written(tmp_path, text)}:net").prepared()


@pytest.mark.parametrize(
    "recipe, words",
    [
        ("missing.py:net", "there is no file missing.py in"),
        ("no_such_module:net", "the module no_such_module cannot be imported"),
        ("tinny", "did you mean 'tiny'.*FILE.py:FUNCTION"),
    ],
)
def test_recipes_that_are_not_there_name_the_remedy(recipe, words):
    with pytest.raises(ConfigError, match=words):
        recipes.get(recipe)
