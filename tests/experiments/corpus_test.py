"""Data: real text, strict reading, one global position."""

import collections

import numpy as np
import pytest

from experiments import data
from experiments.data import DataConfig
from meshpar.errors import DataError

LENGTH = 8


@pytest.fixture
def corpus(tmp_path):
    """160 training windows that each hold their own number."""
    tokens = np.repeat(np.arange(200), LENGTH)
    np.save(tmp_path / "ids.npy", tokens)
    return data.load(DataConfig(path=str(tmp_path / "ids.npy"), held_out=0.2))


def batches(corpus, num, rows=range(16), position=0, seed=0):
    made = data.training_batches(
        corpus,
        length=LENGTH,
        batch_size=16,
        seed=seed,
        rows=list(rows),
        position=position,
    )
    return [next(made) for _ in range(num)]


def first_tokens(found):
    return np.concatenate([b["tokens"][:, 0] for b in found])


def test_default_is_real_text_with_a_floor():
    corpus = data.load(DataConfig())
    assert len(corpus.train) > 3_000_000
    assert corpus.vocab == 256
    assert "def __init__" in corpus.decode(corpus.train[:400_000].tolist())
    assert 2.5 < data.unigram_loss(corpus) < 4.0


def test_unigram_loss_is_the_entropy_of_the_held_out_part(tmp_path):
    (tmp_path / "a.txt").write_text("abcd" * 50_000)
    corpus = data.load(DataConfig(path=str(tmp_path), held_out=0.5))
    assert data.unigram_loss(corpus) == pytest.approx(np.log(4), abs=0.01)


def test_targets_are_the_next_tokens(corpus):
    windows = data.Windows(corpus.train, LENGTH)
    sample = windows[3]
    np.testing.assert_array_equal(sample["tokens"], [3] * LENGTH)
    np.testing.assert_array_equal(sample["targets"], [3] * (LENGTH - 1) + [4])
    assert sample["tokens"].dtype == np.int32


def test_every_epoch_is_the_same_multiset_in_another_order(corpus):
    num = len(data.Windows(corpus.train, LENGTH))
    assert num == 159
    seen = first_tokens(batches(corpus, 20))
    first, second = seen[:num], seen[num : 2 * num]
    assert collections.Counter(first) == collections.Counter(range(num))
    assert collections.Counter(second) == collections.Counter(range(num))
    assert (first != second).any()
    assert (seen != first_tokens(batches(corpus, 20, seed=1))).any()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_position_resumes_with_any_number_of_processes(corpus, processes):
    whole = batches(corpus, 5)
    size = 16 // processes
    for p in range(processes):
        rows = range(p * size, (p + 1) * size)
        parts = batches(corpus, 3, rows=rows, position=2 * 16)
        for want, got in zip(whole[2:], parts, strict=True):
            np.testing.assert_array_equal(want["tokens"][rows], got["tokens"])


def test_held_out_batches_are_fixed_and_never_trained_on(corpus):
    shape = dict(length=LENGTH, batch_size=16, rows=list(range(16)), limit=2)
    one, two = (data.held_out_batches(corpus, **shape).batches for _ in range(2))
    assert len(one) == 2
    np.testing.assert_array_equal(one[1]["tokens"], two[1]["tokens"])
    assert not set(first_tokens(one)) & set(first_tokens(batches(corpus, 20)))


def test_folder_glob_and_order(tmp_path):
    for name, text in {"a.txt": "first", "sub/b.txt": "second", ".git/c": "x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text * 100)
    folder = data.load(DataConfig(path=str(tmp_path)))
    glob = data.load(DataConfig(path=str(tmp_path / "**" / "*.txt")))
    assert folder.fingerprint == glob.fingerprint
    text = folder.decode(np.concatenate([folder.train, folder.held_out]).tolist())
    assert sorted(text.split("\0")) == ["first" * 100, "second" * 100]


def test_binary_token_ids(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "ids.bin")
    corpus = data.load(DataConfig(path=str(tmp_path / "ids.bin")))
    np.testing.assert_array_equal(corpus.train[:5], range(5))
    assert corpus.vocab == 1024


def test_tokenizer_json(tmp_path):
    import tokenizers

    words = {"the": 0, "cat": 1, "sat": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("the cat sat " * 50)
    corpus = data.load(
        DataConfig(str(tmp_path / "a.txt"), str(tmp_path / "tokenizer.json"))
    )
    np.testing.assert_array_equal(corpus.train[:4], [0, 1, 2, 0])
    assert corpus.decode([0, 1]) == "the cat" and corpus.vocab == 128


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("empty.txt", b"", "all are empty"),
        ("binary.txt", b"abc\0def", "looks binary"),
        ("odd.bin", b"abc", "cannot be read as uint16"),
        ("no.npy", b"text", "cannot be read"),
        ("empty.bin", b"", "cannot be read|no tokens"),
    ],
)
def test_bad_files_say_what_to_do(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        data.load(DataConfig(path=str(tmp_path / name)))


def test_missing_data_names_the_nearest(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("to be")
    with pytest.raises(DataError, match="did you mean 'shakespeare.txt'"):
        data.load(DataConfig(path=str(tmp_path / "shakespear.txt")))
    with pytest.raises(DataError, match="no file matches"):
        data.load(DataConfig(path=str(tmp_path / "*.csv")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="holds no file"):
        data.load(DataConfig(path=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    "array, words",
    [
        (np.zeros((4, 4), np.int32), r"int32\[4, 4\]"),
        (np.zeros(4, np.float32), r"float32\[4\]"),
        (np.array([1, -5]), "token id -5"),
    ],
)
def test_bad_arrays(tmp_path, array, words):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(DataError, match=words):
        data.load(DataConfig(path=str(tmp_path / "x.npy")))


def test_bad_tokenizers(tmp_path, corpus):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "t.json").write_text("{}")
    for path in ("t.json", "none.json"):
        with pytest.raises(DataError, match="tokenizer.*cannot be read"):
            data.load(DataConfig(str(tmp_path / "a.txt"), str(tmp_path / path)))
    with pytest.raises(DataError, match="leave one of them out"):
        data.load(DataConfig(str(tmp_path / "ids.npy"), "t.json"))


def test_too_little_data_for_a_batch(corpus):
    shape = dict(length=LENGTH, batch_size=1000)
    with pytest.raises(DataError, match="159 samples of 8 tokens, fewer than one"):
        data.training_batches(corpus, **shape, seed=0, rows=[0], position=0)
    shape["length"] = len(corpus.held_out)
    with pytest.raises(DataError, match="held-out part.*no sample"):
        data.held_out_batches(corpus, **shape, rows=[0], limit=1)


def test_all_held_out_samples_are_evaluated_once(corpus):
    shape = dict(length=LENGTH, batch_size=16, rows=range(8, 16), limit=1000)
    held_out = data.held_out_batches(corpus, **shape)
    number = (len(corpus.held_out) - 1) // LENGTH
    assert len(held_out.batches) == number // 16
    assert all(len(batch["tokens"]) == 8 for batch in held_out.batches)
    assert len(held_out.rest["tokens"]) == number % 16 > 0
    np.testing.assert_array_equal(
        held_out.rest["targets"][-1], corpus.held_out[:][LENGTH * number - 7 :][:LENGTH]
    )


def test_rows_are_padded_unevenly_and_none_wholly(corpus):
    (batch,) = batches(corpus, 1)
    padded = data.padded_unevenly(batch)
    lengths = padded["weights"].sum(axis=1)
    assert lengths[0] == 1 and lengths[-1] == LENGTH
    assert (np.diff(lengths) >= 0).all()
    assert (np.diff(padded["weights"], axis=1) <= 0).all()
    assert padded["weights"].dtype == np.float32
    assert padded["tokens"] is batch["tokens"]
    one_row = {name: leaf[:1] for name, leaf in batch.items()}
    assert data.padded_unevenly(one_row)["weights"].sum() == 1
