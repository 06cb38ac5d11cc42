"""Bad run files: an error of one line with the value and a remedy, before any work.

Each case changes a good file in one place. Nothing is compiled and nothing written.
"""

import pytest
from support import bad_input, commands
from support.marks import slow

FILE = """
import dataclasses, itertools, typing
import flax.linen as nn, grain, jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import meshpar


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)[:, 0]


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


x, y = np.ones((64, 8), np.float32), np.ones(64, np.float32)
rows = [{"x": x[i], "y": y[i]} for i in range(64)]


def parts(part, number, position):
    yield {"x": x[: 16 // number], "y": y[: 16 // number]}


def net(batch_size: int = 16, steps: int = 2):
    return meshpar.Run(
        model=Net,
        optimizer=optax.sgd(1e-2),
        data={"x": x, "y": y},
        loss=loss,
        evaluation={"x": x, "y": y},
        layers="layers",
    )
"""
HEAD, MODEL = "def net(batch_size: int = 16, steps: int = 2):", "model=Net"
OPTIMIZER, LOSS = "optax.sgd(1e-2)", "loss=loss"
DATA, EVALUATION = 'data={"x": x, "y": y}', 'evaluation={"x": x, "y": y}'
LAYERS, BODY, LAST = 'layers="layers"', "    return meshpar.Run(", 'layers="layers",'
RETURNED = FILE[FILE.index("    return meshpar.Run(") :]
MEAN = 'return ((model(batch["x"]) - batch["y"]) ** 2).mean()'


def of_net(body):
    """A change of the body of the model's function of rngs."""
    return MODEL, f"model={body}"


def more(field):
    """One more field of the Run."""
    return LAST, f"{LAST}\n        {field},"


def argument(text):
    """One more argument of the function."""
    return HEAD, HEAD.replace("batch_size: int = 16", f"batch_size: int = 16, {text}")


CASES = [
    # The file.
    (FILE, "", "no function 'net' .it has none; write one"),
    (FILE, "\0", "SyntaxError: source code.*null bytes; mend it|null bytes"),
    (HEAD, "def net(:", r"SyntaxError.*my_run.py:\d+.; mend it"),
    (HEAD, "1 / 0\n" + HEAD, "ZeroDivisionError"),
    (
        HEAD,
        "import nothing_of_this_name\n" + HEAD,
        "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    ),
    (HEAD, "raise SystemExit(3)\n" + HEAD, r"SystemExit: 3 .*my_run.py:\d+.; mend it"),
    (HEAD, HEAD.replace("net", "nett"), "did you mean 'nett'"),
    (FILE, FILE + "\nnet = net()\n", "no function 'net'"),
    (FILE, FILE + "\nnet = Net\n", "no function 'net'"),
    # The arguments of the function.
    (*argument("width"), "SyntaxError: .*default"),
    (*argument("width=None"), "argument width: a setting of type NoneType: use bool"),
    (*argument("sizes=[1, 2]"), "argument sizes: a setting of type list: use"),
    (*argument("width: int = 2.5"), "its defaults: width=2.5: use a whole number"),
    (*argument("width: int = 'wide'"), "width='wide': use a whole number"),
    (*argument("rate: float = float('nan')"), "rate=nan: use a number"),
    (*argument("rate: float = 'fast'"), "rate='fast': use a number"),
    (*argument("kind: typing.Literal['a', 'b'] = 'c'"), "kind='c': use a or b"),
    (*argument("bias: bool = 1"), "bias=1: use true or false"),
    (*argument("text='x' * 20_000"), "20,002 characters.: use at most 10,000"),
    (HEAD, HEAD.replace("= 16", "= 0"), "its defaults: batch_size=0: use"),
    (HEAD, HEAD.replace("= 16", "= 'many'"), "batch_size='many': use"),
    (HEAD, HEAD.replace("= 2", "= -2"), "steps=-2: use"),
    # What the function returns.
    (RETURNED, "    return None\n", "returned a NoneType; return a meshpar.Run"),
    (RETURNED, "    return Net\n", "returned a ModuleMeta; return a meshpar.Run"),
    (RETURNED, "    return meshpar.Run\n", "returned a type; return a meshpar.Run"),
    (BODY, "    yield meshpar.Run(", "returned a generator; return a meshpar.Run"),
    (*more("modle=Net"), "keyword argument 'modle'"),
    (
        BODY,
        "    raise KeyError('width')\n" + BODY,
        r"raised KeyError: 'width' .*my_run.py:\d+.; mend it",
    ),
    (BODY, "    raise SystemExit(3)\n" + BODY, "raised SystemExit: 3"),
    # The model.
    (*of_net("3"), r"Run\(model=3\): give a model"),
    (*of_net("'Net'"), r"Run\(model='Net'\): give"),
    (*of_net("None"), r"Run\(model=None\): give"),
    (*of_net("nn.Dense(3)"), r"Run\(model=Dense\(.*give a model from from_nnx or"),
    (
        *of_net("lambda: Net(nnx.Rngs(0))"),
        "model=.*lambda.*too many positional arguments; give a function of nnx.Rngs",
    ),
    (
        *of_net("lambda width, rngs: Net(rngs)"),
        "missing a required argument: 'rngs'; give a function of nnx.Rngs",
    ),
    (
        *of_net("lambda rngs: None"),
        "builds the model returned a NoneType; return an nnx.Module",
    ),
    (*of_net("lambda rngs: x"), "returned a ndarray; return an nnx.Module"),
    (*of_net("lambda rngs: 1 / 0"), r"ZeroDivisionError.*my_run.py:\d+"),
    (
        *of_net("lambda rngs: nnx.Linear(7, 1, rngs=rngs)"),
        "Linear has no attribute 'layers'; its modules are none; name one",
    ),
    (*of_net("meshpar.from_nnx(Net, loss)"), r"Run\(loss=...\) beside a Model"),
    (
        *of_net("lambda rngs: nnx.Dropout(0.5, rngs=rngs)"),
        "Dropout has no attribute 'layers'",
    ),
    (*of_net("jax.jit"), "returned a .*; return an nnx.Module"),
    (LAYERS, 'layers="layerz"', "'layerz'; its modules are first, last, layers; name"),
    (LAYERS, 'layers="first"', "layers='first' is a Linear; name an nnx.List"),
    (LAYERS, "layers=3", r"Run\(layers=3\): give the name"),
    # The loss.
    (LOSS, "loss=None", "without loss; add loss="),
    (LOSS, "loss=3", r"Run\(loss=3\): give a function"),
    (
        LOSS,
        "loss=lambda model: 0.0",
        "loss=.*too many positional arguments; give a function of .module, batch.",
    ),
    (
        MEAN,
        'return model(batch["x"]) - batch["y"]',
        r"a loss of shape \(16,\); return a scalar",
    ),
    (MEAN, "return None", "returned a NoneType; return a real scalar"),
    (MEAN, 'return "low"', "returned a str; return a real scalar"),
    (
        MEAN,
        'return model(batch["z"]).mean()',
        r"raised KeyError: 'z' .*my_run.py:\d+.; mend it",
    ),
    (
        MEAN,
        'return model(batch["x"]).mean(), 3',
        "tuple of .*return a loss, or .loss, aux.",
    ),
    (
        MEAN,
        'return model(batch["x"]).mean(), {"accuracy": "good"}',
        r"aux\['accuracy'\] is a str; give a real number",
    ),
    (
        MEAN,
        'return model(batch["x"]).mean(), {3: 1.0}',
        r"aux\[3\]: give every metric a text",
    ),
    (
        MEAN,
        'return model(batch["x"]).sum().astype(int)',
        "conversion to integers.*return meshpar.metrics.Mean",
    ),
    (
        MEAN,
        'return model(batch["x"]).mean() + 1j',
        "numbers of complex64; return a real scalar",
    ),
    (
        MEAN,
        'return float(model(batch["x"]).mean())',
        "raised ConcretizationTypeError: Abstract tracer",
    ),
    (
        MEAN,
        'return 1.0 if model(batch["x"]).mean() > 0 else 0.0',
        "raised TracerBoolConversionError",
    ),
    # The optimizer.
    (OPTIMIZER, "None", "optimizer=None: use an optax"),
    (OPTIMIZER, "'adam'", "optimizer='adam': use"),
    (OPTIMIZER, "optax.adam", "optimizer=<function adam.*use an optax"),
    (OPTIMIZER, "[optax.sgd(0.1)]", r"optimizer=\[Gradient.*use an optax"),
    (OPTIMIZER, "optax.GradientTransformation(None, None)", "init=None.*use an optax"),
    (
        OPTIMIZER,
        "optax.masked(optax.sgd(0.1), {'a': True})",
        "the optimizer cannot start.*give masks and labels",
    ),
    # The data.
    (DATA, "data=None", "data=None: give .name: array."),
    (DATA, "data=3", "data=3: give"),
    (DATA, "data='text.txt'", "data='text.txt': give"),
    (DATA, "data=[]", "hold no sample; give"),
    (DATA, "data={}", "arrays with {} rows; give"),
    (DATA, "data=iter(rows)", "data=<list_iterator.*give"),
    (DATA, "data=(row for row in rows)", "data=<generator.*give"),
    (DATA, "data={'x': x, 'y': y[:63]}", r"'y': \(63,\).*same number of rows"),
    (DATA, "data={'x': x, 'y': 1.0}", "batches to evaluate on are.*same leaves"),
    (DATA, "data={'x': x, 'y': None}", "is of object; give numbers"),
    (
        DATA,
        "data={'x': x.astype(str), 'y': y}",
        r"a sample\['x'\] is of <U32; give numbers",
    ),
    (
        DATA,
        "data={'x': x.astype(object), 'y': y}",
        r"a sample\['x'\] is of object; give numbers",
    ),
    (
        DATA,
        "data={'x': x[:8], 'y': y[:8]}",
        "hold 8 samples, fewer than one batch of 16",
    ),
    (DATA, "data=rows[:8]", "hold 8 samples, fewer than one batch of 16"),
    (DATA, "data=[*rows[:9], None, *rows[:9]]", "sample 9 of the data is None"),
    (
        DATA,
        "data=[{'x': 'a', 'y': 'b'}] * 64",
        r"a sample\['x'\] is of <U1; give numbers",
    ),
    (
        DATA,
        "data=lambda: parts(0, 1, 0)",
        "data=.*too many positional arguments; give a function of .part, number",
    ),
    (DATA, "data=lambda part, number, position: rows", "give that many rows"),
    (
        DATA,
        "data=lambda part, number, position: 3",
        r"data\(0, 1, 0\) gives 3; give an iterator",
    ),
    (
        DATA,
        "data=lambda part, number, position: iter([])",
        "gives no batch; give at least one",
    ),
    (
        DATA,
        "data=lambda part, number, position: 1 / 0",
        r"ZeroDivisionError.*my_run.py:\d+",
    ),
    (
        DATA,
        "data=grain.MapDataset.source(rows[:8])",
        "take 32 samples, and the data hold 8|hold 8 samples",
    ),
    (
        DATA,
        "data=grain.MapDataset.source(rows).filter(lambda _: False)",
        "sample 0 of the data is None",
    ),
    (
        DATA,
        "data=grain.MapDataset.source(rows[:20])",
        "take 32 samples, and the data hold 20",
    ),
    (
        DATA,
        "data=grain.MapDataset.source(rows).map(lambda row: row['z'])",
        "raised KeyError: 'z'",
    ),
    (
        DATA,
        "data=grain.MapDataset.source([]).to_iter_dataset()",
        "stream of data is empty",
    ),
    (
        DATA,
        "data=iter(grain.MapDataset.source(rows).to_iter_dataset())",
        "data=<grain.*give",
    ),
    (EVALUATION, "evaluation=3", "evaluation=3: give"),
    (
        EVALUATION,
        "evaluation={'x': x}",
        r"to evaluate on are \{.\['x'\].: 'float32\[16, 8\]'\}, and.*same leaves",
    ),
    (
        EVALUATION,
        "evaluation={'x': x[:, :4], 'y': y}",
        r"\[16, 4\].*same leaves and shapes",
    ),
    # The rest.
    (*more("clip_norm=0"), "clip_norm=0: use"),
    (*more("clip_norm=-1.0"), "clip_norm=-1.0: use"),
    (*more("clip_norm=float('nan')"), "clip_norm=nan: use"),
    (*more("clip_norm='1'"), "clip_norm='1': use"),
    (
        *more("learning_rate=0.1"),
        r"Run\(learning_rate=0.1\): give a function of the step",
    ),
    (
        *more("learning_rate=lambda step: 'fast'"),
        "learning_rate=<function.*for two steps at once; give",
    ),
    (*more("learning_rate=lambda step: np.ones(3)"), r"\(3,\) for two steps"),
    (*more("units='tokens'"), r"Run\(units='tokens'\): give a name and"),
    (*more("units=('tokens', 0)"), r"units=\('tokens', 0\)"),
    (*more("units=('tokens', 'many')"), "'many'.*give a name and"),
    (*more("length=-1"), "length=-1.*use a whole number of tokens"),
    (*more("flops='many'"), "flops='many'.*use a number of FLOPs"),
    (*more("flops=float('inf')"), "flops=inf.*use"),
    (*more("baseline=0.5"), r"baseline=0.5\): give a name and a function"),
    (*more("baseline=('floor', 0.5)"), r"baseline=\('floor', 0.5\)"),
    (*more("sample='text'"), "sample='text'.*give a function, or None"),
    (*more("padded=True"), "padded=True.*give a function"),
    (*more("identity=3"), r"identity=3\): give"),
    (*more("identity={'data': object()}"), "without the names code, config, data"),
    (*more("identity={'version': object()}"), "give .name: text or whole number"),
    (*more("evaluation_loss=3"), r"evaluation_loss=3\): give a function"),
]


@pytest.mark.parametrize(
    "old, new, words", CASES, ids=lambda text: text[-40:].replace("\0", "0")
)
def test_a_bad_run_file_is_an_error_of_a_line(
    old, new, words, tmp_path, monkeypatch, capsys
):
    assert old in FILE
    file = tmp_path / "my_run.py"
    file.write_text(FILE.replace(old, new, 1))
    monkeypatch.chdir(tmp_path)
    flags = [f"--recipe={file}:net", "--layout=data=2", "--devices=2"]
    outcome = commands.run("run", flags, monkeypatch, capsys)
    bad_input.check_refused(outcome, words, longest=1000)
    written = [path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)]
    assert written == [file]


@pytest.mark.parametrize(
    "arguments", [slow("model, batch"), "model, batch, key, step=0"]
)
def test_the_good_file_is_good(arguments, tmp_path, monkeypatch, capsys):
    file = tmp_path / "my_run.py"
    file.write_text(FILE.replace("def loss(model, batch)", f"def loss({arguments})"))
    flags = [f"--recipe={file}:net", "--layout=data=2", "--devices=2"]
    flags += [f"--workdir={tmp_path / 'w'}"]
    assert not commands.run("run", flags, monkeypatch, capsys).code
