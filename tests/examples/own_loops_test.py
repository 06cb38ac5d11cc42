"""The smallest run and a loop of one's own: both train as plain loops of optax do."""

import itertools
import pathlib
import subprocess
import sys

import jax
import my_run
import numpy as np
import optax
import plain_loop
import pytest
from flax import nnx
from support import plain_optax
from support.marks import slow
from support.start_weights import start_of

import meshpar
from experiments import recipes
from meshpar.runs.config import with_settings
from meshpar.runs.data import Place

ROOT = pathlib.Path(__file__).parents[2]
STEPS, ROWS = 4, 16


@pytest.mark.parametrize("layout", [slow("data=2,fsdp=2"), "pipe=2,data=2"])
def test_my_run_equals_its_plain_loop(layout, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, " * 50)
    config = recipes.get(f"{ROOT}/examples/my_run.py:my_run")
    settings = [f"path={text}", "width=32", "depth=2"]
    _, run = with_settings(config, settings).prepared()
    graph, start = start_of(lambda rngs: my_run.Net(32, 2, rngs), my_run.loss)

    def loss(params, batch):
        logits = jax.nn.log_softmax(nnx.merge(graph, params)(batch["last"]))
        return -logits[np.arange(ROWS), batch["next"]].mean()

    batches = run.data.training_batches(Place(ROWS, range(ROWS)))
    batches = list(itertools.islice(batches, STEPS))
    expected, _ = plain_optax.losses(loss, start, optax.adam(1e-3), batches)
    place = {"workdir": str(tmp_path / "run"), "devices": jax.devices()[:4]}
    done = meshpar.train(run, layout=layout, steps=STEPS, batch_size=ROWS, **place)
    found = [row["loss"] for row in done.metrics if "loss" in row]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_windows_of_my_run_are_the_text():
    data = my_run.my_run().data
    text = (ROOT / "examples" / "my_run.py").read_bytes()
    assert bytes(data["last"][7].tolist()) == text[7:23]
    assert data["next"][7] == text[23]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=2,fsdp=2", slow("pipe=2,tensor=2")])
def test_a_loop_of_ones_own_equals_a_plain_one(layout, tmp_path, capsys):
    graph, start = start_of(plain_loop.Net, plain_loop.loss)
    x = np.random.default_rng(1).normal(size=(100, 32)).astype(np.float32)
    np.savez(file := tmp_path / "rows.npz", x=x, y=np.cos(x))

    def loss(params, batch):
        return ((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2).mean()

    _, *batches = itertools.islice(plain_loop.batches(str(file)), STEPS + 1)
    expected, params = plain_optax.losses(loss, start, optax.adam(1e-2), batches)
    found, weights = plain_loop.train(layout, STEPS, str(file))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert f"step 0: loss {expected[0]:.4f}, mae" in capsys.readouterr().out
    state = nnx.to_flat_state(params)
    for path, x in state:
        # Adam divides by gradients of about 1e-8, which round differently.
        own = weights["/".join(map(str, path))]
        np.testing.assert_allclose(own, x[...], atol=1e-4)


@pytest.mark.slow
def test_a_loop_of_ones_own_is_a_script(tmp_path):
    script = [sys.executable, str(ROOT / "examples" / "plain_loop.py"), "fsdp=8"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()
    ]
    assert len(losses) == 10 and losses[-1] < losses[0] / 2
