"""The small files by which writers of several hosts agree: each is for one snapshot, and an older round ignores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint.write_marks import (
    DoneMark,
    WritingMark,
    claim,
    done_name,
    failed_name,
    is_leftover,
    read_failed,
    write_failed,
)
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import path_of, put_checkpoint, tree

SNAPSHOT = SealedSnapshot(step=120, round=2, snapshot=7)
DONE = DoneMark(SNAPSHOT, 1, 0.5, {"r000002-rank-00004.distcp": FileEntry(10, "items-sha256:" + "0a" * 32)})
MARK = WritingMark(round=2, job="demo", started_unix_s=1_790_000_000.5)


@pytest.fixture
def directory(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "main" / "step-000000120")


def test_marks_are_named_by_round_and_host() -> None:
    assert done_name(2, 1) == "host-r000002-00001.done"
    assert failed_name(2, 12) == "host-r000002-00012.failed"


LEFTOVERS = [
    ("WRITING", True),
    ("host-r000002-00001.done", True),
    ("host-r000001-00001.failed", True),
    ("host-r000003-00001.done", False),
    ("r000001-rank-00000.distcp", True),
    ("r000002-rank-00000.distcp", False),
    ("r000003-rank-00000.distcp", False),
    ("r000001-manifest-0a1b2c3d.json", True),
    ("r000001-metadata", True),
    ("r000001-index.json", True),
    ("r000001-tokenizer.json", True),
    ("r000001-tokenizer.model", True),
    ("r000001-tokenizer_config.json", True),
    ("r000002-tokenizer.model", False),
    ("r000002-manifest-0a1b2c3d.json", True),
    ("r000003-metadata", False),
    ("r000003-index.json", False),
    ("r000002-index.json", False),
    ("tokenizer.json", False),
    *((name, False) for name in ("COMMIT", "PINNED", ".metadata", "notes")),
]


def test_commit_removes_the_marks() -> None:
    assert [name for name, expected in LEFTOVERS if is_leftover(name, 2) != expected] == []


def test_done_comes_back_for_its_snapshot_only(directory: Location) -> None:
    assert DoneMark.read(directory, SNAPSHOT, 1) is None
    DONE.write(directory)
    assert DoneMark.read(directory, SNAPSHOT, 1) == DONE
    assert DoneMark.read(directory, SNAPSHOT, 0) is None
    for other in (SealedSnapshot(120, 2, 8), SealedSnapshot(110, 2, 7), SealedSnapshot(120, 3, 7)):
        assert DoneMark.read(directory, other, 1) is None


def test_failed_comes_back_for_its_snapshot_only(directory: Location) -> None:
    assert read_failed(directory, SNAPSHOT, 1) is None
    write_failed(directory, SNAPSHOT, 1, "disk full")
    assert read_failed(directory, SNAPSHOT, 1) == "disk full"
    assert read_failed(directory, SealedSnapshot(120, 2, 8), 1) is None


def test_a_damaged_done_is_named(directory: Location) -> None:
    DONE.write(directory)
    place = directory / "host-r000002-00001.done"
    content = json.loads(place.read())
    changes: list[tuple[dict[str, Any], str]] = [
        ({"schema_version": 2}, "schema_version=2, this program reads 1"),
        ({"snapshot": "7"}, "snapshot='7'; expected an integer"),
        ({"write_s": None}, "write_s=None; expected a number"),
        ({"files": []}, r"files=\[\]; expected an object"),
        ({"files": {"a": [1]}}, r"files=.*; expected \[size, digest\]"),
        ({"files": {"a": [True, "x"]}}, r"files=.*; expected \[size, digest\]"),
        ({"files": {"../a": [1, "x"]}}, r"files=.*; expected \[size, digest\]"),
    ]
    for change, message in changes:
        place.write(json.dumps({**content, **change}).encode())
        with pytest.raises(CheckpointError, match=rf"host-r000002-00001\.done: {message}"):
            DoneMark.read(directory, SNAPSHOT, 1)


def test_a_checkpoint_is_claimed_once_a_round(directory: Location) -> None:
    claim(directory, MARK)
    assert WritingMark.read(directory) == MARK
    before = tree(path_of(directory))
    claim(directory, WritingMark(2, "demo", 1_790_000_111.0))
    assert tree(path_of(directory)) == before
    newer = WritingMark(3, "demo", 1_790_000_222.0)
    claim(directory, newer)
    assert WritingMark.read(directory) == newer
    with pytest.raises(
        CheckpointError, match=r"WRITING: round 3 is writing this checkpoint, and round 2 is older; .* stop"
    ):
        claim(directory, MARK)
    assert WritingMark.read(directory) == newer


def test_a_damaged_claim_is_replaced(directory: Location) -> None:
    for content in (b"", b"{}", b"\xff", b'{"schema_version": 1, "round": "x"}'):
        (directory / "WRITING").write(content)
        assert WritingMark.read(directory) is None, content
        claim(directory, MARK)
        assert WritingMark.read(directory) == MARK


@pytest.mark.parametrize(
    ("round_number", "message"), [(2, "is a complete checkpoint already"), (3, "round 2 is older")]
)
def test_a_complete_checkpoint_is_not_claimed(directory: Location, round_number: int, message: str) -> None:
    put_checkpoint(LocalLocation(path_of(directory).parent), 120, round=round_number)
    with pytest.raises(CheckpointError, match=message):
        claim(directory, MARK)
    assert WritingMark.read(directory) is None
