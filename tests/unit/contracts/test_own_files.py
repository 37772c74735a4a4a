"""Directories and files in a location where every user may write: files of another user are reported, never used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.contracts.files.own_files import NotOwnError, check_own_directory, make_own_directory, open_own_file
from tests.helpers.other_user import OTHER_USER, as_other_user, everybodys_place


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    return everybodys_place(tmp_path)


def test_our_directory_is_ours_alone(everybodys: Path) -> None:
    own = everybodys / "own"
    with pytest.raises(FileNotFoundError):
        check_own_directory(own)
    make_own_directory(own)
    make_own_directory(own)
    check_own_directory(own)
    assert own.stat().st_mode & 0o777 == 0o700
    (own / "file").write_bytes(b"content")
    with open(open_own_file(own / "file", os.O_RDONLY), "rb") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda path: path.mkdir(mode=0o755), f"belongs to user {OTHER_USER}, and this is user {os.geteuid()}"),
        (lambda path: path.mkdir(mode=0o700), f"belongs to user {OTHER_USER}"),
        (lambda path: path.symlink_to("/"), "is a symbolic link"),
        (lambda path: path.write_bytes(b""), "is not a directory"),
    ],
)
def test_a_directory_that_another_user_made_first_is_refused(
    everybodys: Path, put: Callable[[Path], None], reason: str
) -> None:
    own = everybodys / "own"
    as_other_user(lambda: put(own))
    make_own_directory(own)
    with pytest.raises(NotOwnError, match=reason):
        check_own_directory(own)


def test_a_directory_that_others_may_enter_is_refused(everybodys: Path) -> None:
    own = everybodys / "own"
    own.mkdir(mode=0o755)
    with pytest.raises(NotOwnError, match="has mode 755, expected 700"):
        check_own_directory(own)


def test_directory_that_others_may_replace_is_refused(everybodys: Path) -> None:
    everybodys.chmod(0o777)
    with pytest.raises(NotOwnError, match=r"every user may replace files in it \(mode 777, not sticky\)"):
        make_own_directory(everybodys / "own")
    assert not (everybodys / "own").exists()


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda path: path.write_bytes(b"believe me"), f"belongs to user {OTHER_USER}"),
        (lambda path: path.symlink_to("/etc/hostname"), "is a symbolic link"),
        (os.mkfifo, "is not a regular file"),
    ],
)
def test_a_file_of_another_user_is_refused_and_never_waited_for(
    everybodys: Path, put: Callable[[Path], None], reason: str
) -> None:
    as_other_user(lambda: put(everybodys / "file"))
    with pytest.raises(NotOwnError, match=reason):
        open_own_file(everybodys / "file", os.O_RDONLY)
    if "belongs" in reason:
        os.close(open_own_file(everybodys / "file", os.O_RDONLY, (OTHER_USER,)))
