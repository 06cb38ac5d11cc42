"""Packing: documents stay whole, apart, and as they are alone."""

import jax
import numpy as np
import optax
import pytest
from support.marks import slow
from support.tiny_models import model

import meshpar
from experiments import data
from experiments.data import DataConfig
from experiments.data.packing import Piece, pack, pieces_of
from meshpar.errors import DataError

LENGTH = 16
STARTS = np.array([0, 5, 40, 42, 43, 60])
TOKENS = np.random.default_rng(0).integers(1, 64, 70)


@pytest.fixture(scope="module")
def samples():
    packed = data.PackedSamples(TOKENS, STARTS, LENGTH)
    return [packed[i] for i in range(len(packed))]


def test_every_pair_of_a_document_occurs_once(samples):
    found = [
        (int(token), int(target))
        for sample in samples
        for token, target, weight in zip(
            sample["tokens"], sample["targets"], sample["weights"], strict=True
        )
        if weight
    ]
    ends = [*STARTS[1:], len(TOKENS)]
    pairs = [
        (int(TOKENS[i]), int(TOKENS[i + 1]))
        for start, end in zip(STARTS, ends, strict=True)
        for i in range(start, end - 1)
    ]
    assert sorted(found) == sorted(pairs)


def test_documents_count_from_zero_and_padding_is_apart(samples):
    for sample in samples:
        segments, positions = sample["segments"], sample["positions"]
        starts = np.flatnonzero(np.diff(segments, prepend=-1))
        assert (positions[starts] == 0).all()
        same = segments[1:] == segments[:-1]
        is_token = sample["weights"][1:] == 1
        assert (np.diff(positions)[same & is_token] == 1).all()
        padding = segments[sample["weights"] == 0]
        assert not set(padding) & set(segments[sample["weights"] == 1])


def test_samples_are_filled_best_fit_first():
    sizes = [3, 9, 7, 6, 4, 10, 1]
    filled = pack([Piece(100 * i, size) for i, size in enumerate(sizes)], 10)
    contents = [[piece.size for piece in sample] for sample in filled]
    assert contents == [[10], [9, 1], [7, 3], [6, 4]]
    assert pieces_of(np.array([0, 12]), 14, 5) == [(0, 5), (5, 5), (10, 1), (12, 1)]


@pytest.mark.parametrize("position", ["rope", slow("learned")])
@pytest.mark.parametrize("layout", [slow("data=1"), "context=4"])
def test_a_document_alone_equals_the_document_packed(samples, position, layout):
    """Its losses do not depend on what shares its sample."""
    of = model(kv_heads=4, position=position)
    sample = samples[-1]
    own = sample["segments"] == 1
    assert 1 < own.sum() < LENGTH
    alone = {name: np.where(own, x, 0) for name, x in sample.items()}
    alone["segments"] = np.where(own, 0, 1).astype(np.int32)
    packed = {**sample, "weights": np.where(own, 1, 0).astype(np.float32)}
    batches = [
        {name: x[None].astype(sample[name].dtype) for name, x in batch.items()}
        for batch in (alone, packed)
    ]
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    program = meshpar.lower(of, optax.sgd(0.0), layout, batches[0], devices=devices)

    def loss(batch):
        return float(program.step(program.init(seed=1), batch)[1]["loss"])

    assert loss(batches[0]) == pytest.approx(loss(batches[1]), rel=1e-6)
    one_document = batches[1] | {"segments": np.zeros((1, LENGTH), np.int32)}
    assert abs(loss(one_document) - loss(batches[0])) > 1e-4


def test_token_files_say_where_documents_end(tmp_path):
    path = str(tmp_path / "ids.npy")
    np.save(path, np.array([5, 6, 0, 7, 8, 9, 0, 4] * 20))
    with pytest.raises(DataError, match="does not say where documents end.*separator"):
        data.load(DataConfig(path, pack=True))
    with pytest.raises(DataError, match="data.separator=3 does not occur"):
        data.load(DataConfig(path, pack=True, separator=3))
    corpus = data.load(DataConfig(path, pack=True, separator=0, held_out=0.1))
    assert corpus.train_starts[:4].tolist() == [0, 3, 7, 11]
    assert (corpus.held_out[:][corpus.held_out_starts[1:] - 1] == 0).all()
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="data.separator=0 is for files of token ids"):
        data.load(DataConfig(str(tmp_path / "a.txt"), separator=0))


def test_text_files_are_documents(tmp_path):
    for name, text in {"a.txt": "one", "b.txt": "number two"}.items():
        (tmp_path / name).write_text(text)
    corpus = data.load(DataConfig(str(tmp_path), held_out=0.01, pack=True))
    (second,) = corpus.train_starts[1:]
    assert corpus.train[second - 1] == 0 and len(corpus.train) == 14
    assert data.load(DataConfig(str(tmp_path))).train_starts is None
