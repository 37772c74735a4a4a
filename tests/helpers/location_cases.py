"""The contract of every kind of Location. A test class inherits these tests and has the fixture `place`."""

from __future__ import annotations

import errno
import os
import re
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint_format.location import Location, put_once
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.exit_codes import ExitCode
from tests.helpers.checkpoint_tree import crash_at, tree

NAMES = ["a", ".metadata", "a/b", "a b", "...", "step-000000120/r000002-rank-00003.distcp"]
"""Names that may be below a location."""
OTHER_NAMES = ["", "/", "/a", "a/", "a//b", "..", ".", "../a", "a/../b", "a/.", "a\0b", "\ud800"]


def contents(place: Location) -> dict[str, bytes]:
    """Return all files below a location, as the location lists them."""
    found: dict[str, bytes] = {}
    for entry in place.entries():
        if entry.size() is not None:
            found[entry.name] = entry.read()
        else:
            found.update({f"{entry.name}/{name}": content for name, content in contents(entry).items()})
    return found


class LocationCases:
    """The contract of Location. `place` ends with /place and is empty."""

    def test_names_below_a_place(self, place: Location) -> None:
        for name in NAMES:
            assert str(place / name) == f"{place}/{name}"
            assert (place / name).name == name.split("/")[-1]
            (place / name).write(b"1")
            assert contents(place) == {name: b"1"}
            (place / name).remove()
        for name in OTHER_NAMES:
            with pytest.raises(CheckpointError, match=r"place: .* is not a relative path without '\.\.' below it"):
                raise AssertionError(f"accepted: {place / name}")

    def test_entries_of_a_location(self, place: Location) -> None:
        assert place.entries() == []
        assert not place.exists()
        assert place.size() is None
        (place / "b" / "c").write(b"12")
        (place / "a").write(b"")
        assert [entry.name for entry in place.entries()] == ["a", "b"]
        assert [str(entry) for entry in (place / "b").entries()] == [f"{place}/b/c"]
        assert (place / "b").exists()
        assert (place / "b").size() is None
        assert (place / "b/c").exists()
        assert (place / "b/c").size() == 2
        assert (place / "a").size() == 0
        assert not (place / "a/x").exists()
        with pytest.raises(CheckpointError, match="place/a: cannot be listed: Not a directory"):
            (place / "a").entries()

    def test_ranges_of_a_file_are_read(self, place: Location) -> None:
        (place / "a").write(b"0123456789")
        assert (place / "a").read() == b"0123456789"
        assert (place / "a").read_range(3, 4) == b"3456"
        assert (place / "a").read_range(0, 10) == b"0123456789"
        assert (place / "a").read_range(10, 0) == b""
        for offset, num_bytes in [(3, 8), (11, 0), (10, 1), (2**70, 1), (0, 2**62)]:
            message = (
                rf"place/a: 10 bytes, but bytes {offset} to {offset + num_bytes} were requested; the file is cut short"
            )
            with pytest.raises(CheckpointError, match=message):
                (place / "a").read_range(offset, num_bytes)

    def test_a_missing_file_is_an_error_of_its_own(self, place: Location) -> None:
        (place / "file").write(b"")
        for name in ("nothing", "nowhere/x", "file/x"):
            for read in ((place / name).read, partial((place / name).read_range, 0, 1)):
                with pytest.raises(
                    MissingFileError, match=rf"place/{name}: cannot be read: (No such file|Not a dir)"
                ) as caught:
                    read()
                assert caught.value.exit_code is ExitCode.CHECKPOINT
        with pytest.raises(CheckpointError, match="place: cannot be read: Is a directory") as other:
            place.read()
        assert not isinstance(other.value, MissingFileError)

    def test_a_write_replaces_the_whole_file(self, place: Location) -> None:
        (place / "a").write(b"long content")
        (place / "a").write(b"short")
        assert contents(place) == {"a": b"short"}

    def test_first_of_several_new_files_wins(self, place: Location) -> None:
        assert (place / "b" / "a").write_new(b"first")
        assert not (place / "b" / "a").write_new(b"second")
        assert contents(place) == {"b/a": b"first"}
        assert put_once(place / "b/a", b"first")
        assert not put_once(place / "b/a", b"third")
        assert put_once(place / "c", b"third")
        (place / "b/a").remove()
        assert (place / "b/a").write_new(b"fourth")
        assert contents(place) == {"b/a": b"fourth", "c": b"third"}

    def test_concurrent_writers_of_a_new_file_have_one_winner(self, place: Location) -> None:
        start = threading.Barrier(8)

        def write(number: int) -> bool:
            start.wait()
            return (place / "a").write_new(str(number).encode())

        with ThreadPoolExecutor(8) as pool:
            has_won = list(pool.map(write, range(8)))
        assert sum(has_won) == 1
        assert (place / "a").read() == str(has_won.index(True)).encode()

    def test_a_big_file_in_parts(self, place: Location) -> None:
        (place / "x").write(b"")
        (place / "a").write(b"what was there before, longer than all that comes")
        sink = (place / "a").create()
        sink.write(b"12")
        buffer = bytearray(b"34")
        sink.write(buffer)
        buffer[:] = b"--"
        sink.write(memoryview(array("i", [1, 2])))
        sink.write(memoryview(b"0123456789")[2:4])
        sink.write(b"")
        sink.close()
        assert (place / "a").read() == b"1234" + array("i", [1, 2]).tobytes() + b"23"
        with pytest.raises(ValueError, match="place/a is closed"):
            sink.write(b"")
        with pytest.raises(ValueError, match="place/a is closed"):
            sink.close()
        sink.abort()
        assert (place / "a").exists()

    def test_a_big_file_that_is_given_up(self, place: Location) -> None:
        sink = (place / "b" / "a").create()
        sink.write(b"12")
        sink.abort()
        sink.abort()
        assert contents(place) == {}
        with pytest.raises(ValueError, match="place/b/a is closed"):
            sink.write(b"")

    def test_late_writer_does_not_reach_the_new_file(self, place: Location) -> None:
        old = (place / "a").create()
        old.write(b"old and longer")
        new = (place / "a").create()
        new.write(b"new")
        old.write(b"!")
        new.close()
        assert (place / "a").read() == b"new"

    def test_removal_of_files_and_trees(self, place: Location) -> None:
        (place / "tree/a/b").write(b"1")
        (place / "tree/c").write(b"2")
        (place / "file").write(b"2")
        (place / "kept/d").write(b"3")
        for name in ("tree", "tree", "file", "nothing", "nowhere/x", "kept/d/x"):
            (place / name).remove()
        assert contents(place) == {"kept/d": b"3"}
        assert [entry.name for entry in place.entries()] == ["kept"]
        place.remove()
        assert not place.exists()


def failing(number: int) -> Callable[..., None]:
    """Return a function that fails with an error of the operating system."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


class DiskCases(LocationCases):
    """The contract of a location on a disk of this machine. `place` is below tmp_path, in an existing directory."""

    MOVE: tuple[Any, str]
    """The owner and the name of the function that gives a temporary file its name."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The calls that reach the disk, in order."""
        record: list[str] = []
        real_fsync, real_move = os.fsync, getattr(*self.MOVE)

        def fsync(file: int) -> None:
            record.append("fsync " + re.sub(r"[0-9a-f]{8}", "*", Path(os.readlink(f"/proc/self/fd/{file}")).name))
            real_fsync(file)

        def move(*arguments: Any) -> Any:
            record.append("rename " + Path(arguments[-1]).name)
            return real_move(*arguments)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(*self.MOVE, move)
        return record

    def test_files_reach_the_disk_in_order(self, place: Location, calls: list[str]) -> None:
        (place / "b" / "COMMIT").write(b"x")
        assert calls[-3:] == ["fsync .COMMIT.*.tmp", "rename COMMIT", "fsync b"]
        del calls[:]
        (place / "b" / "COMMIT").write(b"y")
        assert calls == ["fsync .COMMIT.*.tmp", "rename COMMIT", "fsync b"]
        del calls[:]
        sink = (place / "b" / "big").create()
        sink.write(b"12")
        assert calls == []
        sink.close()
        assert calls == ["fsync big", "fsync b"]
        del calls[:]
        (place / "b").remove()
        assert calls == ["fsync place"]

    @pytest.mark.parametrize("is_move", [False, True])
    def test_a_write_that_fails_leaves_what_was_there(
        self, place: Location, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_move: bool
    ) -> None:
        (place / "a").write(b"old")
        owner, name_of_call = self.MOVE if is_move else (os, "fsync")
        monkeypatch.setattr(owner, name_of_call, failing(errno.ENOSPC))
        for name in "ab":
            with pytest.raises(CheckpointError, match=rf"place/{name}: cannot be written: No space left on device$"):
                (place / name).write(b"new")
        assert tree(tmp_path) == {"place/a": b"old"}

    def test_a_write_that_is_killed_leaves_nothing_to_see(self, place: Location) -> None:
        """The process ends before each change to the disk: the file is the old or the new one, and there is no other
        file."""
        (place / "a").write(b"old")
        preparation = (
            f"from megatrain.checkpoint_format.url_location import open_location\nplace = open_location({str(place)!r})"
        )
        number = 0
        while crash_at(number, preparation, "(place / 'a').write(b'new')"):
            assert (place / "a").read() == b"old"
            assert [entry.name for entry in place.entries()] == ["a"]
            number += 1
        assert number >= 2, "before the temporary file is made, and before it is renamed"
        assert (place / "a").read() == b"new"

    def test_a_big_file_that_cannot_be_made_durable_is_gone(
        self, place: Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_open = len(os.listdir("/proc/self/fd"))
        sink = (place / "a").create()
        sink.write(b"12")
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(CheckpointError, match="place/a: cannot be written: Input/output error"):
            sink.close()
        assert place.entries() == []
        assert len(os.listdir("/proc/self/fd")) == num_open

    def test_obstacle_in_the_path_is_named(self, place: Location) -> None:
        (place / "file").write(b"")
        (place / "directory" / "x").write(b"")
        for name, message in (("file/x", "File exists"), ("directory", "Is a directory")):
            for action in (partial((place / name).write, b""), (place / name).create):
                with pytest.raises(CheckpointError, match=rf"place/{name}: cannot be written: {message}"):
                    action()
        assert contents(place) == {"file": b"", "directory/x": b""}
