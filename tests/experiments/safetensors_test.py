"""Files of safetensors: the package's own files, files that lie, files that change."""

import json
import os
import struct

import numpy as np
import pytest
import safetensors.numpy

from experiments.interchange.hugging_face_files import stored_tensors
from meshpar.errors import DataError

TENSORS = {
    "one": np.arange(12, dtype=np.float32).reshape(3, 4),
    "two": np.arange(6, dtype=np.float16),
    "none": np.zeros((0, 3), np.float64),
}


@pytest.fixture
def path(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_tensors_are_those_of_the_package(path):
    found = stored_tensors(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        elements = tensor.elements(0, TENSORS[name].size)
        assert elements.dtype == TENSORS[name].dtype
        np.testing.assert_array_equal(elements.reshape(tensor.shape), TENSORS[name])
    rows = found["one"].rows(1, 2).elements(0, 8)
    np.testing.assert_array_equal(rows.reshape(2, 4), TENSORS["one"][1:])


def with_header(header, data=bytes(48)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(3, 4), place=(0, 48)):
    return {"one": dict(dtype=dtype, shape=shape, data_offsets=place)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        with_header(b"[]"),
        with_header(b"\xff\xfe"),
        with_header(b"[" * 100_000),
        with_header({"one": 7}),
        with_header(entry(shape=[3, -4])),
        with_header(entry(shape=[3, 4.0])),
        with_header(entry(shape=[True, 12])),
        with_header(entry(shape=None)),
        with_header(entry(place=[0, 10**9])),
        with_header(entry(place=[48, 0])),
        with_header(entry(place=[0])),
        with_header(entry(dtype=["F32"])),
        with_header(entry(dtype="I64")),
        with_header(entry(), bytes(47)),
    ],
)
def test_a_file_that_lies_is_an_error(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors"):
        stored_tensors(path)


def test_weights_that_are_cut_between_two_tensors_are_an_error(path):
    found = stored_tensors(path)
    found["one"].elements(0, 12)
    os.truncate(path, 40)
    with pytest.raises(DataError, match="was cut.*seen at the tensor one"):
        found["one"].elements(0, 12)
