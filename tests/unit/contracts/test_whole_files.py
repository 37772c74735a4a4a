"""Names of files before they are complete, and durable directories."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatrain.contracts.files.whole_files import is_temporary_name, sync_directory, temporary_name


def test_temporary_name_is_recognized_and_unique() -> None:
    names = {temporary_name("COMMIT") for _ in range(50)}
    assert len(names) == 50
    assert all(map(is_temporary_name, names))
    assert not any(map(is_temporary_name, ["COMMIT", ".metadata", ".COMMIT.tmp", ".COMMIT.0123456z.tmp", "..tmp"]))


def test_file_system_may_lack_the_sync_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with(number: int) -> None:
        def fail(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)

    for number in (errno.EINVAL, errno.ENOTSUP):
        fail_with(number)
        sync_directory(tmp_path)
    fail_with(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path)
