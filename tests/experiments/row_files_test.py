"""Files of rows: a field of every row is a document; whatever else is a clear error."""

import builtins
import csv
import gzip
import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from experiments import data
from experiments.data import DataConfig
from meshpar.errors import DataError

TEXTS = ["first", "the second,\nof two lines", 'a "third" ä', "x" * 200_000]


def rows(texts=TEXTS, field="text"):
    return [{"id": number, field: text} for number, text in enumerate(texts)]


def write(path, found):
    """Writes rows as the suffixes of a path say."""
    path.parent.mkdir(exist_ok=True)
    if ".parquet" in path.name:
        parquet.write_table(pyarrow.Table.from_pylist(found), path)
        return path
    opens = gzip.open if path.suffix == ".gz" else open
    with opens(path, "wt", encoding="utf-8", newline="") as file:
        if ".csv" in path.name or ".tsv" in path.name:
            delimiter = "\t" if ".tsv" in path.name else ","
            table = csv.DictWriter(file, list(found[0]), delimiter=delimiter)
            table.writeheader()
            table.writerows(found)
        else:
            file.writelines(json.dumps(row) + "\n" for row in found)
    return path


def documents(config):
    corpus = data.load(config)
    whole = np.concatenate([corpus.train, corpus.held_out])
    return corpus.decode(whole.tolist()).split("\0")


NAMES = [
    *("a.jsonl", "a.jsonl.gz", "a.json.gz", "a.JSON", "a.ndjson", "a.parquet"),
    *("a.csv", "a.csv.gz", "a.tsv"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_a_document_in_the_order_of_the_file(name, tmp_path):
    path = write(tmp_path / name, rows(field="content"))
    limit = csv.field_size_limit()
    assert documents(DataConfig(str(path), field="content")) == TEXTS
    assert csv.field_size_limit() == limit


def test_files_are_read_in_the_order_of_their_paths_and_hidden_ones_are_not(tmp_path):
    write(tmp_path / "b.jsonl", rows(["2", "3"]))
    write(tmp_path / "a.json.gz", rows(["1", " "]))
    write(tmp_path / "sub" / "c.ndjson", rows(["4"]))
    (tmp_path / ".gitattributes").write_text("a file of another kind")
    assert documents(DataConfig(str(tmp_path))) == ["1", "2", "3", "4"]
    assert documents(DataConfig(str(tmp_path / "*.json*"))) == ["1", "2", "3"]


def test_every_form_of_the_same_rows_has_one_fingerprint(tmp_path):
    paths = [write(tmp_path / name, rows()) for name in ("a.jsonl", "a.parquet")]
    one, two = (data.load(DataConfig(str(path))).fingerprint for path in paths)
    assert one == two
    write(paths[0], rows([*TEXTS[:3], "y" * 200_000]))
    assert data.load(DataConfig(str(paths[0]))).fingerprint != one


def test_rows_are_packed_whole_and_tokenized(tmp_path):
    import tokenizers

    words = {"the": 0, "cat": 1, "sat": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tokenizer := tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", rows(["the cat", "sat", "cat cat sat"] * 10))
    corpus = data.load(DataConfig(str(path), str(tokenizer), held_out=0.1, pack=True))
    assert corpus.train_starts.tolist()[:4] == [0, 2, 3, 6]
    np.testing.assert_array_equal(corpus.train[:6], [0, 1, 2, 1, 1, 2])
    segments = data.PackedSamples(corpus.train, corpus.train_starts, 4)[0]["segments"]
    assert segments.tolist() == [0, 0, 1, 1]


CUT_OFF = gzip.compress(b"{}" * 99, mtime=0)[:-9]  # Names of tests hold its bytes.
GOOD = '{"text": "good"}\n'


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", f"{GOOD}\n{{broken\n", r"a.jsonl, line 3: .*broken.* is not JSON"),
        ("a.jsonl", "[\n{}]", r"line 1: .* write one object in each line, as jq -c"),
        ("a.json", "[1, 2]", r"line 1: \[1, 2\] is not an object; write one"),
        ("a.jsonl", f'{GOOD}"text"', 'line 2: "text" is not an object'),
        ("a.jsonl", "[" * 100_000, "line 1: .*100,0.. characters.* is not JSON"),
        ("a.jsonl", b"\xff", "is not JSON"),
        (
            "a.jsonl",
            '{"txet": "a"}',
            "no field 'text'.*did you mean 'txet'.*data.field",
        ),
        ("a.jsonl", f"{GOOD}{{}}", "line 2: there is no field 'text' .it has none"),
        ("a.jsonl", '{"text": null}', "line 1: 'text' is None, and not a text; write"),
        ("a.jsonl", '{"text": [1]}', r"'text' is \[1\], and not a text"),
        ("a.jsonl", r'{"text": "\ud800"}', "'text' is not Unicode"),
        ("a.jsonl", r'{"text": "a\u0000"}', "holds a zero character.*remove it"),
        ("a.jsonl", "", "a.jsonl holds no row"),
        ("a.jsonl", '{"text": " "}', "the field 'text' is empty in all rows"),
        ("a.jsonl.gz", "no gzip", "a.jsonl.gz cannot be read.*give whole files"),
        ("a.jsonl.gz", CUT_OFF, "a.jsonl.gz cannot be read"),
        ("a.csv", "", "a.csv holds no row"),
        ("a.csv", "id;text\n1;a", "a.csv: there is no field 'text' .known: id;text"),
        ("a.csv", "id,text\n1\n", "line 2: the row has not as many columns .* 2; put"),
        ("a.tsv", "id\ttext\n1\ta\tb", r"line 2: .* that hold '\\t' in quotes"),
        ("a.csv", 'text\n"a"b\n', "a.csv cannot be read"),
        ("a.csv", b"text\n\xff", "a.csv cannot be read.*in UTF-8"),
        ("a.parquet", "no table", "a.parquet cannot be read as parquet"),
    ],
)
def test_bad_rows_are_named_with_their_place(name, content, words, tmp_path):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        data.load(DataConfig(str(tmp_path)))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "found, words",
    [
        ([{"texts": "a"}], "a.parquet: there is no field 'text'.*did you mean 'texts'"),
        ([{"text": "a"}, {"text": None}], "row 2: 'text' is None, and not a text"),
        ([{"text": 3}], "row 1: 'text' is 3"),
    ],
)
def test_bad_tables_are_named_with_their_place(found, words, tmp_path):
    path = write(tmp_path / "a.parquet", found)
    with pytest.raises(DataError, match=words):
        data.load(DataConfig(str(path)))


def test_parquet_without_its_package_names_it(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", rows())
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="install pyarrow, or convert the file to JSON"):
        data.load(DataConfig(str(path)))


@pytest.mark.parametrize("other", ["b.txt", "b.csv", "b.parquet"])
def test_a_folder_of_two_kinds_names_both(other, tmp_path):
    write(tmp_path / "a.jsonl", rows())
    write(tmp_path / other, rows())
    words = rf"2 kinds, such as .*a.jsonl and .*{other}; give a glob .*/\*.jsonl"
    with pytest.raises(DataError, match=words):
        data.load(DataConfig(str(tmp_path)))
    assert documents(DataConfig(str(tmp_path / "*.jsonl"))) == TEXTS
