"""The index of a checkpoint: reading returns what was written, and an inconsistent index is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.checkpoint_format.index_file import CheckpointIndex
from megatrain.checkpoint_format.stored_tensors import (
    DTYPE_BYTES,
    MAX_BYTES,
    StoredItem,
    StoredTensor,
    StoredTensors,
)
from megatrain.contracts.errors import CheckpointError
from tests.helpers.work import assert_grows_linearly

DIGEST = "sha256:" + "0" * 64
FILE, OTHER_FILE = "r000002-rank-00000.distcp", "r000002-rank-00001.distcp"
STORED = StoredTensors(
    {
        "model.w": StoredTensor(
            "model.w",
            "float32",
            (4, 6),
            (
                StoredItem((0, 0), (3, 6), FILE, 0, 1000),
                StoredItem((3, 0), (1, 6), OTHER_FILE, 64, 24),
            ),
        ),
        "model.scale": StoredTensor("model.scale", "bfloat16", (), (StoredItem((), (), FILE, 1024, 500),)),
        "model.empty": StoredTensor("model.empty", "int64", (0, 3), ()),
    },
)


def document() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(CheckpointIndex(DIGEST, STORED).encode())
    return raw


def read(raw: object) -> CheckpointIndex:
    return CheckpointIndex.decode(json.dumps(raw).encode(), "c/index.json")


def test_index_round_trip() -> None:
    assert read(document()) == CheckpointIndex(DIGEST, STORED)
    assert list(read(document()).stored.tensors) == list(STORED.tensors)


def test_every_dtype_of_torch_is_known() -> None:
    dtypes = {found for found in vars(torch).values() if isinstance(found, torch.dtype)}

    assert {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}.items() <= DTYPE_BYTES.items()


def test_index_document_has_the_documented_form() -> None:
    assert document() == {
        "schema_version": 1,
        "metadata": DIGEST,
        "files": [FILE, OTHER_FILE],
        "tensors": {
            "model.w": {"dtype": "float32", "shape": [4, 6], "items": [0, 0, 1000, 0, 0, 3, 6, 1, 64, 24, 3, 0, 1, 6]},
            "model.scale": {"dtype": "bfloat16", "shape": [], "items": [0, 1024, 500]},
            "model.empty": {"dtype": "int64", "shape": [0, 3], "items": []},
        },
    }


def with_tensor(**changes: Any) -> dict[str, Any]:
    raw = document()
    raw["tensors"] = {"w": {"dtype": "float32", "shape": [4, 6], "items": [0, 0, 1000, 0, 0, 4, 6], **changes}}
    return raw


def with_item(*numbers: Any) -> dict[str, Any]:
    return with_tensor(items=list(numbers))


def with_file(name: Any) -> dict[str, Any]:
    return {**document(), "files": [name, FILE]}


MISFITS: list[tuple[Any, str]] = [
    ([], r"c/index\.json: a list, expected a JSON object; the index is damaged or forged"),
    ({**document(), "schema_version": 2}, r"schema_version=2, this program reads 1; use the program that wrote it"),
    ({**document(), "more": 1}, r"more=1; no such field in schema version 1"),
    ({**document(), "metadata": None}, r"metadata=None; expected a string"),
    ({**document(), "files": "a"}, r"files='a'; expected a list of file names"),
    (with_file(3), r"expected a list of file names"),
    (with_file("../b"), r"a file is '\.\./b', expected a path inside the checkpoint directory"),
    (with_file("/etc/passwd"), r"a file is '/etc/passwd'"),
    (with_file("s3://bucket/a"), r"a file is 's3://bucket/a'"),
    (with_file("a\0b"), r"a file is 'a\\x00b'"),
    (with_file("a" * 2000), r"a file is 'a{120}\.\.\.'"),
    ({**document(), "tensors": []}, r"tensors=\[\]; expected an object"),
    ({**document(), "tensors": {"w": 3}}, r"'w': expected an object with dtype, shape and items"),
    (with_tensor(more=1), r"'w': expected an object with dtype, shape and items"),
    (with_tensor(dtype=3), r"'w': expected an object with dtype, shape and items"),
    (with_tensor(dtype="float33"), r"'w': its dtype is 'float33', which torch does not have"),
    (with_tensor(shape=[4, 6.0]), r"'w': expected a list of integers"),
    (with_tensor(shape=[4, True]), r"'w': expected a list of integers"),
    (with_tensor(shape=[-4, 6]), r"'w': expected integers of at least 0 and below 2\^63"),
    (with_tensor(shape=[2**63, 6]), r"'w': expected integers of at least 0 and below 2\^63"),
    (with_tensor(shape=[1] * 65, items=[]), r"'w': its shape has 65 dims, expected at most 64"),
    (with_tensor(shape=[4, 7]), r"'w': its boxes have 24 elements, and the shape \(4, 7\) has 28"),
    (with_tensor(items=[]), r"'w': its boxes have 0 elements, and the shape \(4, 6\) has 24"),
    (
        with_item(0, 0, 1000, 0, 0, 4),
        r"'w': expected 7 numbers for each item, the first of them the number of a listed file",
    ),
    (
        with_item(2, 0, 1000, 0, 0, 4, 6),
        r"'w': expected 7 numbers for each item, the first of them the number of a listed file",
    ),
    (with_item(0, 0, 1000, 1, 0, 4, 6), r"the box of \(4, 6\) at \(1, 0\) is not inside the shape \(4, 6\)"),
    (with_item(0, 0, 95, 0, 0, 4, 6), r"95 bytes are stored for the box of \(4, 6\) at \(0, 0\), which needs 96"),
    (with_item(0, 2**63 - 1, 1000, 0, 0, 4, 6), r"'w': the end in the file is 9223372036854776807"),
    (
        {**document(), "tensors": {"k" * 5000: {"dtype": "int8", "shape": [], "items": [0, 0, 1]}}},
        r"the key 'k{120}\.\.\.' has more than 4096 characters",
    ),
]


def test_an_index_that_does_not_fit_is_refused() -> None:
    for raw, message in MISFITS:
        with pytest.raises(CheckpointError, match=message) as caught:
            read(raw)
        assert len(str(caught.value)) < 1000


def test_malformed_index_is_refused() -> None:
    long_number = b'{"schema_version": 1, "files": [' + b"1" * 5000 + b"]}"
    for content in (b"", b"\xff", b"{", b"[" * 10**5, long_number, b"NaN"):
        with pytest.raises(CheckpointError, match="x: "):
            raise AssertionError(f"accepted: {content[:40]!r}: {CheckpointIndex.decode(content, 'x')}")


def test_oversized_index_is_not_read() -> None:
    with pytest.raises(
        CheckpointError, match=r"268435457 bytes, more than the 268435456 that the description of a checkpoint may have"
    ):
        CheckpointIndex.decode(bytes(MAX_BYTES + 1), "x")


MADE_UP: dict[str, Callable[[int], dict[str, Any]]] = {
    "dims": lambda size: with_tensor(shape=[2**62] * size, items=[]),
    "large-dims": lambda size: with_tensor(shape=[2**62] * 64, items=[]),
    "items": lambda size: with_tensor(items=[0] * size),
    "tensors": lambda size: {
        **document(), "tensors": {f"w{n}": {"dtype": "int8", "shape": [], "items": []} for n in range(size // 10)}
    },
}  # fmt: skip


@pytest.mark.slow(kept=["large-dims", "items"])
@pytest.mark.parametrize("what", MADE_UP)
def test_sizes_that_were_made_up_take_no_memory(what: str) -> None:
    content = json.dumps(MADE_UP[what](10**5)).encode()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            CheckpointIndex.decode(content, "x")
        assert tracemalloc.get_traced_memory()[1] < 100 * len(content)
    finally:
        tracemalloc.stop()


@pytest.mark.slow(kept=["items", "tensors"])
@pytest.mark.parametrize("what", MADE_UP)
def test_made_up_sizes_take_work_linear_in_the_files_bytes(what: str) -> None:
    def refuse(content: bytes) -> None:
        with pytest.raises(CheckpointError):
            CheckpointIndex.decode(content, "x")

    assert_grows_linearly(lambda size: partial(refuse, json.dumps(MADE_UP[what](size)).encode()), 2_000)


@given(st.integers(0, len(CheckpointIndex(DIGEST, STORED).encode()) - 1), st.binary(max_size=3))
def test_damage_is_refused_or_harmless(at: int, put: bytes) -> None:
    content = CheckpointIndex(DIGEST, STORED).encode()
    with suppress(CheckpointError):
        found = CheckpointIndex.decode(content[:at] + put + content[at + 1 :], "x")
        assert found.stored.problem() is None
