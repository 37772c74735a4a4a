"""`megatrain logs classify`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

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


def test_logs_and_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, {"id": "a", "ranks": {"0": "step 1", "1": "\x1b[31m[rank1]: KeyError: 'x\x07'"}})

    assert cli.main(["logs", "classify", file]) == 0

    out = capsys.readouterr().out
    assert "a: user_code; action stop_user\n  began at rank 1: its log names" in out
    assert "\x07" not in out


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"id": 1, "log": "all is well"}).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))

    assert cli.main(["logs", "classify", "-", "--json"]) == 0
    assert answers(capsys.readouterr().out)[0]["label"] == "benign"


def test_a_log_as_it_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "worker.log"
    file.write_bytes(b"\xff step\r\n" + OOM.encode())

    assert cli.main(["logs", "classify", "--text", str(file), "--json"]) == 0
    assert answers(capsys.readouterr().out)[0]["label"] == "cuda_oom"


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


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "classify", str(tmp_path / "none.jsonl")]) == ExitCode.DATA
    assert "none.jsonl: cannot be read (No such file or directory)" in capsys.readouterr().err
