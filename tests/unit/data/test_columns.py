"""Parquet and Arrow files: every form gives the column's texts, and damage is reported with its place."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.corpus import open_corpus
from tests.helpers.require import require_module

pyarrow = require_module("pyarrow")
feather = require_module("pyarrow.feather")
ipc = require_module("pyarrow.ipc")
parquet = require_module("pyarrow.parquet")

ROWS = [f"row {number} \u00e9" for number in range(1000)]


def texts(path: Path, text_key: str = "body") -> list[str]:
    return [document.text for document in open_corpus([str(path)], text_key).documents()]


def table(kind: Any = None) -> Any:
    return pyarrow.table({"id": range(len(ROWS)), "body": pyarrow.array(ROWS, kind or pyarrow.string())})


def arrow_file(path: Path, content: Any) -> None:
    with ipc.new_file(path, content.schema) as writer:
        writer.write_table(content, 300)


def arrow_stream(path: Path, content: Any) -> None:
    with ipc.new_stream(path, content.schema) as writer:
        writer.write_table(content, 300)


def parquet_file(path: Path, content: Any) -> None:
    parquet.write_table(content, path, row_group_size=300)


WRITERS: dict[str, tuple[str, Callable[[Path, Any], None]]] = {
    "parquet": (".parquet", parquet_file),
    "parquet with zstd": (".pq", lambda path, content: parquet.write_table(content, path, compression="zstd")),
    "parquet of a short name": (".parq", parquet_file),
    "arrow file": (".arrow", arrow_file),
    "arrow stream": (".arrow", arrow_stream),
    "feather": (".feather", lambda path, content: feather.write_feather(content, path)),
    "arrow of a loud name": (".IPC", arrow_file),
}


@pytest.mark.parametrize("form", WRITERS)
def test_columns_of_every_form_give_the_named_texts(tmp_path: Path, form: str) -> None:
    suffix, write = WRITERS[form]
    path = tmp_path / f"docs{suffix}"
    write(path, table())
    assert texts(path) == ROWS
    with pytest.raises(DataError, match=rf"docs\{suffix}: has no column 'text'; choose one of id, body with"):
        texts(path, "text")
    with pytest.raises(DataError, match=rf"docs\{suffix}: row 0: column 'id' is of type int, but must be text"):
        texts(path, "id")
    write(path, table().slice(0, 0))
    with pytest.raises(DataError, match=rf"docs\{suffix}: holds no text"):
        texts(path)


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_columns_of_other_text_types_are_read(tmp_path: Path, kind: Any) -> None:
    arrow_file(tmp_path / "docs.arrow", table().set_column(1, "body", table()["body"].cast(kind)))
    assert texts(tmp_path) == ROWS


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, "zstd", asbytes=True))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "compression"),
    [*(("parquet", one) for one in COMPRESS), ("arrow stream", ".gz"), ("arrow stream", ".zst")],
)
def test_columns_of_compressed_files_are_read(tmp_path: Path, form: str, compression: str) -> None:
    suffix, write = WRITERS[form]
    plain = tmp_path / "plain"
    write(plain, table())
    path = tmp_path / f"docs{suffix}{compression}"
    path.write_bytes(COMPRESS[compression](plain.read_bytes()))
    plain.unlink()
    assert texts(tmp_path) == ROWS
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=rf"docs\{suffix}\{compression}: .*(damaged or cut short|not a readable)"):
        texts(path)


@pytest.mark.parametrize("form", WRITERS)
def test_damaged_columns_are_named_with_row_and_byte(tmp_path: Path, form: str) -> None:
    suffix, write = WRITERS[form]
    path = tmp_path / f"docs{suffix}"
    write(path, table())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(
        DataError, match=rf"docs\{suffix}: is not a readable .* \(after [\d,]+ rows?, before byte \d+\)"
    ):
        texts(path)


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "Parquet"), ("a.arrow", "Arrow"), ("a.txt.zst", r"\.zst")])
def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd" if name.endswith(".zst") else b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=rf"{name}: reading {kind} needs pyarrow; pip install 'megatrain\[data\]'"):
        texts(tmp_path)
