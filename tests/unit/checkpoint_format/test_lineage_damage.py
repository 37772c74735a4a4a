"""A lineage that is damaged, forged or holds nothing to resume from: every faulty file and name is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.checkpoint_format.branches import list_branches, read_branch
from megatrain.checkpoint_format.lineage import candidates, current_branch, ensure_branch, open_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.round_starts import start_location
from megatrain.contracts.errors import CheckpointError, MissingFileError
from tests.helpers.checkpoint_tree import found, path_of, put_branch, put_checkpoint, put_main, put_manifest


@pytest.fixture
def checkpoints(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "checkpoints")


def corrupt_branch(checkpoints: Location, name: str, field: str, value: object) -> None:
    place = checkpoints / name / "BRANCH"
    place.write(json.dumps({**json.loads(place.read()), field: value}).encode())


DAMAGED_RESUMES = [
    (b"", r"claims/00000001\.resume: not JSON .*it must name the branch to continue"),
    (b'{"schema_ver', "not JSON"),
    (b"\xff", "not UTF-8"),
    (b"[1]", "a list, expected a JSON object"),
    (b'{"schema_version": 2, "branch": "main", "step": null}', "schema_version=2, this program reads 1"),
    (b'{"schema_version": 1, "step": null}', "branch is missing; expected a string"),
    (b'{"schema_version": 1, "branch": 3, "step": null}', "branch=3; expected a string"),
    (
        b'{"schema_version": 1, "branch": "branch-0003", "step": null}',
        r"branch='branch-0003', but .*/branch-0003/BRANCH is missing; name another branch there, or restore it",
    ),
]


def test_a_damaged_resume_is_named(tmp_path: Path) -> None:
    for number, (content, message) in enumerate(DAMAGED_RESUMES):
        checkpoints = LocalLocation(tmp_path / str(number))
        put_main(checkpoints, 10)
        put_branch(checkpoints, "branch-0002", "main", 10)
        start_location(checkpoints, 1).write(content)
        for ask in (current_branch, candidates):
            with pytest.raises(CheckpointError, match=message):
                ask(checkpoints)
        # Opening a branch repairs it.
        assert open_branch(checkpoints, "main", 10, "mend").name == "branch-0003"
        assert current_branch(checkpoints) == "branch-0003"


HOSTILE = [
    *("", "..", ".", "../main", "main/step-000000010", "/", "/tmp", "Main", "main\n", "ma in", "-main", "RESUME"),
    *("step-000000010", "step-x", "ma\u0131n", "main\0", "\ud800", "a" * 64),
]


def test_hostile_names_are_refused(checkpoints: Location) -> None:
    branch, start = put_main(checkpoints, 10) / "BRANCH", start_location(checkpoints, 1)
    whole_branch, whole_start = branch.read(), start.read()
    for name in HOSTILE:
        with pytest.raises(CheckpointError, match="expected a branch name: a-z, 0-9 and -, at most 63"):
            raise AssertionError(f"accepted {name!r}: {read_branch(checkpoints, name)}")
        with pytest.raises(CheckpointError, match="expected a branch name"):
            candidates(checkpoints, name)
        if name:
            corrupt_branch(checkpoints, "main", "parent", name)
            with pytest.raises(CheckpointError, match=r"main/BRANCH: parent=.*; expected a branch name"):
                candidates(checkpoints)
            with pytest.raises(CheckpointError, match="expected a branch name"):
                open_branch(checkpoints, name, 10, "")
            branch.write(whole_branch)
        start.write(json.dumps({"schema_version": 1, "branch": name, "step": None}).encode())
        with pytest.raises(CheckpointError, match=r"\.resume: branch=.*; expected a branch name"):
            candidates(checkpoints)
        start.write(whole_start)
    assert found(checkpoints) == [("main", 10)]


def test_lost_resume_is_needed_with_several_branches_only(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    start_location(checkpoints, 1).remove()
    assert found(checkpoints) == [("main", 10)]
    put_branch(checkpoints, "branch-0002", "main", 5)
    for ask in (current_branch, candidates):
        with pytest.raises(
            CheckpointError, match=r"00000001\.resume is missing; it must name .*\(there are: branch-0002, main\)"
        ):
            ask(checkpoints)
    open_branch(checkpoints, "main", 10, "mend")
    assert found(checkpoints) == [("main", 10)]


DAMAGED_FIELDS: list[tuple[str, object, str]] = [
    ("name", "other", r"main/BRANCH: name='other'; but the directory is main; it was renamed or copied"),
    ("name", 1, r"name=1; expected a string"),
    ("parent", None, r"parent=None; expected a string"),
    ("parent_step", 3, r"parent_step=3; expected null, because parent is empty"),
    ("created_unix_s", "now", r"created_unix_s='now'; expected a number of seconds"),
    ("reason", None, r"reason=None; expected a string"),
    ("schema_version", 2, r"main/BRANCH: schema_version=2, this program reads 1"),
    ("color", 1, r"color=1; no such field in schema version 1"),
    ("parent", "branch-0002", r"parent_step=None; expected an integer"),
]


def test_a_damaged_branch_is_named(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    whole = (checkpoints / "main" / "BRANCH").read()
    for field, value, message in DAMAGED_FIELDS:
        corrupt_branch(checkpoints, "main", field, value)
        with pytest.raises(CheckpointError, match=message):
            candidates(checkpoints)
        with pytest.raises(CheckpointError, match=message):
            list_branches(checkpoints)
        (checkpoints / "main" / "BRANCH").write(whole)


def test_torn_branch_is_named_and_repaired_as_stated(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    (checkpoints / "main" / "BRANCH").write(b'{"name')
    with pytest.raises(
        CheckpointError, match=r"main/BRANCH: not JSON .*; it must contain the origin of main: write it again as {"
    ) as failure:
        candidates(checkpoints)
    (checkpoints / "main" / "BRANCH").write(str(failure.value).partition("write it again as ")[2].encode())
    assert [candidate.step for candidate in candidates(checkpoints)] == [10]
    open_branch(checkpoints, "main", 10, "")
    (checkpoints / "branch-0002" / "BRANCH").write(b"")
    with pytest.raises(CheckpointError, match=r"branch-0002/BRANCH: .* that it began at as parent and parent_step"):
        candidates(checkpoints)


def test_branches_in_a_circle_are_refused(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    corrupt_branch(checkpoints, "main", "parent", "main")
    corrupt_branch(checkpoints, "main", "parent_step", 10)
    with pytest.raises(CheckpointError, match=r"main/BRANCH: the parents form a cycle \(main -> main\)"):
        candidates(checkpoints)
    put_branch(checkpoints, "b", "main", 10)
    put_branch(checkpoints, "c", "b", 10)
    corrupt_branch(checkpoints, "main", "parent", "c")
    with pytest.raises(CheckpointError, match=r"c/BRANCH: the parents form a cycle \(b -> main -> c -> b\)"):
        candidates(checkpoints, "b")[0]


def test_a_parent_that_was_removed_ends_the_line(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    open_branch(checkpoints, "main", 10, "")
    put_checkpoint(checkpoints / "branch-0002", 20, round=4)
    (checkpoints / "main").remove()
    assert found(checkpoints) == [("branch-0002", 20)]
    (checkpoints / "branch-0002/step-000000020").remove()
    with pytest.raises(CheckpointError, match="branch-0002 begins at step 10 of main, but no committed checkpoint"):
        candidates(checkpoints)


def test_a_run_whose_branches_are_lost_does_not_begin_again(checkpoints: Location) -> None:
    put_main(checkpoints)
    (checkpoints / "main").remove()
    message = r"00000001\.resume: branch='main', but .*/main/BRANCH is missing; name another branch"
    with pytest.raises(CheckpointError, match=message):
        candidates(checkpoints)
    with pytest.raises(CheckpointError, match=message):
        ensure_branch(checkpoints, "start")
    with pytest.raises(CheckpointError, match=r"holds a run already \(claims\)"):
        open_branch(checkpoints, "", None, "start")


def test_an_unknown_branch_is_named(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    with pytest.raises(MissingFileError, match=r"branch-0009/BRANCH is missing, so branch-0009 is no branch"):
        candidates(checkpoints, "branch-0009")


def test_uncommitted_checkpoints_are_never_a_start_from_scratch(checkpoints: Location) -> None:
    main = put_main(checkpoints)
    put_manifest(main, 30)
    message = r"checkpoints: holds main/step-000000030, but no committed checkpoint .*, in main\); remove it to start"
    with pytest.raises(CheckpointError, match=message):
        candidates(checkpoints)
    for step in range(6):
        put_manifest(main, step)
    with pytest.raises(CheckpointError, match=r"step-000000003 and 3 more, but no committed checkpoint"):
        candidates(checkpoints)


def test_abandoned_checkpoints_are_never_newest(checkpoints: Location) -> None:
    put_main(checkpoints, 30)
    open_branch(checkpoints, "main", 20, "")
    message = r"holds main/step-000000030, but no committed .*, in branch-0002, or main up to step 20\)"
    with pytest.raises(CheckpointError, match=message):
        candidates(checkpoints)


def test_unknown_files_are_never_a_start_from_scratch(checkpoints: Location) -> None:
    for name in ("notes.txt", "Other/x", "RESUME.old", "notes"):
        (checkpoints / name).write(b"")
        with pytest.raises(CheckpointError, match=f"holds {name.split('/')[0]}, but no committed"):
            candidates(checkpoints)
        (checkpoints / name.split("/")[0]).remove()
    (checkpoints / "notes.txt").write(b"")
    put_main(checkpoints, 10)
    assert found(checkpoints) == [("main", 10)]


def test_directory_without_a_branch_file_is_no_branch(checkpoints: Location) -> None:
    put_checkpoint(checkpoints / "main", 30)
    assert list_branches(checkpoints) == []
    with pytest.raises(
        CheckpointError, match=r"holds main/step-000000030, .* in a branch, and no directory has a BRANCH"
    ):
        candidates(checkpoints)


def test_run_with_only_empty_directories_starts_afresh(checkpoints: Location) -> None:
    path_of(checkpoints / "main").mkdir(parents=True)
    path_of(checkpoints / "branch-0002").mkdir(parents=True)
    assert found(checkpoints) == []


def test_checkpoints_outside_of_branches_are_no_fresh_start(checkpoints: Location) -> None:
    for step in (10, 20):
        put_checkpoint(checkpoints, step)
    message = r"holds step-000000010 and step-000000020, but no committed checkpoint to resume from"
    with pytest.raises(CheckpointError, match=message):
        candidates(checkpoints)
    put_main(checkpoints, 5)
    assert found(checkpoints) == [("main", 5)]


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/claims: cannot be listed: Not a directory"):
        candidates(LocalLocation(tmp_path / "file"))
