"""Noise drawn shard by shard equals the noise drawn at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from support.marks import first, slow

from meshpar.collectives import element_indices, shard_keys
from meshpar.collectives.shard_keys import Inner
from meshpar.errors import MeshparError
from meshpar.layouts.row_draws import Draws
from meshpar.layouts.token_order import CONTIGUOUS, STRIPED, ZIGZAG, device_order

KEY = jax.random.key(7)


def draw(key, rows):
    first, *others = jax.random.split(jax.random.fold_in(key, 3), 3)
    return (
        jax.random.bernoulli(first, 0.3, (rows, 5, 6)),
        jax.random.normal(others[0], (rows, 3)),
        jax.random.bits(others[1], (rows, 4), "uint8"),
    )


@pytest.mark.slow
def test_shards_draw_rows_of_the_global_draw():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("data")

    def shard(x):
        key = shard_keys.for_shard(KEY, jax.lax.axis_index("data"), len(x))
        return draw(key, len(x))

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            shard, in_specs=spec, out_specs=spec, axis_names={"data"}
        )
        sharded = jax.jit(mapped)(jnp.zeros(8))
    for shards, whole in zip(sharded, draw(KEY, 8), strict=True):
        np.testing.assert_array_equal(shards, whole)


@pytest.mark.slow
def test_shards_of_rows_and_length_draw_blocks_of_the_global_draw():
    axes = ("data", "length", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    spec = PartitionSpec("data", "length")

    def noise(key, rows, length):
        first, second = jax.random.split(jax.random.fold_in(key, 3))
        shape = rows, length, 4
        return jax.random.bernoulli(first, 0.3, shape), jax.random.normal(second, shape)

    def shard(x):
        rows, length = jax.lax.axis_index("data"), jax.lax.axis_index("length")
        key = shard_keys.for_shard(
            KEY, rows, len(x), shard_keys.Inner(length, jax.lax.axis_size("length"))
        )
        return noise(key, *x.shape)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            shard, in_specs=spec, out_specs=spec, axis_names={"data", "length"}
        )
        sharded = jax.jit(mapped)(jnp.zeros((4, 6)))
    for shards, whole in zip(sharded, noise(KEY, 4, 6), strict=True):
        np.testing.assert_array_equal(shards, whole)


DRAWS = {
    "uint8": lambda key, shape: jax.random.bits(key, shape, "uint8"),
    "uint64": lambda key, shape: jax.random.bits(key, shape, "uint64"),
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.4, shape),
    "bfloat16": lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16),
    "uint16": lambda key, shape: jax.random.bits(key, shape, "uint16"),
    "uint32": lambda key, shape: jax.random.bits(key, shape, "uint32"),
    "float32": jax.random.uniform,
    "float64": lambda key, shape: jax.random.uniform(key, shape, jnp.float64),
}


SPLITS = [
    ((4, 6), (2, 1)),
    ((4, 6), (2, 3)),
    ((4, 6, 5), (4, 2)),
    ((3, 4, 6, 2), (3, 2, 2)),
    ((4, 1, 6), (1, 1, 3)),
    # Dims that are split but that the draw does not have.
    ((8,), (4, 2)),
    ((4, 6), (2, 3, 2)),
]


@pytest.mark.parametrize(
    "name, shape, num_shards",
    [("float32", *split) for split in SPLITS]
    + [slow(name, (4, 6), (2,)) for name in DRAWS]
    + first(4, [(name, (2, 6, 3), (2, 3)) for name in DRAWS]),
)
def test_every_shard_draws_its_block(name, shape, num_shards):
    """Each shard is drawn alone and compared with its block of the plain draw."""
    split = num_shards[: len(shape)]
    local = [size // num for size, num in zip(shape, split, strict=False)]
    local += shape[len(local) :]
    with jax.enable_x64(name.endswith("64")):
        whole = np.asarray(DRAWS[name](KEY, shape))
        for place in np.ndindex(num_shards):
            numbers = [jnp.uint32(number) for number in place]
            inner = map(Inner, numbers[1:], num_shards[1:])
            key = shard_keys.for_shard(KEY, numbers[0], local[0], *inner)
            block = tuple(
                slice(at * size, (at + 1) * size)
                for at, size in zip(place, local, strict=False)
            )
            drawn = np.asarray(DRAWS[name](key, tuple(local)))
            assert drawn.dtype == whole.dtype
            np.testing.assert_array_equal(drawn, whole[block])


@pytest.mark.parametrize(
    "shards, num_shards, shape",
    [
        ((3, 1), (2,), (2, 3)),
        ((70_001, 2**20 - 1), (2**20,), (2, 3, 5)),
        ((2**31 + 7, 5), (2**16,), (1, 3, 2**10)),
        ((2**31 + 7,), (), (1, 2**10)),
        ((11, 2**17 - 1, 2**16 - 3), (2**17, 2**16), (2, 1, 3, 5)),
    ],
)
def test_indices_beyond_32_bits(shards, num_shards, shape):
    first, *inner = (jnp.uint32(number) for number in shards)
    words = [first * jnp.uint32(shape[0]), jnp.uint32(1), *inner]
    indices = jax.jit(element_indices.indices, static_argnums=(1, 2, 3))
    splits = tuple((num, CONTIGUOUS) for num in num_shards)
    high, low = map(np.asarray, indices(words, shape, 1, splits))
    sizes = [n * size for n, size in zip(num_shards, shape[1:], strict=False)]
    sizes += shape[1 + len(sizes) :]
    starts = [*shards, *[0] * (len(shape) - len(shards))]
    for place in np.ndindex(shape):
        index = 0
        for start, size, at, whole in zip(
            starts, shape, place, [1, *sizes], strict=True
        ):
            index = index * whole + start * size + at
        assert (int(high[place]) << 32) + int(low[place]) == index


@pytest.mark.parametrize("order", [CONTIGUOUS, ZIGZAG, STRIPED])
@pytest.mark.parametrize("shape", [(4, 12), (2, 12, 3)])
def test_every_shard_draws_the_places_of_its_order(order, shape):
    """In whichever order the tokens of a sequence are dealt to devices."""
    whole, num = np.asarray(jax.random.uniform(KEY, shape)), 3
    places = device_order(order, shape[1], num).reshape(num, -1)
    for shard in range(num):
        inner = Inner(jnp.uint32(shard), num, order)
        local = shape[0] // 2, shape[1] // num, *shape[2:]
        key = shard_keys.for_shard(KEY, jnp.uint32(1), local[0], inner)
        drawn = jax.random.uniform(key, local)
        np.testing.assert_array_equal(drawn, whole[shape[0] // 2 :, places[shard]])


BATCH, SHARDS, MICROBATCHES = 24, 2, 3
DRAWN_BY_ROWS = {
    "a number for each row": ((), lambda key, rows: jax.random.normal(key, (rows,))),
    "tokens in one dim": (
        *((5,), lambda key, rows: jax.random.normal(key, (rows * 5, 2))),
    ),
    "a key for each row": (
        (),
        lambda key, rows: jax.vmap(lambda key: jax.random.normal(key, (rows, 3)))(
            jax.random.split(key, rows)
        )[:, :4],
    ),
    "a choice in each row": (
        (),
        lambda key, rows: jax.random.categorical(key, jnp.zeros((rows, 9))),
    ),
    "gamma": ((), lambda key, rows: jax.random.gamma(key, 2.0, (rows,))),
}


def parts_of(key, draws):
    """(key, rows) of every microbatch of every shard."""
    rows = BATCH // SHARDS
    for shard in range(SHARDS):
        own = shard_keys.for_shard(key, jnp.uint32(shard), rows, draws=draws)
        for m in range(MICROBATCHES):
            part = shard_keys.for_microbatch(own, jnp.uint32(m), MICROBATCHES)
            first = shard * rows + m
            yield part, np.arange(first, (shard + 1) * rows, MICROBATCHES)


@pytest.mark.parametrize("name", first(4, DRAWN_BY_ROWS))
def test_microbatches_draw_the_numbers_of_their_rows(name):
    per_row, draw = DRAWN_BY_ROWS[name]
    draws = Draws(frozenset((1, *per_row)), frozenset((1,)))
    whole = np.asarray(draw(KEY, BATCH)).reshape(BATCH, *per_row, -1)
    if name == "a key for each row":  # Its own draws have as many rows as a part.
        whole = np.asarray(draw_with(BATCH, BATCH // 6)).reshape(BATCH, -1)
    for key, rows in parts_of(KEY, draws):
        drawn = np.asarray(draw(key, len(rows))).reshape(len(rows), *per_row, -1)
        np.testing.assert_array_equal(drawn, whole[rows])


def draw_with(rows, own):
    """The numbers that keys of rows draw, in the shape [own, 3]."""
    keys = jax.random.split(KEY, rows)
    return jax.vmap(lambda key: jax.random.normal(key, (own, 3)))(keys)


def test_contiguous_parts_of_a_microbatch_draw_the_numbers_of_their_rows():
    whole = np.asarray(jax.random.uniform(KEY, (BATCH, 5)))
    for key, rows in parts_of(KEY, None):
        for part in range(2):
            own = shard_keys.for_part(key, jnp.uint32(part), 2)
            drawn = jax.random.uniform(own, (2, 5))
            np.testing.assert_array_equal(drawn, whole[rows[2 * part :][:2]])


def test_one_draw_for_all_rows_is_the_same_in_every_part():
    def draw(key):
        first, second = jax.random.split(key)
        numbers = jax.random.normal(first), jax.random.normal(second, (7,))
        return [*numbers, jax.random.normal(second, (1, 3))]

    whole = draw(KEY)
    for key, _ in parts_of(KEY, Draws(frozenset((1,)))):
        jax.tree.map(np.testing.assert_array_equal, draw(key), whole)


def test_keys_of_one_split_are_of_one_kind():
    """Keys are compared by type in scans, so the kind must not be made twice."""
    zero = jnp.uint32(0)
    plain, rows = KEY.dtype, shard_keys.for_shard(KEY, zero, 4).dtype
    two = [
        shard_keys.for_shard(KEY, zero, 4, shard_keys.Inner(zero, 2)).dtype
        for _ in range(2)
    ]
    three = shard_keys.for_shard(KEY, zero, 4, shard_keys.Inner(zero, 3)).dtype
    assert two[0] == two[1] and len({plain, rows, two[0], three}) == 4


@pytest.mark.parametrize(
    "a, b", [(5, 2**31 + 7), (70_000, 123_456_789), (2**20, 2**20), (2**32 - 1,) * 2]
)
def test_high_word_of_a_product(a, b):
    assert int(element_indices._high_word(jnp.uint32(a), b)) == (a * b) >> 32


def test_a_draw_with_too_many_elements_is_an_error():
    key = shard_keys.for_shard(jax.random.key(0), jnp.uint32(0), 2**16)
    with pytest.raises(MeshparError, match="2\\*\\*32 elements or more on a shard"):
        jax.jit(lambda: jax.random.bits(key, (2**16, 2**16))).lower()


def test_keys_of_another_kind_are_an_error():
    with pytest.raises(MeshparError, match="kind rbg: only threefry2x32 keys"):
        shard_keys.for_shard(jax.random.key(0, impl="rbg"), jnp.uint32(0), 1)
