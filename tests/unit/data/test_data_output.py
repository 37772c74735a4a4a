"""Output directories: what may be replaced, and that replacing is all or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data import output as output_module
from megatrain.data.output import new_directory

NAMES = ("one", "two")


def fill(path: Path, content: str, is_forced: bool = False) -> None:
    with new_directory(path, NAMES, is_forced) as staging:
        for name in NAMES:
            (staging / name).write_text(content)


def test_it_appears_at_the_end_with_missing_parents_and_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with new_directory(path, NAMES, False) as staging:
        assert not path.exists()
        (staging / "one").write_text("1")
    (tmp_path / "plain").mkdir()
    assert os.listdir(path) == ["one"]
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "new")
    assert (tmp_path / "out" / "one").read_text() == "new"


@pytest.mark.parametrize("has_exchange", [True, False])
def test_force_replaces_all(tmp_path: Path, has_exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_exchange:
        monkeypatch.setattr(output_module, "_exchange", lambda first, second: False)
    fill(tmp_path / "out", "old")
    fill(tmp_path / "out", "new", is_forced=True)
    assert {(tmp_path / "out" / name).read_text() for name in NAMES} == {"new"}
    assert os.listdir(tmp_path) == ["out"]


def test_foreign_directories_and_files_are_never_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "one").write_text("mine")
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"home: holds thesis\.tex, which no data build made"):
        fill(home, "new", is_forced=True)
    assert (home / "one").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file: exists and is no directory"):
        fill(tmp_path / "file", "new", is_forced=True)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(DataError, match="link: exists and is no directory"):
        fill(tmp_path / "link", "new", is_forced=True)


def test_an_output_that_came_up_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with (
        pytest.raises(DataError, match="already holds a data set"),
        new_directory(path, NAMES, False) as staging,
    ):
        (staging / "one").write_text("mine")
        fill(path, "theirs")
    assert (path / "one").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"out: cannot be written: No space left on device; make room"),
        new_directory(tmp_path / "out", NAMES, False) as staging,
    ):
        (staging / "one").write_text("half")
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"file/out: cannot be made: .*choose another --output"):
        fill(tmp_path / "file" / "out", "new")
