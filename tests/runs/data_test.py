"""Data of a run: each form gives the same samples in every number of processes."""

import itertools
import json

import grain
import numpy as np
import pytest

import meshpar
from meshpar.errors import DataError
from meshpar.runs.data import Place
from meshpar.runs.data_forms import as_data

NUMBER, SIZE = 50, 8


def columns():
    return {"x": np.arange(NUMBER), "y": np.arange(2 * NUMBER).reshape(NUMBER, 2)}


def samples():
    data = columns()
    return [{name: x[i] for name, x in data.items()} for i in range(NUMBER)]


def stream():
    mixed = grain.MapDataset.source(samples()).seed(3).shuffle().repeat()
    return mixed.to_iter_dataset().filter(lambda sample: sample["x"] % 3 != 0)


def parts(part, number, position):
    rows, size = samples() * 40, SIZE // number
    for start in itertools.count(position, SIZE):
        own = rows[start + part * size : start + (part + 1) * size]
        yield {name: np.stack([x[name] for x in own]) for name in own[0]}


FORMS = {
    "columns": columns,
    "sequence": samples,
    "map": lambda: grain.MapDataset.source(samples()).seed(5).shuffle().repeat(),
    "stream": stream,
    "parts": lambda: parts,
}
every_form = pytest.mark.parametrize("form", FORMS)


def read(form, rows, number, monkeypatch=None, **place):
    """The values x of batches, as an array [number, rows]."""
    data = as_data(FORMS[form]())
    batches = data.training_batches(Place(SIZE, rows, **place))
    found = [next(batches) for _ in range(number)]
    return np.stack([batch["x"] for batch in found]), batches.state


def two_processes(monkeypatch):
    halves = {0: list(range(SIZE // 2)), 1: list(range(SIZE // 2, SIZE))}

    counts = []

    def gathered(label, value):
        if label == "rows of the data":
            return dict(halves)
        counts.append(value)  # Of the processes before this one, too.
        return dict(enumerate(counts))

    monkeypatch.setattr("meshpar.runs.data.agree.allgather_objects", gathered)
    return halves


@every_form
def test_processes_read_the_rows_of_the_same_batches(form, monkeypatch):
    whole, _ = read(form, range(SIZE), 7)
    halves = two_processes(monkeypatch)
    read_apart = [read(form, halves[process], 7)[0] for process in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(read_apart, axis=1), whole)


@every_form
def test_a_run_goes_on_with_the_next_sample(form, monkeypatch):
    whole, _ = read(form, range(SIZE), 9)
    _, state = read(form, range(SIZE), 5)
    state = json.loads(json.dumps(state))  # As a checkpoint keeps it.
    halves = two_processes(monkeypatch)
    later = [
        read(form, halves[process], 4, position=5 * SIZE, state=state)[0]
        for process in (0, 1)
    ]
    np.testing.assert_array_equal(np.concatenate(later, axis=1), whole[5:])


@pytest.mark.parametrize("form", ["columns", "sequence"])
def test_arrays_are_shuffled_anew_in_every_epoch_and_by_the_seed(form):
    found, _ = read(form, range(SIZE), 25)  # Four epochs of 50 samples.
    epochs = found.reshape(4, NUMBER)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(NUMBER))
    assert not np.array_equal(epochs[0], epochs[1])
    other, _ = read(form, range(SIZE), 25, seed=1)
    assert not np.array_equal(found, other)


def test_a_dataset_of_grain_keeps_its_own_order():
    plain = as_data(grain.MapDataset.source(samples()))
    batches = plain.training_batches(Place(SIZE, range(SIZE)))
    np.testing.assert_array_equal(next(batches)["x"], np.arange(SIZE))
    assert plain.num_samples == NUMBER
    assert len(list(batches)) == NUMBER // SIZE - 1  # It ends, and repeats nothing.


@every_form
def test_evaluation_batches_are_whole_and_at_most_so_many(form, monkeypatch):
    data = as_data(FORMS[form]())
    whole = data.evaluation_batches(Place(SIZE, range(SIZE)), 3).batches
    assert [batch["y"].shape for batch in whole] == [(SIZE, 2)] * 3
    halves = two_processes(monkeypatch)
    second = data.evaluation_batches(Place(SIZE, halves[1]), 3).batches
    for batch, half in zip(whole, second, strict=True):
        np.testing.assert_array_equal(batch["x"][SIZE // 2 :], half["x"])


@every_form
def test_fingerprints_tell_data_apart(form):
    assert as_data(FORMS[form]()).fingerprint == as_data(FORMS[form]()).fingerprint
    prints = [as_data(make()).fingerprint for make in FORMS.values()]
    changed = as_data({"x": np.arange(NUMBER) + 1, "y": columns()["y"]}).fingerprint
    assert changed not in prints


@every_form
def test_shapes_of_a_batch_are_those_of_its_samples(form):
    shapes = as_data(FORMS[form]()).abstract_batch(SIZE)
    assert {name: x.shape for name, x in shapes.items()} == {"x": (8,), "y": (8, 2)}


def endless_scalars(part, number, position):
    yield {"x": np.float32(1)}


def uneven(part, number, position):
    yield {"x": np.ones(SIZE // number + part)}


@pytest.mark.parametrize(
    "source, words",
    [
        (endless_scalars, r"gives no array with rows; give arrays \[8, ...\]"),
        (lambda *_: iter([]), "gives no batch"),
        ({"x": np.ones(3)}, "hold 3 samples, fewer than one batch of 8"),
        ([np.ones(2 + i // 4) for i in range(9)], "samples of one batch differ"),
        (grain.MapDataset.source([1, 2]), "hold 2 samples, fewer than one batch"),
        (
            grain.MapDataset.source(samples()).filter(lambda x: x["x"] != 3),
            "sample 3 of the data is None.*to_iter_dataset",
        ),
        (None, "give {name: array}, a sequence of samples"),
    ],
)
def test_data_that_do_not_fit_are_clear_errors(source, words):
    with pytest.raises(DataError, match=words):
        data = as_data(source)
        data.abstract_batch(SIZE)
        next(data.training_batches(Place(SIZE, range(SIZE))))


def test_a_part_of_the_wrong_size_is_named(monkeypatch):
    halves = two_processes(monkeypatch)
    with pytest.raises(DataError, match=r"data\(1, 2, 0\) gives leaves .* give 4 rows"):
        next(as_data(uneven).training_batches(Place(SIZE, halves[1])))


def test_a_stream_without_its_state_is_not_read_from_the_start():
    with pytest.raises(DataError, match="holds no state of the stream at sample 16"):
        as_data(stream()).training_batches(Place(SIZE, range(SIZE), position=16))


def counted(number):
    """The first samples alone, in each of the forms."""
    data = {name: x[:number] for name, x in columns().items()}
    listed = samples()[:number]

    def read(part, count, position):
        size = SIZE // count
        for start in range(position, number, SIZE):
            own = listed[start : start + SIZE][part * size : (part + 1) * size]
            if own:
                yield {name: np.stack([x[name] for x in own]) for name in own[0]}

    mapped = grain.MapDataset.source(listed)
    return {
        "columns": data,
        "sequence": listed,
        "map": mapped,
        "stream": mapped.to_iter_dataset(),
        "parts": read,
    }


@every_form
@pytest.mark.parametrize("number", [3, SIZE, 2 * SIZE + 6])
def test_evaluation_takes_every_sample_once(form, number, monkeypatch):
    data, halves = as_data(counted(number)[form]), two_processes(monkeypatch)
    # The second part of a batch ends first.
    second, first = (
        data.evaluation_batches(Place(SIZE, halves[process]), 4) for process in (1, 0)
    )
    whole, left = divmod(number, SIZE)
    for held in (first, second):
        assert len(held.batches) == whole
        rest = [] if held.rest is None else held.rest["x"]
        np.testing.assert_array_equal(rest, np.arange(number - left, number))
    pairs = zip(first.batches, second.batches, strict=True)
    found = [row for pair in pairs for batch in pair for row in batch["x"]]
    assert found == list(range(number - left))


def test_evaluation_is_spread_over_more_samples_than_it_takes():
    held = as_data(columns()).evaluation_batches(Place(SIZE, range(SIZE)), 2)
    found = np.concatenate([batch["x"] for batch in held.batches])
    assert held.rest is None and len(found) == 2 * SIZE
    assert found[0] == 0 and found[-1] == NUMBER - 1


def weighted(weights):
    return [
        sample | {"w": meshpar.Replicated(np.asarray(weights[i % len(weights)]))}
        for i, sample in enumerate(samples())
    ]


def with_weights(part, number, position):
    for batch in parts(part, number, position):
        yield batch | {"w": meshpar.Replicated(np.ones(3)), "t": np.float32(2)}


@pytest.mark.parametrize(
    "source",
    [
        columns() | {"w": meshpar.Replicated(np.ones(3)), "t": 2.0},
        grain.MapDataset.source(weighted([np.ones(3)])),
        grain.MapDataset.source(weighted([np.ones(3)])).to_iter_dataset(),
        with_weights,
    ],
)
def test_leaves_without_rows_are_in_every_batch_as_they_are(source):
    data, place = as_data(source), Place(SIZE, range(SIZE))
    assert data.abstract_batch(SIZE)["w"].value.shape == (3,)
    assert data.abstract_batch(SIZE)["x"].shape == (SIZE,)
    batch = next(data.training_batches(place))
    np.testing.assert_array_equal(batch["w"].value, np.ones(3))
    assert batch["x"].shape == (SIZE,)
    held = data.evaluation_batches(place, 100 if callable(source) else 7)
    np.testing.assert_array_equal(held.batches[-1]["w"].value, np.ones(3))


def test_samples_of_a_batch_agree_about_what_has_no_rows():
    data = as_data(grain.MapDataset.source(weighted([np.ones(3), np.zeros(3)])))
    with pytest.raises(DataError, match="different values in a meshpar.Replicated"):
        next(data.training_batches(Place(SIZE, range(SIZE))))
