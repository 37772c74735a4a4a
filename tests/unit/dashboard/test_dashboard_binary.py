"""The container of typed arrays: arrays survive packing, aligned so that a browser can view them in place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_dashboard.responses.binary import MAGIC, pack, unpack
from tests.helpers.refusals import refusal

NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
ARRAYS = st.sampled_from(["u1", "i4", "f4", "f8"]).flatmap(
    lambda dtype: st.tuples(st.integers(0, 5), st.integers(0, 5)).map(
        lambda shape: (np.arange(shape[0] * shape[1]) % 200).astype(dtype).reshape(shape)
    )
)


@given(arrays=st.dictionaries(NAMES, ARRAYS, max_size=5), text=st.text('a"\\\n\u00e9\u4e2d\U0001f600', max_size=20))
@settings(max_examples=30)
def test_packed_arrays_come_back_aligned(arrays: dict[str, np.ndarray], text: str) -> None:
    body = pack({"text": text, "number": 1.5}, arrays)

    fields, found = unpack(body)

    assert fields == {"text": text, "number": 1.5}
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    begin = 8 + int.from_bytes(body[4:8], "little")
    assert begin % 8 == 0
    for load in json.loads(body[8:begin])["arrays"]:
        assert (begin + load["offset"]) % 8 == 0


def test_layout_of_the_bytes_is_that_of_the_page() -> None:
    body = pack({"unit": "s"}, {"a": np.array([1, 258], dtype=np.int32), "b": np.array([[7]], dtype=np.uint8)})

    begin = 8 + int.from_bytes(body[4:8], "little")
    assert body[:4] == MAGIC == b"MTA1"
    assert json.loads(body[8:begin]) == {
        "unit": "s",
        "arrays": [
            {"name": "a", "dtype": "i4", "shape": [2], "offset": 0, "bytes": 8},
            {"name": "b", "dtype": "u1", "shape": [1, 1], "offset": 8, "bytes": 1},
        ],
    }
    assert body[begin:] == bytes([1, 0, 0, 0, 2, 1, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0])


def test_arrays_in_any_order_of_memory_and_bytes_are_packed() -> None:
    turned = np.arange(6, dtype=">i4").reshape(2, 3).T

    _, found = unpack(pack({}, {"a": turned}))

    np.testing.assert_array_equal(found["a"], turned)
    assert found["a"].dtype == np.dtype("<i4")


@pytest.mark.parametrize(
    ("fields", "array", "message"),
    [
        ({}, np.zeros(1, dtype=np.int64), "a: an array of int64; pages can read u1, i4, f4, f8"),
        ({}, np.zeros(1, dtype=bool), "an array of bool"),
        ({"arrays": 1}, np.zeros(1, dtype=np.uint8), "use another name"),
        ({"x": float("nan")}, np.zeros(1, dtype=np.uint8), "JSON compliant"),
    ],
)
def test_arrays_that_a_page_cannot_read_are_refused(fields: dict[str, object], array: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(fields, {"a": array})


def test_bytes_of_another_format_are_refused() -> None:
    for body in (b"", b"MTA1", b"MTA2\0\0\0\0", b"<!DOCTYPE html>"):
        assert "not a container of arrays" in refusal(ValueError, unpack, body), body
