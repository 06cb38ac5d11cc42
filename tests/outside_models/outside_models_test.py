"""Models as public scripts write them train as in a plain loop, under every layout.

The loop shares no code with meshpar: jax, optax and Flax alone, on one device.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from outside_models.public_models import MODELS

import meshpar

STEPS, BATCH = 5, 16
LOSS_ERROR, UPDATE_ERROR, STATE_ERROR = 1e-5, 3e-4, 1e-5

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2, eps=1e-3),
}
"""Adam divides by nearly zero where a gradient is rounding alone: hence the epsilon.

The gradient of a bias that the next LayerNorm removes is one (Mixer's token mixing).
"""

EVERYWHERE = ["data=8", "data=2,microbatches=4"]
NAMED = [
    *("fsdp=8,zero=1", "fsdp=8,zero=2", "fsdp=8,zero=3", "tensor=2"),
    *("data=2,fsdp=2,tensor=2", "fsdp=2,tensor=2,microbatches=2"),
]
STAGED = [
    *("pipe=2,microbatches=4", "pipe=4,data=2,microbatches=4,schedule=gpipe"),
    *("pipe=2,fsdp=2,tensor=2,microbatches=2", "fsdp=4,remat=full"),
    *(
        "pipe=2,data=2,microbatches=4,virtual_stages=2,save=residuals",
        "data=2,remat=dots",
    ),
]
FEW_STAGES = [
    *("pipe=2,microbatches=4", "pipe=2,data=2,microbatches=2,schedule=gpipe"),
    *("data=2,remat=full", "pipe=2,data=2,microbatches=2,remat=dots"),
]
GPT2_PATHS = ",".join(
    [
        'paths."c_(attn|fc)/kernel"=mlp/embed',
        "paths.c_proj/kernel=embed/mlp",
        "paths.wte/embedding=vocab/embed",
        'allow="bias|scale|wpe"',
    ]
)
RESNET = ["data=8", "data=2,fsdp=4", "fsdp=8,zero=1", "fsdp=8,zero=3"]
RESNET_PATHS = ",".join(
    [
        'paths."[Cc]onv.*kernel|shortcut"=none/none/none/embed',
        "paths.head/kernel=embed/none",
        'allow="bias|scale"',
    ]
)
BONSAI = [
    *("data=8,axes.tp=tensor", "fsdp=4,remat=full,axes.tp=tensor"),
    *("data=2,microbatches=4,axes.tp=tensor", "fsdp=2,tensor=2,axes.tp=tensor"),
]
OWN_AXES = "axes.data=data+fsdp,axes.model=tensor"
EXPLICIT = [
    *("data=8", "fsdp=4,zero=3", "data=2,microbatches=4"),
    "data=2,fsdp=2,tensor=2",
]
PEFT = [*EVERYWHERE, "fsdp=8,zero=3", "fsdp=2,tensor=2,allow=lora"]
LAYOUTS = {
    "lm1b": [*EVERYWHERE, *NAMED, *STAGED],
    "wmt": [*EVERYWHERE, *FEW_STAGES],
    "mixer": [*EVERYWHERE, *FEW_STAGES],
    "vit": [*EVERYWHERE, *FEW_STAGES],
    "gpt2": [*EVERYWHERE, *(f"{layout},{GPT2_PATHS}" for layout in NAMED)],
    "gemma": [
        *(*EVERYWHERE, *NAMED, *FEW_STAGES, "fsdp=4,remat=full"),
        "data=2,fsdp=2,tensor=2,zero=2,microbatches=4,remat=dots",
        "pipe=2,fsdp=2,tensor=2,microbatches=2",
    ],
    "vit_batch_norm": ["data=8", "data=2,fsdp=4", "fsdp=8,zero=3"],
    "bonsai": [*BONSAI, "pipe=2,microbatches=4,axes.tp=tensor"],
    "bonsai_jit": [layout.replace("remat=full,", "") for layout in BONSAI],
    "explicit": [
        *(f"{layout},{OWN_AXES}" for layout in EXPLICIT),
        f"pipe=2,data=2,tensor=2,microbatches=2,{OWN_AXES}",
    ],
    "explicit_jit": [f"{layout},{OWN_AXES}" for layout in EXPLICIT],
    "peft": [*PEFT, "pipe=2,data=2,microbatches=2"],
    "peft_jit": PEFT,
    "diffusion": [*EVERYWHERE, "fsdp=8,zero=3", "data=2,fsdp=2,microbatches=2"],
    "rnn": [*EVERYWHERE, "fsdp=8,zero=3", "pipe=2,data=2,microbatches=2"],
    "stacked": [*EVERYWHERE, *NAMED, *STAGED],
    "resnet": [RESNET[0], *(f"{layout},{RESNET_PATHS}" for layout in RESNET[1:])],
    "resnet_nnx": [RESNET[0], *(f"{layout},{RESNET_PATHS}" for layout in RESNET[1:])],
}
"""{model: layouts}; models that name their dims have `EVERYWHERE` and `NAMED`."""

DEFAULT = {
    ("bonsai", "pipe=2,microbatches=4,axes.tp=tensor", "sgd"),
    ("explicit_jit", f"data=2,fsdp=2,tensor=2,{OWN_AXES}", "sgd"),
}
"""Rows that run by default; `-m slow` runs all others."""


def rows():
    product = [
        (name, layout, optimizer)
        for name in MODELS
        for layout in LAYOUTS.get(name, [*EVERYWHERE, *NAMED])
        for optimizer in OPTIMIZERS
    ]
    assert DEFAULT <= set(product)
    for row in product:
        marks = () if row in DEFAULT else pytest.mark.slow
        name, layout, optimizer = row
        label = f"{name}-{layout.split(',paths')[0]}-{optimizer}"
        yield pytest.param(*row, marks=marks, id=label)


@pytest.fixture(autouse=True)
def scripts_broadcast_as_they_like():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def public(name):
    return MODELS[name]()


@functools.cache
def batches(name):
    return [public(name).make_batch(seed, BATCH) for seed in range(STEPS)]


@functools.cache
def plain(name, optimizer):
    """First variables, losses and last variables of the plain loop."""
    model = public(name)
    params, state = model.start()
    first = jax.device_get(model.flat(params, state))
    losses, *last = model.train(OPTIMIZERS[optimizer](), batches(name))
    return first, losses, jax.device_get(model.flat(*last))


@pytest.mark.parametrize("name, layout, optimizer", list(rows()))
def test_public_models_train_as_in_a_plain_loop(name, layout, optimizer):
    first, want_losses, last = plain(name, optimizer)
    model, layout = public(name).model, meshpar.layouts.parse(layout)
    program = meshpar.lower(
        model,
        OPTIMIZERS[optimizer](),
        layout,
        batches(name)[0],
        devices=jax.devices()[: layout.num_devices],
    )
    state, losses = program.init(0, params=first), []
    for batch in batches(name):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, want_losses, rtol=LOSS_ERROR)
    got = jax.device_get(program.in_model_order(state).params)
    first, last = model.stack_variables(first), model.stack_variables(last)
    assert got.keys() == last.keys()
    moved = {path: x - first[path] for path, x in last.items()}
    norms = {path: np.linalg.norm(x) for path, x in moved.items()}
    trained = [path for path, param in model.params.items() if param.trained]
    floor = 1e-2 * np.linalg.norm([norms[path] for path in trained])
    errors = {
        path: np.linalg.norm(got[path] - x) / max(norms[path], floor)
        for path, x in last.items()
    }
    assert max(errors[path] for path in trained) < UPDATE_ERROR, errors
    assert all(errors[path] < STATE_ERROR for path in errors.keys() - trained), errors
    assert program.violations() == []


@pytest.mark.slow
def test_the_loops_learn():
    """The comparison is of training that moves every model."""
    for name, _, optimizer in itertools.islice(sorted(DEFAULT), 3):
        model, batch = public(name), batches(name)[0]
        losses, *_ = model.train(OPTIMIZERS[optimizer](), [batch] * 3)
        assert losses[-1] < losses[0] - 0.01
        first, _, last = plain(name, optimizer)
        assert sum(np.linalg.norm(x - first[path]) for path, x in last.items()) > 0.1


@pytest.mark.slow
def test_a_diffusion_model_is_averaged_as_in_a_plain_loop():
    public_model, decay = public("diffusion"), 0.8
    params, state = public_model.start()
    want = first = jax.device_get(public_model.flat(params, state))
    for number in range(STEPS):
        last = public_model.train(optax.sgd(0.01), batches("diffusion")[: number + 1])
        now = jax.device_get(public_model.flat(*last[1:]))
        want = {path: decay * x + (1 - decay) * now[path] for path, x in want.items()}
    optimizer = meshpar.with_ema(optax.sgd(0.01), decay)
    batch = batches("diffusion")[0]
    program = meshpar.lower(public_model.model, optimizer, "fsdp=8", batch)
    state = program.init(0, params=first)
    for batch in batches("diffusion"):
        state, _ = program.step(state, batch)
    for path, x in program.ema_weights(state).items():
        np.testing.assert_allclose(x, want[path], 1e-4, 1e-6, err_msg=path)
        assert np.abs(want[path] - now[path]).max() > 1e-5
