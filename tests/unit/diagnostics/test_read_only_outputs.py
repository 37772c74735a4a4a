"""Files that replace others, on a file system that is read-only: one sentence, not the error of the draft's removal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.export import write_records
from megatrain_diagnostics.streamer.streamer import Positions, write_positions
from tests.helpers.small_disk import small_disk


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        disk.make_read_only()
        yield disk.seen


def test_the_streamer_goes_on_without_its_positions(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        write_positions(place / "positions.json", Positions())
    (record,) = caplog.records
    assert "positions.json cannot be written: [Errno 30] Read-only file system" in record.getMessage()


def test_an_export_is_refused_with_its_file(place: Path) -> None:
    with pytest.raises(DataError, match=r"out\.jsonl: cannot be written: Read-only file system; choose another"):
        write_records(iter(()), "text", place / "out.jsonl")
