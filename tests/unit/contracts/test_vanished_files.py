"""Files that are removed while they are open: this is noticed, even if a new file has the same name, and reported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.contracts.files.vanished_files import REPORT_S, RecentRemovals, WatchedPath, is_in_place


def remake(path: Path) -> None:
    path.unlink()
    path.write_text("another")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: path.write_text("more"), True),
        (lambda path: path.unlink(), False),
        (remake, False),
        (lambda path: shutil.rmtree(path.parent), False),
        (lambda path: path.rename(path.with_name("elsewhere")), False),
        (lambda path: (path.parent.rename(path.parent.with_name("moved")), path.parent.write_text("a file")), False),
    ],
)
def test_a_path_is_in_place_only_with_its_open_file(
    tmp_path: Path, change: Callable[[Path], object], expected: bool
) -> None:
    path = tmp_path / "directory" / "file"
    path.parent.mkdir()
    path.write_text("one")
    handle = os.open(path, os.O_RDONLY)
    change(path)
    assert is_in_place(handle, path) is expected
    os.close(handle)


def test_a_directory_that_was_made_again_is_a_loss_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    watched = WatchedPath(path)
    assert not watched.was_lost()  # The file never existed.
    path.mkdir()
    assert not watched.was_lost()
    path.rmdir()
    path.mkdir()
    assert watched.was_lost()
    assert not watched.was_lost()
    path.rmdir()
    assert watched.was_lost()
    assert not watched.was_lost()
    watched.close()


def test_losses_are_reported_for_a_while() -> None:
    now = [1_700_000_000.0]
    removals = RecentRemovals(lambda: now[0])
    text = removals.record("/run/metrics", "its records are lost")
    assert text == "/run/metrics was removed from outside at 22:13:20 UTC: its records are lost"
    now[0] += REPORT_S - 1.0
    removals.record("/run/events", "what was stored is lost")
    assert removals.texts == (text, "/run/events was removed from outside at 22:23:19 UTC: what was stored is lost")
    now[0] += 2.0
    assert removals.texts == ("/run/events was removed from outside at 22:23:19 UTC: what was stored is lost",)
