"""`megatrain logs classify`."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from megatrain import cli
from megatrain.contracts.exit_codes import ExitCode

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total capacity of 80 GiB"


def written(directory: Path, *cases: object) -> str:
    file = directory / "logs with a space.jsonl"
    file.write_text("\n".join(case if isinstance(case, str) else json.dumps(case) for case in cases) + "\n")
    return str(file)


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_logs_and_bundles_are_classified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(
        tmp_path, {"id": "a", "log": OOM}, "", {"id": 7, "ranks": {"0": "step 1", "1": "[rank1]: KeyError: 'x'"}}
    )

    assert cli.main(["logs", "classify", file, "--json"]) == 0

    log, bundle = answers(capsys.readouterr().out)
    wanted = {"id": "a", "label": "cuda_oom", "action": "stop_user", "cascade": False, "culprit": "gpu 5"}
    assert wanted.items() <= log.items()
    assert "root_rank" not in log
    wanted = {
        "id": 7,
        "label": "user_code",
        "action": "stop_user",
        "cascade": False,
        "culprit": "rank 1",
        "root_rank": 1,
    }
    assert wanted.items() <= bundle.items()


def test_output_for_people_has_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, {"id": "a", "ranks": {"0": "step 1", "1": "\x1b[31m[rank1]: KeyError: 'x\x07'"}})

    assert cli.main(["logs", "classify", file]) == 0

    out = capsys.readouterr().out
    assert "a: user_code; action stop_user\n  began at rank 1: its log names" in out
    assert "\x07" not in out


def test_standard_input_is_classified(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"id": 1, "log": "all is well"}).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))

    assert cli.main(["logs", "classify", "-", "--json"]) == 0
    assert answers(capsys.readouterr().out)[0]["label"] == "benign"


def test_raw_log_with_invalid_utf8_is_classified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "worker.log"
    file.write_bytes(b"\xff step\r\n" + OOM.encode())

    assert cli.main(["logs", "classify", "--text", str(file), "--json"]) == 0
    assert answers(capsys.readouterr().out)[0]["label"] == "cuda_oom"


ENCODED = {
    "plain": lambda text: text.encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16, big end first": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "UTF-16, big end first, without a mark": lambda text: text.encode("utf-16-be"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "two gzip members": lambda text: gzip.compress(text[:9].encode()) + gzip.compress(text[9:].encode()),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode()),
    "Zstandard": lambda text: pyarrow.compress(text.encode(), "zstd", asbytes=True),
    "UTF-16 in gzip": lambda text: gzip.compress(text.encode("utf-16")),
    "NULs of a crash": lambda text: text.encode() + bytes(5000),
}


NAMES = [("worker.log", encoding) for encoding in ENCODED] + [("worker.log.2.gz", one) for one in ("plain", "gzip")]


def test_logs_of_any_encoding_and_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The content decides, not the name of the file."""
    umlaut = "\N{LATIN SMALL LETTER U WITH DIAERESIS}"
    for name, encoding in NAMES:
        file = tmp_path / name
        file.write_bytes(ENCODED[encoding](f"step 1 {umlaut}\r\n{OOM}\n"))
        assert cli.main(["logs", "classify", "--text", str(file), "--json"]) == 0, encoding
        assert answers(capsys.readouterr().out)[0]["culprit"] == "gpu 5", encoding
        file.write_bytes(ENCODED[encoding](json.dumps({"id": umlaut, "log": OOM}) + "\n"))
        if encoding != "NULs of a crash":
            assert cli.main(["logs", "classify", str(file), "--json"]) == 0, encoding
            (answer,) = answers(capsys.readouterr().out)
            assert (answer["id"], answer["label"]) == (umlaut, "cuda_oom"), encoding


NO_LOGS = [
    (b"PK\x03\x04 and more", "is that of a .zip file, not of a log; unpack it first"),
    (gzip.compress(OOM.encode() * 99)[:60], "is damaged or cut short"),
    (bytes(range(1, 32)) * 9, "are control characters, so it is not a text log"),
    (random.Random(0).randbytes(500), "are control characters, so it is not a text log"),
    (random.Random(1).randbytes(5000), "are control characters, so it is not a text log"),
    (b"\x7fELF\x02\x01\x01" + bytes(9) + bytes(range(1, 9)) * 99, "are control characters"),
]
"""Content, and the error."""


def test_file_that_is_not_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "worker.log"
    for content, error in NO_LOGS:
        file.write_bytes(content)
        assert cli.main(["logs", "classify", "--text", str(file)]) == ExitCode.DATA, content[:40]
        assert error in (errors := capsys.readouterr().err)
        assert str(file) in errors


def test_compressed_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(OOM.encode()))))
    assert cli.main(["logs", "classify", "--text", "-"]) == ExitCode.DATA
    assert "standard input: its content is that of a .gz file" in capsys.readouterr().err


def test_bad_lines_are_named_and_the_others_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        {"id": "good", "log": OOM},
        "{broken",
        [1],
        {"log": "no id"},
        {"id": 1},
        {"id": 2, "log": 3},
        {"id": 3, "ranks": {}},
        {"id": 4, "ranks": {"0": 1}},
        {"id": 5, "log": "x", "ranks": {"0": "y"}},
        "[" * 100_000,
        {"id": "last", "log": "fine"},
    ]
    file = written(tmp_path, *cases)

    assert cli.main(["logs", "classify", file, "--json"]) == ExitCode.DATA

    captured = capsys.readouterr()
    assert [answer["id"] for answer in answers(captured.out)] == ["good", "last"]
    for number in range(2, 11):
        assert f"{file}:{number}: " in captured.err
    assert "expected an object with id and log, or id and ranks" in captured.err


def test_absent_log_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "classify", str(tmp_path / "none.jsonl")]) == ExitCode.DATA
    assert "none.jsonl: cannot be read: No such file or directory" in capsys.readouterr().err
