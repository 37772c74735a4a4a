"""Checkpoint directories: names, manifest, commit, pins, and their state after a process died."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.checkpoint_format import local_location
from megatrain.checkpoint_format.checkpoint_files import (
    check_writable,
    is_pinned,
    manifest_location,
    pin,
    pin_reason,
    read_manifest,
    remove_checkpoint,
    unpin,
    write_manifest,
    wrong_files,
)
from megatrain.checkpoint_format.checkpoint_names import manifest_name, step_directory_name, step_of
from megatrain.checkpoint_format.commit import committed_steps, is_committed, write_commit
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.contracts.errors import CheckpointError, MissingFileError
from tests.helpers.checkpoint_tree import crash_at, make_manifest, path_of, put_checkpoint, put_manifest, tree


@pytest.fixture
def branch(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "main")


def test_names_sort_as_steps_do() -> None:
    assert step_directory_name(120) == "step-000000120"
    steps = [0, 9, 10, 999_999_999]
    assert sorted(map(step_directory_name, steps)) == list(map(step_directory_name, steps))
    for step in (*steps, 10**9, 10**15):
        assert step_of(step_directory_name(step)) == step
    for name in ("step-120", "step-0000000120", "step-00000012x", "latest", "xstep-000000120", "step-000000120.tmp",
                 "step-00000012\u0661", "step-000000120\n"):  # fmt: skip
        assert step_of(name) is None


def test_manifest_of_a_renamed_or_empty_directory_is_refused(branch: Location) -> None:
    directory = put_manifest(branch, 120)
    assert read_manifest(directory).step == 120
    path_of(directory).rename(path_of(branch / step_directory_name(121)))
    with pytest.raises(CheckpointError, match=r"step=120, but the directory is step-000000121; it was renamed"):
        read_manifest(branch / step_directory_name(121))
    with pytest.raises(MissingFileError, match=r"main: has no manifest .*; the checkpoint is incomplete"):
        read_manifest(branch)


def test_a_manifest_of_another_job_or_branch_is_refused(branch: Location) -> None:
    directory = put_manifest(branch, 120)
    assert read_manifest(directory, job="demo", branch="main") == read_manifest(directory)
    message = r"manifest-.*\.json: job='demo', expected 'other'; the checkpoint was copied here from another job"
    with pytest.raises(CheckpointError, match=message):
        read_manifest(directory, job="other")
    with pytest.raises(CheckpointError, match=r"branch='main', expected 'branch-0002'.* from another branch"):
        read_manifest(directory, branch="branch-0002")


def test_wrong_files_are_all_listed(branch: Location) -> None:
    directory = put_manifest(branch, 120)
    (directory / "r000002-rank-00000.distcp").write(b"short")
    (directory / "more/0.bin/x").write(b"")
    assert [problem.removeprefix(str(directory)) for problem in wrong_files(directory, make_manifest())] == [
        "/more/0.bin: missing, expected 0 bytes",
        "/r000002-rank-00000.distcp: 5 bytes, expected 10",
    ]
    (directory / "more/0.bin").remove()
    (directory / "more/0.bin").write(b"")
    (directory / "r000002-rank-00000.distcp").write(b"0123456789")
    assert wrong_files(directory, make_manifest()) == []


def test_commit_adds_one_file_and_may_be_repeated(branch: Location) -> None:
    directory = put_manifest(branch, 120)
    assert not is_committed(directory)
    write_commit(directory, make_manifest())
    assert is_committed(directory)
    before = tree(path_of(directory))
    assert sorted(before) == ["COMMIT", manifest_location(directory).name]
    write_commit(directory, make_manifest())
    assert tree(path_of(directory)) == before


def test_damaged_commit_commits_nothing(branch: Location) -> None:
    directory = put_checkpoint(branch, 120)
    for damage in (
        b"", b"{}", b"[1]", b"[" * 100_000, b'{"schema_version": 1, "step": "x"}', b"\xff", b"\xff\xfe",
    ):  # fmt: skip
        (directory / "COMMIT").write(damage)
        assert not is_committed(directory), damage[:40]


def test_a_commit_covers_one_manifest(branch: Location) -> None:
    directory = put_checkpoint(branch, 120)
    manifest_location(directory).write(make_manifest(consumed_samples=1).to_json().encode())
    assert not is_committed(directory)
    manifest_location(directory).remove()
    assert not is_committed(directory)


def test_a_commit_covers_one_step(branch: Location) -> None:
    directory = put_checkpoint(branch, 120)
    path_of(directory).rename(path_of(branch / step_directory_name(121)))
    assert not is_committed(branch / step_directory_name(121))
    path_of(branch / step_directory_name(121)).rename(path_of(branch / "kept-elsewhere"))
    assert is_committed(branch / "kept-elsewhere")


def test_unreadable_file_is_not_taken_for_missing(branch: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = put_checkpoint(branch, 120)

    def no_open(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(local_location.os, "open", no_open)
    with pytest.raises(CheckpointError, match="COMMIT: cannot be read: Input/output error"):
        committed_steps(branch)
    monkeypatch.undo()
    manifest_location(directory).remove()
    (manifest_location(directory) / "x").write(b"")
    with pytest.raises(CheckpointError, match=r"-manifest-.*\.json: cannot be read: Is a directory"):
        committed_steps(branch)


def test_commit_needs_the_manifest_that_was_written(branch: Location) -> None:
    directory = put_manifest(branch, 120, round=3)
    with pytest.raises(MissingFileError, match=r"r000004-manifest-.*\.json: .* No such file"):
        write_commit(directory, make_manifest(round=4))
    manifest_location(directory).write(b"{}")
    with pytest.raises(CheckpointError, match=r"r000003-manifest-.*\.json: differs from what round 3 wrote"):
        write_commit(directory, make_manifest(round=3))
    assert not is_committed(directory)


def test_a_complete_checkpoint_is_not_written_again(branch: Location) -> None:
    directory = put_checkpoint(branch, 120, round=5)
    before = tree(path_of(directory))
    left_over = "COMMIT: committed by round 5, and round 4 is older; this process is left over from it and must stop"
    complete = "is a complete checkpoint already and is not overwritten; remove it first"
    changed = make_manifest(round=5, written_unix_s=1.0)
    for manifest, message in [
        (make_manifest(round=4), left_over),
        (changed, complete),
        (make_manifest(round=6), complete),
    ]:
        with pytest.raises(CheckpointError, match=message):
            check_writable(directory, manifest.round)
        with pytest.raises(CheckpointError, match=message):
            write_manifest(directory, manifest)
        content = manifest.to_json().encode()
        written = directory / manifest_name(content, manifest.round)
        written.write(content)
        with pytest.raises(CheckpointError, match=left_over if message == left_over else "another process has com"):
            write_commit(directory, manifest)
        written.remove()
    assert tree(path_of(directory)) == before


@pytest.mark.parametrize("failing", ["fsync", "link"])
def test_a_commit_that_fails_leaves_nothing(branch: Location, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    directory = put_manifest(branch, 120)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync", fail), "link": (os, "link", fail)}[failing])
    with pytest.raises(CheckpointError, match=r"COMMIT: cannot be written: No space left on device"):
        write_commit(directory, make_manifest())
    assert list(tree(path_of(directory))) == [manifest_location(directory).name]


def test_committed_steps_of_a_branch(branch: Location) -> None:
    assert committed_steps(branch) == []
    for step in (10, 20, 9, 10**9, 999_999_999):
        put_checkpoint(branch, step)
    put_manifest(branch, 30)
    (branch / "notes.txt").write(b"x")
    (branch / "step-000000040").write(b"a file")
    (branch / "step-000000050" / "COMMIT").write(b"{}")
    path_of(branch / "step-000000060").mkdir()
    path_of(branch / "step-000000070").symlink_to("nowhere")
    path_of(put_checkpoint(branch, 80)).rename(path_of(branch / "copy"))
    assert committed_steps(branch) == [9, 10, 20, 999_999_999, 10**9]


def test_pinned_checkpoint_is_kept_until_it_is_unpinned(branch: Location) -> None:
    directory = put_checkpoint(branch, 120)
    assert not is_pinned(directory)
    assert pin_reason(directory) is None
    pin(directory, "for the paper")
    assert is_pinned(directory)
    assert pin_reason(directory) == "for the paper"
    assert is_committed(directory)
    with pytest.raises(CheckpointError, match="step-000000120 is pinned and is kept; unpin it first"):
        remove_checkpoint(directory)
    (directory / "PINNED").write(b"{")
    assert is_pinned(directory)
    with pytest.raises(CheckpointError, match=r"PINNED: not JSON .* the checkpoint stays pinned; pin it again"):
        pin_reason(directory)
    unpin(directory)
    unpin(directory)
    assert not is_pinned(directory)
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint .* cannot be pinned"):
        pin(put_manifest(branch, 130), "")


def test_killed_removal_leaves_no_checkpoint_with_holes(branch: Location) -> None:
    expected = {"r000002-rank-00000.distcp": b"0123456789", "more/0.bin": b""}
    preparation = (
        "from megatrain.checkpoint_format.checkpoint_files import *\n"
        "from megatrain.checkpoint_format.local_location import *\n"
        f"directory = LocalLocation(Path({str(branch)!r})) / 'step-000000120'"
    ).replace("local_location import *", "local_location import LocalLocation, Path")
    number = 0
    is_killed = True
    while is_killed:
        remove_checkpoint(branch / "step-000000120")
        for name, content in expected.items():
            (branch / "step-000000120" / name).write(content)
        directory = put_checkpoint(branch, 120)
        before = tree(path_of(directory))
        is_killed = crash_at(number, preparation, "remove_checkpoint(directory)")
        assert committed_steps(branch) == [] or tree(path_of(directory)) == before
        number += 1
    assert not directory.exists()
    assert number == 1 + 6, "four files and two directories"


def test_link_is_neither_written_nor_removed_through(branch: Location, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("not a checkpoint")
    path_of(branch).mkdir()
    directory = branch / step_directory_name(120)
    path_of(directory).symlink_to(elsewhere)

    with pytest.raises(CheckpointError, match=r"step-000000120 is a symbolic link, and nothing is written through it"):
        check_writable(directory, 3)
    remove_checkpoint(directory)

    assert not path_of(directory).is_symlink()
    assert [entry.name for entry in elsewhere.iterdir()] == ["precious"]
