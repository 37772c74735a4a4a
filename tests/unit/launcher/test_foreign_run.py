"""Commands on an untrusted run directory: they end, report what they leave out, and obey nothing in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.run_files.incidents import AUDIT_NAME

SECRET = "a line of a file that is its reader's own"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    run = tmp_path / "run"
    (run / "incidents").mkdir(parents=True)
    return run


def printed(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the whole output of a command line."""
    main([str(word) for word in arguments])
    captured = capfd.readouterr()
    return captured.out + captured.err


PUTS: list[tuple[Callable[[Path], object], str]] = [
    (os.mkfifo, "is not a regular file"),
    (lambda path: path.symlink_to(path.parents[2] / "secret"), "is a symbolic link"),
    (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link"),
    (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has more than"),
]


def test_incidents_leaves_out_files_that_are_no_records(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number, (put, _) in enumerate(PUTS):
        put(run / "incidents" / f"{number}.json")
    text = printed(capfd, "incidents", "--job", run)
    for number, (_, problem) in enumerate(PUTS):
        assert f"left out: {run}/incidents/{number}.json: cannot be read: {problem}" in text
    assert SECRET not in text


def test_verdicts_reads_no_audit_that_is_no_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    audit = run / "incidents" / AUDIT_NAME
    for put, problem in PUTS:
        put(audit)
        text = printed(capfd, "diag", "verdicts", "--job", run)
        assert f"{AUDIT_NAME}: cannot be read: {problem}" in text
        assert SECRET not in text
        audit.unlink()


def test_hang_leaves_out_evidence_that_is_no_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = run / "incidents" / "round-000001"
    place.mkdir()
    (run / "secret").symlink_to(run.parent / "secret")
    for number, (put, _) in enumerate(PUTS):
        put(place / f"host-{number}.json")
    text = printed(capfd, "diag", "hang", run)
    assert SECRET not in text
    assert "Traceback" not in text


def test_a_directory_of_incidents_that_is_elsewhere_is_not_read(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = run.parent / "elsewhere"
    (run / "incidents").rename(elsewhere)
    (elsewhere / "1.json").write_text("{}")
    (run / "incidents").symlink_to(elsewhere)
    assert f"{run}/incidents/1.json: cannot be read: is a symbolic link" in printed(capfd, "incidents", "--job", run)


def test_no_text_of_a_file_is_obeyed_by_the_terminal(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "incidents" / "\x1b]0;title\x07.json").write_text('{"kind": "\\u001b[2J"}')
    (run / "coordination").mkdir()
    (run / "coordination" / "endpoint").write_text('{"endpoints": ["\x1b[2J"], "job": "\x1b[31m"}')
    for verb in ("incidents", "status"):
        text = printed(capfd, verb, "--job", run)
        assert text, verb
        assert "\x1b" not in text, verb
        assert "\x07" not in text, verb
