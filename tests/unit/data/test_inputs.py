"""The documents of an input: patterns and URLs give the same documents under the same names as a folder."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.corpus import open_corpus
from megatrain.data.input_file import local_file, url_file
from tests.helpers.built_data import build_data
from tests.helpers.require import require_module
from tests.helpers.s3_server import s3_server

FILES = {
    "a.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "b.txt.gz": gzip.compress(b"three"),
    "c.md": b"no document",
    "deep/d.txt": b"four",
}


def names_and_texts(*inputs: str | Path) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in open_corpus([str(source) for source in inputs]).documents()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "corpus"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """The same files in a store that is not a disk."""
    store = fsspec.filesystem("memory")
    for name, content in FILES.items():
        store.pipe_file(f"/corpus/{name}", content)
    yield "memory://corpus"
    store.rm("/corpus", recursive=True)


def test_patterns_give_what_the_folder_gives(folder: Path) -> None:
    everything = names_and_texts(folder)
    assert [name for name, _ in everything] == ["0/a.jsonl", "0/a.jsonl", "0/b.txt.gz", "0/deep/d.txt"]
    assert names_and_texts(f"{folder}/**") == everything
    assert names_and_texts(f"{folder}/*.jsonl") == everything[:2]
    assert names_and_texts(f"{folder}/d*/?.[st]xt") == everything[3:]
    assert names_and_texts(folder.parent / "c*" / "b.*") == [("0/corpus/b.txt.gz", "three")]
    assert open_corpus([f"{folder}/*"]).left_out == {"files of another kind (.md)": [f"{folder}/c.md"]}


def test_patterns_are_relative_to_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert names_and_texts("*.jsonl", "d*/*") == [
        ("0/a.jsonl", "one"), ("0/a.jsonl", "two"), ("1/deep/d.txt", "four"),
    ]  # fmt: skip


def test_files_with_wildcards_in_their_names_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("literal")
    (tmp_path / "a1.txt").write_text("matched")
    assert names_and_texts(tmp_path / "a[1].txt") == [("0/a[1].txt", "literal")]


def test_urls_give_what_the_folder_gives(folder: Path, url: str) -> None:
    everything = names_and_texts(folder)
    for root in (url, f"file://{folder}"):
        assert names_and_texts(root) == everything
        assert names_and_texts(f"{root}/*.jsonl") == everything[:2]
        assert names_and_texts(f"{root}/deep/d.txt") == [("0/d.txt", "four")]
        assert open_corpus([root]).left_out == {"files of another kind (.md)": [f"{root}/c.md"]} or root == url


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_url(folder: Path) -> Iterator[str]:
    """The same folder behind a real HTTP server that does not support ranges."""
    require_module("aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def built_bytes(inputs: list[str], output: Path) -> dict[str, bytes]:
    """Build a data directory; return its token files."""
    require_module("tokenizers")
    build_data(inputs, output, tokenizer_path=Path("bytes"), validation_fraction=0.3)
    return {path.name: path.read_bytes() for path in sorted(output.iterdir()) if path.suffix in (".bin", ".idx")}


def test_build_over_http_is_that_of_the_files(folder: Path, http_url: str, tmp_path: Path) -> None:
    names = ("a.jsonl", "b.txt.gz", "deep/d.txt")
    expected = built_bytes([f"{folder}/{name}" for name in names], tmp_path / "local")
    assert built_bytes([f"{http_url}/{name}" for name in names], tmp_path / "http") == expected
    assert names_and_texts(f"{http_url}/d*/*.txt") == names_and_texts(f"{folder}/d*/*.txt")
    with pytest.raises(DataError, match=rf"{http_url}/none\.txt: no such file or folder"):
        names_and_texts(f"{http_url}/none.txt")


def test_missing_driver_of_a_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    url = "https://127.0.0.1/a.txt"
    with pytest.raises(DataError, match=rf"{url}: no driver for https:// is installed .*; pip install aiohttp$"):
        names_and_texts(url)


@pytest.mark.slow
def test_build_over_s3_is_that_of_the_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = require_module("pyarrow")
    parquet = require_module("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["five", "six"]}), folder / "e.parquet")
    with s3_server(monkeypatch):
        fsspec.filesystem("s3").put(f"{folder}/", "bucket/corpus/", recursive=True)
        expected = built_bytes([str(folder)], tmp_path / "local")
        assert built_bytes(["s3://bucket/corpus"], tmp_path / "s3") == expected
        assert names_and_texts("s3://bucket/corpus/*.jsonl") == names_and_texts(f"{folder}/*.jsonl")
        with pytest.raises(DataError, match=r"s3://bucket/none: no such file or folder"):
            names_and_texts("s3://bucket/none")


@pytest.mark.usefixtures("url")
def test_inputs_that_hold_nothing_are_named() -> None:
    for source, message in [
        ("memory://nowhere/a.txt", r"memory://nowhere/a\.txt: no such file or folder"),
        ("memory://corpus/*.parquet", r"memory://corpus/\*\.parquet: no such file or folder"),
        ("memory://corpus/c.md", r"memory://corpus/c\.md: unknown kind of file \(\.md\)"),
        ("memory://corpus/*.md", r"memory://corpus/\*\.md: no documents: no file of a known kind"),
        ("nothing*/*.txt", r"nothing\*/\*\.txt: no documents: no file of a known kind"),
        ("foo://x/a.txt", "foo://x/a.txt: cannot be opened: ValueError: Protocol not known: foo"),
        ("s3://me:secret@bucket/a.txt", r"s3://\.\.\.@bucket/a\.txt: a password in a URL"),
    ]:
        with pytest.raises(DataError, match=message):
            names_and_texts(source)


class BrokenFile:
    """A driver's file whose connection ends after some bytes, with an error of the driver."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, _size: int) -> bytes:
        if not self._content:
            raise RuntimeError("connection reset by peer")
        content, self._content = self._content, b""
        return content

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        pass


class BrokenStore:
    def open(self, _path: str, _mode: str) -> Any:
        return BrokenFile(b"half a line")

    def invalidate_cache(self) -> None:
        pass

    def info(self, _path: str) -> dict[str, int]:
        raise RuntimeError("503 slow down")


def test_errors_of_a_driver_name_the_url() -> None:
    file = url_file("odd://bucket/a.txt", BrokenStore(), "bucket/a.txt")
    with pytest.raises(OSError, match="RuntimeError: connection reset by peer"):
        file.open().read()
    with pytest.raises(DataError, match=r"odd://bucket/a\.txt: cannot be read: RuntimeError: 503 slow down"):
        file.version()


def test_version_of_a_file_changes_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    stores = (local_file(path), url_file(f"file://{path}", fsspec.filesystem("file"), str(path)))
    before = [file.version() for file in stores]
    assert before == [file.version() for file in stores]
    assert {version.num_bytes for version in before} == {3}
    path.write_text("two")
    os.utime(path, ns=(0, 1))
    assert all(old != file.version() for old, file in zip(before, stores, strict=True))


class HadoopStore:
    """Describes a file as fsspec's webhdfs driver does: by WebHDFS's FileStatus, with `type` and `size`."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {"accessTime": 5, "modificationTime": 5, "fileId": 7, "size": 3, "type": "file"}

    def invalidate_cache(self) -> None:
        pass

    def info(self, _path: str) -> dict[str, Any]:
        return self.status


def test_version_of_a_file_stays_when_it_is_read() -> None:
    store = HadoopStore()
    file = url_file("webhdfs://host/a.txt", store, "/a.txt")
    before = file.version()
    store.status["accessTime"] = 3_600_005
    assert file.version() == before
    store.status["modificationTime"] = 6
    assert file.version() != before


def test_position_counts_the_bytes_of_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(100_000)))
    file = local_file(path)
    assert file.position() == 0
    with file.open() as raw, gzip.open(raw) as text:
        text.read(40_000)
        assert 40_000 <= file.position() <= 60_000
