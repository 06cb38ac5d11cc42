"""Generation equals the full forward pass, and gives the same text on all layouts."""

import functools

import jax
import numpy as np
import pytest
from support.marks import slow
from support.tiny_models import GEMMA3, OLMO2, model

import meshpar
from experiments.models.decoder_config import GPT2_KIND
from meshpar.generation import GREEDY, Sampling, layouts, unpadded
from meshpar.layouts.axes import TENSOR

LENGTH, ROWS, VOCAB = 16, 8, 64
KINDS = {
    "llama": dict(kv_heads=4),
    "grouped": dict(kv_heads=2, qk_norm=True),
    "gpt2": GPT2_KIND,
    "windows": dict(kv_heads=4, window=3, global_every=2),
    "olmo2": OLMO2,
    "gemma3": GEMMA3,
    "gemma3_odd": GEMMA3 | dict(depth=3),
    "experts": dict(
        kv_heads=4, num_experts=4, mlp=32, shared_experts=1, capacity_factor=8.0
    ),
}
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7)
ROWS_OF_TABLE = [
    ("windows", "context=2,fsdp=2,tensor=2"),
    slow("gemma3", "context=2,fsdp=2,tensor=2"),
    slow("grouped", "fsdp=2,tensor=4"),
    slow("gpt2", "pipe=2,context=2,tensor=2,microbatches=2"),
    slow("olmo2", "fsdp=2,tensor=4"),
    slow("gemma3_odd", "context=2,fsdp=2,tensor=2"),
    slow("olmo2", "context=2,fsdp=2,tensor=2"),
    slow("experts", "fsdp=2,expert=2,tensor=2"),
    slow("experts", "expert=4"),
    slow("experts", "data=2,fsdp=4"),
    *(
        slow("llama", layout)
        for layout in (
            "data=8",
            "fsdp=8,zero=1",
            "fsdp=8,zero=2",
            "fsdp=8,zero=3",
            "tensor=4",
            "fsdp=2,tensor=4",
            "data=2,fsdp=2,tensor=2",
            "pipe=4,data=2,microbatches=4",
            "pipe=2,fsdp=2,schedule=interleaved,virtual_stages=2,microbatches=2,"
            "tensor=2",
            "context=4,data=2",
        )
    ),
    *(
        slow(kind, layout)
        for kind in ("grouped", "gpt2", "windows")
        for layout in ("tensor=8", "context=2,fsdp=2,tensor=2", "fsdp=8")
        if (kind, layout) != ("windows", "context=2,fsdp=2,tensor=2")
    ),
]
"""The resume matrix, and more; by default layers with windows, over three axes."""


@functools.cache
def of_kind(kind):
    return model(**KINDS[kind])


@functools.cache
def weights(kind):
    params = jax.jit(of_kind(kind).init)(jax.random.key(0))
    return jax.device_get(params)


@functools.cache
def forward(kind):
    return jax.jit(lambda params, tokens: of_kind(kind).bind(params)(tokens))


def make(kind, layout, **options):
    layout = meshpar.layouts.parse(layout)
    options = dict(max_length=LENGTH, batch_size=ROWS) | options
    devices = jax.devices()[: layout.num_devices]
    return meshpar.generator(of_kind(kind), layout, devices=devices, **options)


@functools.cache
def small():
    """A generator on one device, and its weights."""
    generator = make("llama", "data=1")
    return generator, generator.place(weights("llama"))


def prompts():
    """Of every length between one token and almost the longest."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).tolist() for n in (1, 3, 9, 14, 5, 2, 7, 4)]


@functools.cache
def on_one_device(kind):
    generator = make(kind, "data=1")
    return texts(generator, generator.place(weights(kind)))


def texts(generator, params):
    """Greedy tokens, and sampled ones beyond the longest sequence."""
    greedy = generator.generate(params, prompts(), 6)
    return greedy, generator.generate(params, prompts(), LENGTH + 4, SAMPLED)


def check_logits(kind, generator, params):
    """Decodes to the end, and compares the logits of every position."""
    state = generator.prefill(params, prompts(), LENGTH)
    sampling, found = generator.sampling_arrays(GREEDY), {}
    for _ in range(LENGTH - 1):
        position, done = np.asarray(state.position), np.asarray(state.done)
        state, logits = generator.decode(params, state, sampling)
        for row in np.flatnonzero(~done):
            found[row, position[row]] = np.asarray(logits)[row]
    assert np.asarray(state.length).tolist() == [LENGTH] * ROWS
    want = np.asarray(forward(kind)(weights(kind), np.asarray(state.tokens)))
    ends = [len(prompt) for prompt in prompts()]
    places = {(row, p) for row in range(ROWS) for p in range(ends[row] - 1, LENGTH - 1)}
    assert places == found.keys()
    for place, logits in found.items():
        np.testing.assert_allclose(logits, want[place], atol=1e-5)


@pytest.mark.parametrize("kind, layout", ROWS_OF_TABLE)
def test_a_generator_equals_the_forward_pass_and_one_device(kind, layout):
    generator = make(kind, layout)
    params = generator.place(weights(kind))
    check_logits(kind, generator, params)
    assert texts(generator, params) == on_one_device(kind)
    moves = layout != "data=8"
    assert bool(generator.programs.contract.terms) == moves
    assert generator.violations() == []


@pytest.mark.slow
def test_tensor_moves_two_activations_for_each_layer():
    generator = make("llama", f"{TENSOR}=4")
    found = generator.programs.decode.collectives
    activations = [c for c in found if c.kind == "all_reduce"]
    assert {c.payload_bytes for c in activations} == {ROWS * 32 * 4}
    lookup, depth = 1, 2
    assert sum(c.executions for c in activations) == lookup + 2 * depth
    assert [c.kind for c in found if c not in activations] == ["all_gather"]
    assert generator.violations() == []
    nothing = make("llama", "data=4").programs.contract
    assert nothing.terms == () and nothing.violations(found) != []


def test_the_cache_is_split_as_its_names_say():
    def shard(kind, layout):
        keys = make(kind, layout).programs.abstract_cache["keys"]
        return keys.sharding.shard_shape(keys.shape)

    assert shard("llama", "data=1") == (2, ROWS, LENGTH, 4, 4)
    assert shard("llama", "data=2,fsdp=2,tensor=2") == (2, ROWS // 4, LENGTH, 2, 4)
    assert shard("grouped", "fsdp=2,tensor=4") == (2, ROWS // 2, LENGTH // 4, 2, 4)
    assert shard("llama", "context=4,tensor=2") == (2, ROWS, LENGTH // 4, 2, 4)


_compiled: list[str] = []


def _listen(event: str, duration: float, fun_name: str = "", **_) -> None:
    if "backend_compile" in event:
        _compiled.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiled(name):
    return sum(name in compiled for compiled in _compiled)


def test_one_compilation_serves_all_lengths_and_ways_of_sampling():
    before = num_compiled("prefill"), num_compiled("decode")
    generator = make("llama", "data=1")
    params = generator.place(weights("llama"))
    generator.generate(params, prompts(), 3)
    generator.generate(params, prompts()[2:5], 9, SAMPLED, stop=[3])
    generator.generate(params, [[1]], 1, Sampling(0.3))
    after = num_compiled("prefill"), num_compiled("decode")
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]


def test_text_depends_on_the_number_of_a_sequence_and_not_on_its_batch():
    (generator, params), ids = small(), [5, 6, 7]
    together = generator.generate(
        params, prompts()[:3], LENGTH, SAMPLED, sequence_ids=ids
    )
    apart = [
        generator.generate(params, [prompt], LENGTH, SAMPLED, sequence_ids=[number])[0]
        for prompt, number in zip(prompts(), ids, strict=False)
    ]
    assert together == apart
    others = generator.generate(
        params, prompts()[:3], LENGTH, SAMPLED, sequence_ids=[0, 1, 2]
    )
    assert all(a != b for a, b in zip(together, others, strict=True))


def test_a_stop_token_ends_a_sequence_and_is_not_returned():
    generator, params = small()
    whole = generator.generate(params, prompts()[:3], 8)
    stop = whole[0][4]
    found = generator.generate(params, prompts()[:3], 8, stop=[stop])
    cut = [t[: t.index(stop)] if stop in t else t for t in whole]
    assert found == cut and len(found[0]) < 8


def test_prompts_may_be_padded_on_either_side():
    rows = prompts()[:3]
    left, right = np.zeros((2, 3, 9), np.int32)
    masks = np.zeros((2, 3, 9), bool)
    for i, row in enumerate(rows):
        left[i, 9 - len(row) :], masks[0, i, 9 - len(row) :] = row, True
        right[i, : len(row)], masks[1, i, : len(row)] = row, True
    assert unpadded(left, masks[0]) == unpadded(right, masks[1]) == rows
    with pytest.raises(meshpar.MeshparError, match="row 0 .*padding between tokens"):
        unpadded(left[:1, :3], [[1, 0, 1]])


@pytest.mark.parametrize(
    "layout, options, words",
    [
        ("replica=2", {}, "replica=2: .*use data in place of replica"),
        ("data=4", dict(batch_size=6), "batch_size=6 .*data=4; use a multiple of 4"),
        ("data=1", dict(max_length=1), "max_length=1: use 2 or more"),
        ("expert=2", {}, "expert=2 shards no parameter"),
    ],
)
def test_what_cannot_be_is_an_error(layout, options, words):
    with pytest.raises(meshpar.MeshparError, match=words):
        make("llama", layout, **options)


def test_a_model_has_a_cache_and_room_for_the_prompts():
    with pytest.raises(meshpar.MeshparError, match="has 16 positions; use 16"):
        make("gpt2", "data=1", max_length=17)
    bare = model("linen")
    with pytest.raises(meshpar.LayoutError, match="gives no cache"):
        meshpar.generator(bare, "data=1", max_length=4, devices=jax.devices()[:1])
    generator = make("llama", "data=1", batch_size=2)
    for bad, words in [
        ([], "at least one prompt"),
        ([[]], "prompt 0 is no list of at least one"),
        ([[1], [64]], "prompt 1 holds token ids 64 to 64, and the model has 0 to 63"),
        ([[1] * 16], "prompt 0 has 16 tokens.*last 15"),
        ([[1]] * 3, "3 prompts, and batch_size=2"),
    ]:
        with pytest.raises(meshpar.MeshparError, match=words):
            generator.generate({}, bad, 1)
    with pytest.raises(meshpar.MeshparError, match="stop=64: .* 0 to 63; use"):
        generator.generate({}, [[1]], 1, stop=[64])
    for bad in (dict(temperature=-1), dict(top_k=-1), dict(top_p=0), dict(seed=-1)):
        with pytest.raises(ValueError, match="use"):
            Sampling(**bad)


def test_layouts_of_generation():
    pipe = meshpar.layouts.parse(
        "pipe=2,fsdp=2,tensor=2,microbatches=4,vocab=pipe,remat=full,allow=idle_devices"
    )
    found = layouts.generation_layouts(pipe, 4)
    none = "activations.activation_residual_length=none,activations.residual_length="
    assert str(found.prefill) == (
        f"fsdp=4,tensor=2,zero=3,{none}none,allow=idle_devices"
    )
    assert found.decode.activation_rules["embed"] == ("fsdp",)
    assert found.decode.activation_rules["batch"] == ("data", "expert")
    assert layouts.generation_layouts(pipe, 1).decode.param_rules["kv_heads"] == ()
