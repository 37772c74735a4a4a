"""Reading documents: the resulting texts, and the report of each kind of bad input."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.corpus import open_corpus
from megatrain.data.formats import LONGEST_PIECE_BYTES
from megatrain.data.inputs import PYTHON_STDLIB
from tests.helpers.require import require_module
from tests.helpers.waiting import DEADLINE_S


def texts(*inputs: Path | str, text_key: str = "text") -> list[str]:
    return [document.text for document in open_corpus([str(source) for source in inputs], text_key).documents()]


def test_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.txt").write_text("third")
    (tmp_path / "notes.md").write_text("no document")

    documents = list(open_corpus([str(tmp_path)]).documents())

    assert [document.text for document in documents] == ["first", "second", "third"]
    assert [document.name for document in documents] == ["0/a.jsonl", "0/b.txt", "0/c/d.txt"]


LINES = [f"text {number} \u00e9" for number in range(3000)]
JSON_LINES = "".join(json.dumps({"text": text}) + "\n" for text in LINES).encode()
JSON_ARRAY = b"[" + JSON_LINES.strip().replace(b"\n", b",\n") + b"]"


def zstd(content: bytes) -> bytes:
    pyarrow = require_module("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd, ".GZ": gzip.compress,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [*((".jsonl", suffix) for suffix in COMPRESS), (".JSONL", ""), (".ndjson", ""), (".json", ""), (".json", ".gz")],
)
def test_every_kind_is_read_in_every_case_and_compression(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"docs{kind}{suffix}"
    path.write_bytes(COMPRESS[suffix](JSON_LINES))
    assert texts(path) == LINES
    assert texts(tmp_path) == LINES


def test_a_json_file_may_hold_one_array(tmp_path: Path) -> None:
    (tmp_path / "docs.json").write_bytes(JSON_ARRAY)
    assert texts(tmp_path) == LINES
    (tmp_path / "docs.json").write_text('[{"text": "a"}, {"body": "b"}]')
    with pytest.raises(DataError, match=r"docs\.json: element 1: has no key 'text' \(keys: body\)"):
        texts(tmp_path)
    (tmp_path / "docs.json").write_text("[]")
    with pytest.raises(DataError, match=r"docs\.json: holds no text"):
        texts(tmp_path)


def test_ignored_files_are_counted_and_refused_when_strict(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.txt").write_text("a package's text")
    (tmp_path / "b.TXT").write_text("loud")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("linked")
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("site-packages", "b.TXT", "elsewhere"):
        (folder / name).symlink_to(tmp_path / name)
    (folder / "ring").symlink_to(folder)
    (folder / "own").mkdir()
    (folder / "own" / "d.txt").write_text("own")
    (folder / "again").symlink_to(folder / "own")
    for name in ("one.md", "two.MD", "three.md", "four.md", "no-suffix"):
        (folder / name).write_text("no document")
    corpus = open_corpus([str(folder)])
    skipped: Counter[str] = Counter()
    assert [document.text for document in corpus.documents(skipped)] == ["loud", "linked", "own", "a package's text"]
    kinds = {"files of another kind (.md)": 4, "files of another kind (no suffix)": 1}
    assert skipped == {**kinds, "folders that are read already": 2}
    with pytest.raises(DataError, match=r"corpus/again and .*corpus/ring: folders that are read already; .*--strict"):
        corpus.check_complete()
    (folder / "ring").unlink()
    (folder / "again").unlink()
    (folder / "no-suffix").unlink()
    with pytest.raises(DataError, match=r"four\.md, .*one\.md, .*three\.md and .*: files of another kind"):
        open_corpus([str(folder)]).check_complete()
    for path in folder.glob("*.[mM][dD]"):
        path.unlink()
    open_corpus([str(folder)]).check_complete()


def test_folders_too_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    names = [f"{number * 37 % 100:02}" for number in range(30)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    assert texts(tmp_path) == sorted(names)


def test_jsonl_takes_the_named_key_and_counts_empty_records(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('\ufeff{"body": "caf\\u00e9", "id": 1}\n\n{"body": ""}\n{"body": "last"}', encoding="utf-8")
    skipped: Counter[str] = Counter()

    documents = list(open_corpus([str(path)], "body").documents(skipped))

    assert [(document.record, document.text, document.num_bytes) for document in documents] == [
        (0, "caf\u00e9", 5),
        (2, "last", 4),
    ]
    assert skipped == {"empty records": 1}


@pytest.mark.parametrize("end", ["\nsecond line\n\n", "\n"])
def test_long_txt_is_cut_at_blank_lines_or_else_after_lines(end: str, tmp_path: Path) -> None:
    text = "".join(f"line {number} of many{end}" for number in range(8000))
    path = tmp_path / "book.txt"
    path.write_text(text)

    pieces = texts(path)

    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert all(len(piece) <= LONGEST_PIECE_BYTES for piece in pieces)
    assert all(piece.endswith(end) for piece in pieces)


def test_a_long_txt_without_lines_is_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    for shift in range(4):
        text = "x" * shift + "\U0001f600" * 50_000
        path.write_text(text, encoding="utf-8")
        pieces = texts(path)
        assert "".join(pieces) == text, shift
        assert all(LONGEST_PIECE_BYTES - 4 < len(piece.encode()) <= LONGEST_PIECE_BYTES for piece in pieces[:-1])


def test_the_standard_library_is_read_without_installed_packages(tmp_path: Path) -> None:
    skipped: Counter[str] = Counter()
    names = [document.name for document in open_corpus([PYTHON_STDLIB]).documents(skipped)]
    assert "0/argparse.py" in names
    assert len(names) > 300
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    root = Path(sysconfig.get_path("stdlib"))
    if (root / "test" / "encoded_modules" / "module_koi8_r.py").exists():
        assert "0/test/encoded_modules/module_koi8_r.py" not in names
        assert skipped["library files without UTF-8 text"] > 0


@pytest.mark.slow
def test_reading_a_corpus_loads_neither_torch_nor_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    script = (
        "import sys; from megatrain.data.corpus import open_corpus; "
        f"documents = list(open_corpus([{str(tmp_path)!r}]).documents()); "
        "print(len(documents), sorted({'torch', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=DEADLINE_S, capture_output=True, text=True
    )
    assert done.stdout == "1 []\n"


BAD_FILES = [
    # of another kind than its name indicates
    (
        "a.txt",
        gzip.compress(b"text"),
        r"a\.txt: its content is that of a \.gz file, .* rename it to a.txt.gz",
    ),
    ("a.jsonl", b"PK\x03\x04....", r"a\.jsonl: its content is that of a \.zip file"),
    ("a.json", b"PAR1....", r"a\.json: its content is that of a \.parquet file"),
    ("a.txt.gz", b"plain text", r"a\.txt\.gz: is not a \.gz file: it starts with b'plain"),
    (
        "a.jsonl.gz",
        gzip.compress(JSON_LINES)[:-20],
        r"a\.jsonl\.gz: the \.gz file is damaged or cut short before byte \d+: ",
    ),
    ("a.jsonl.bz2", bz2.compress(JSON_LINES)[:-20], r"a\.jsonl\.bz2: the \.bz2 file is damaged or cut short"),
    ("a.jsonl.xz", lzma.compress(JSON_LINES)[:-20], r"a\.jsonl\.xz: the \.xz file is damaged or cut short"),
    ("a.parquet.gz", gzip.compress(b"PAR1"), r"a\.parquet\.gz: is not a readable Parquet file"),
    ("a.arrow", b"ARROW1 but not really", r"a\.arrow: is not a readable Arrow file"),
    ("a.tar.gz", gzip.compress(b"text"), r"a\.tar\.gz: unknown kind of file \(\.tar\.gz\)"),
    # of the right kind
    ("empty.txt", b"", r"empty\.txt: holds no text; remove the file"),
    ("blank.txt", b" \n\n", r"blank\.txt: holds no text"),
    ("latin.txt", b"ok\nfine\ncaf\xe9 \n", r"latin\.txt:3: is not UTF-8 \(byte 0xe9"),
    ("late.txt", b"line\n" * 20_000 + b"\xff", r"late\.txt:20001: is not UTF-8 \(byte 0xff"),
    ("empty.jsonl", b"\n\n", r"empty\.jsonl: holds no text"),
    ("bad.jsonl", b'{"text": "a"}\n{"text": \n', r"bad\.jsonl:2: is not JSON"),
    ("deep.jsonl", b"[" * 100_000, r"deep\.jsonl:1: is not JSON"),
    ("list.jsonl", b"[1]", r"list\.jsonl:1: is of type list; each record must be one JSON object"),
    ("key.jsonl", b'{"body": "a"}', r"key\.jsonl:1: has no key 'text' \(keys: body\); name the text's key with"),
    ("null.jsonl", b'{"text": null}', r"null\.jsonl:1: the value of 'text' is null, but must be text"),
    ("latin.jsonl", b'{"text": "caf\xe9"}', r"latin\.jsonl:1: is not UTF-8"),
    ("utf16.txt", "text".encode("utf-16"), r"utf16\.txt:1: is not UTF-8 \(byte 0xff"),
    ("utf16.jsonl", '{"text": "a"}'.encode("utf-16"), r"utf16\.jsonl:1: is not UTF-8 \(byte 0xff"),
    ("utf16.json", b"\xfe\xff" + '[{"text": "a"}]'.encode("utf-16-be"), r"utf16\.json:1: is not UTF-8 \(byte 0xfe"),
    ("mark.jsonl", '{"text": "a"}\n\ufeff{"text": "b"}\n'.encode(), r"mark\.jsonl:2: is not JSON \(.*BOM"),
    ("half.jsonl", b'{"text": "\\ud800"}', r"half\.jsonl:1: 'text' holds half of a surrogate pair"),
    ("notes.md", b"# text", r"notes\.md: unknown kind of file \(\.md\); use \.txt, .*\.jsonl, .*\.parquet"),
]


def test_bad_file_is_named(tmp_path: Path) -> None:
    for number, (name, content, message) in enumerate(BAD_FILES):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            texts(path)


def test_missing_unreadable_and_fruitless_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt: no such file or folder"):
        texts(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"no documents: no file of a known kind: \.txt, "):
        texts(tmp_path)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"dangling\.txt: cannot be read: No such file"):
        texts(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_forbidden_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "secret.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    path.chmod(0)
    with pytest.raises(DataError, match=r"secret\.jsonl: cannot be read: Permission denied"):
        texts(path)
