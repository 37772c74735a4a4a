"""Branches: where a run resumes, which steps are abandoned, and the state after a crash while a branch is opened."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.checkpoint_format.branches import Branch, ancestry, list_branches, read_branch
from megatrain.checkpoint_format.lineage import current_branch, ensure_branch, open_branch, origins, recorded_order
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.run_files.run_lock import checkpoints_locked
from tests.helpers.checkpoint_tree import (
    crash_at,
    found,
    path_of,
    put_branch,
    put_checkpoint,
    put_main,
    put_manifest,
    tree,
)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "checkpoints")


def test_first_branch_of_a_new_run_is_main(checkpoints: Location) -> None:
    assert current_branch(checkpoints) == "main"
    assert found(checkpoints) == []
    before = time.time()
    branch = open_branch(checkpoints, "", None, "start of the run")
    assert branch == Branch("main", "", None, branch.created_unix_s, "start of the run")
    assert before <= branch.created_unix_s <= time.time()
    assert read_branch(checkpoints, "main") == branch
    # A run that ends before its first checkpoint may begin again.
    assert found(checkpoints) == []
    assert current_branch(checkpoints) == "main"


def test_ensuring_a_branch_opens_one_only_once(checkpoints: Location) -> None:
    assert ensure_branch(checkpoints, "start") == "main"
    before = tree(path_of(checkpoints))
    assert ensure_branch(checkpoints, "again") == "main"
    assert tree(path_of(checkpoints)) == before
    open_branch(checkpoints, "main", 3, "back")
    assert ensure_branch(checkpoints, "again") == "branch-0002"


def test_newest_first_and_only_committed_ones(checkpoints: Location) -> None:
    main = put_main(checkpoints, 10, 20, 9)
    put_manifest(main, 30)
    (main / "notes.txt").write(b"")
    (main / "step-000000040").write(b"a file")
    assert found(checkpoints) == [("main", 20), ("main", 10), ("main", 9)]


def test_going_back_opens_a_branch_and_abandons_what_came_after(checkpoints: Location) -> None:
    main = put_main(checkpoints, 10, 20, 30)
    branch = open_branch(checkpoints, "main", 20, "loss spike")
    assert (branch.name, branch.parent, branch.parent_step) == ("branch-0002", "main", 20)
    assert current_branch(checkpoints) == "branch-0002"
    # Nothing is committed yet: the parent's step, never a newer one of the parent.
    assert found(checkpoints) == [("main", 20), ("main", 10)]
    put_checkpoint(main, 40)
    assert found(checkpoints) == [("main", 20), ("main", 10)]
    put_checkpoint(checkpoints / "branch-0002", 25, round=4)
    assert found(checkpoints) == [("branch-0002", 25), ("main", 20), ("main", 10)]
    assert found(checkpoints, "main") == [("main", 40), ("main", 30), ("main", 20), ("main", 10)]


def test_a_branch_of_a_branch(checkpoints: Location) -> None:
    put_main(checkpoints, 10, 20, 30)
    open_branch(checkpoints, "main", 20, "")
    put_checkpoint(checkpoints / "branch-0002", 25, round=4)
    put_checkpoint(checkpoints / "branch-0002", 35, round=4)
    open_branch(checkpoints, "branch-0002", 30, "")
    put_checkpoint(checkpoints / "branch-0003", 31, round=6)
    assert found(checkpoints) == [("branch-0003", 31), ("branch-0002", 25), ("main", 20), ("main", 10)]
    # A return beyond the beginning of its parent: the grandparent's later steps are abandoned too.
    open_branch(checkpoints, "branch-0002", 15, "")
    assert found(checkpoints) == [("main", 10)]
    assert [member.name for member in ancestry(checkpoints, "branch-0004")] == ["branch-0004", "branch-0002", "main"]


def test_a_branch_may_begin_where_nothing_is_committed(checkpoints: Location) -> None:
    """A run resumed from memory, at a step between two checkpoints."""
    put_main(checkpoints, 10, 20)
    open_branch(checkpoints, "main", 15, "warm restore")
    assert found(checkpoints) == [("main", 10)]


def test_all_branches_by_name(checkpoints: Location) -> None:
    assert list_branches(checkpoints) == []
    put_main(checkpoints, 10)
    opened = [open_branch(checkpoints, "main", 10, reason) for reason in ("a", "b")]
    path_of(checkpoints / "other").mkdir()
    (checkpoints / "file").write(b"")
    assert list_branches(checkpoints) == [*opened, read_branch(checkpoints, "main")]


def test_names_count_up_and_are_never_used_again(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    for taken in ("branch-0004", "branch-00005", "branch-12", "branch-0009x"):
        path_of(checkpoints / taken).mkdir()
    assert open_branch(checkpoints, "main", 10, "").name == "branch-0006"
    put_branch(checkpoints, "branch-9999")
    assert open_branch(checkpoints, "main", 10, "").name == "branch-10000"
    put_branch(checkpoints, f"branch-{10**18 - 1}")
    assert open_branch(checkpoints, "main", 10, "").name == f"branch-{10**18}"
    assert open_branch(checkpoints, "main", 10, "").name == f"branch-{10**18 + 1}"
    assert open_branch(checkpoints, "branch-10000", 11, "").parent == "branch-10000"


def test_the_origins_that_other_branches_need(checkpoints: Location) -> None:
    put_main(checkpoints, 10, 20, 30)
    for parent, step in (("main", 25), ("branch-0002", 40), ("main", 5)):
        open_branch(checkpoints, parent, step, "")
    steps = [10, 20, 30]
    line = ancestry(checkpoints, "branch-0003")
    assert origins(line, "main", steps) == {20}
    assert origins(line, "branch-0002", [27, 40, 50]) == {40}
    assert origins(line, "branch-0003", [60]) == set()
    assert origins(list_branches(checkpoints), "main", steps) == {20}
    assert origins(line, "main", []) == set()


def test_a_new_branch_needs_a_parent_that_is_there(checkpoints: Location) -> None:
    with pytest.raises(MissingFileError, match=r"main/BRANCH is missing, so main is no branch \(there are: none\)"):
        open_branch(checkpoints, "main", 10, "")
    put_main(checkpoints, 10)
    before = tree(path_of(checkpoints))
    with pytest.raises(MissingFileError, match=r"branch-0007 is no branch \(there are: main\)"):
        open_branch(checkpoints, "branch-0007", 10, "")
    with pytest.raises(CheckpointError, match=r"holds a run already \(claims, main\); a new branch of it needs"):
        open_branch(checkpoints, "", None, "")
    assert tree(path_of(checkpoints)) == before


PREPARATION = """
from pathlib import Path
from megatrain.checkpoint_format.lineage import ensure_branch, open_branch
from megatrain.checkpoint_format.local_location import LocalLocation
checkpoints = LocalLocation(Path({place!r}))
"""


def crashed_copies(checkpoints: Location, action: str) -> list[Location]:
    """Return copies of a tree in which `action` crashed before each of its changes to the disk."""
    copies = []
    is_killed = True
    while is_killed:
        copy = LocalLocation(path_of(checkpoints).with_name(f"copy-{len(copies)}"))
        shutil.copytree(path_of(checkpoints), path_of(copy))
        is_killed = crash_at(len(copies), PREPARATION.format(place=str(copy)), action)
        copies.append(copy)
    return copies[:-1]


@pytest.mark.slow
def test_a_crash_before_resume_leaves_the_run_where_it_was(checkpoints: Location) -> None:
    put_main(checkpoints, 10, 20)
    copies = crashed_copies(checkpoints, "open_branch(checkpoints, 'main', 10, '')")
    # a claim, a directory, BRANCH, then where the round continues: each is written, then named
    assert len(copies) == 7
    for copy in copies:
        assert current_branch(copy) == "main"
        assert found(copy) == [("main", 20), ("main", 10)]
    assert [len(list_branches(copy)) for copy in copies] == [1, 1, 1, 1, 2, 2, 2]
    for copy in copies:
        branch = open_branch(copy, "main", 10, "again")
        assert current_branch(copy) == branch.name
        assert found(copy) == [("main", 10)]


def test_lock_file_does_not_count_as_a_saved_run(checkpoints: Location) -> None:
    with checkpoints_locked(str(checkpoints)):
        assert [entry.name for entry in checkpoints.entries()] == ["LOCK"]
        assert found(checkpoints) == []
        assert ensure_branch(checkpoints, "a new run") == "main"


def test_crash_while_opening_the_first_branch_is_a_fresh_start(checkpoints: Location) -> None:
    path_of(checkpoints).mkdir()
    copies = crashed_copies(checkpoints, "ensure_branch(checkpoints, '')")
    assert len(copies) == 3
    for copy in copies:
        assert current_branch(copy) == "main"
        assert found(copy) == []
        assert ensure_branch(copy, "again") == "main"
        assert [branch.name for branch in list_branches(copy)] == ["main"]


@pytest.mark.slow
def test_crash_while_opening_the_second_branch(checkpoints: Location) -> None:
    """No record was written: one branch needs none, two branches would."""
    put_main(checkpoints, 10, 20)
    (checkpoints / "claims").remove()
    copies = crashed_copies(checkpoints, "open_branch(checkpoints, 'main', 10, '')")
    assert len(copies) == 10
    for copy in copies:
        assert found(copy) == [("main", 20), ("main", 10)]


def test_a_write_that_fails_before_resume_changes_nothing(
    checkpoints: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_main(checkpoints, 10)
    real = LocalLocation.write

    def write(self: LocalLocation, content: bytes) -> None:
        if self.name.endswith(".resume"):
            raise CheckpointError("injected")
        real(self, content)

    monkeypatch.setattr(LocalLocation, "write", write)
    with pytest.raises(CheckpointError, match="injected"):
        open_branch(checkpoints, "main", 5, "")
    assert current_branch(checkpoints) == "main"
    assert found(checkpoints) == [("main", 10)]
    monkeypatch.undo()
    assert open_branch(checkpoints, "main", 10, "").name == "branch-0003"


ORDER = SampleStream(
    seed=7,
    sources=(StreamSource("web", 5000, "d" * 32), StreamSource("code", 3000)),
    stages=(MixtureStage(0, (1,), 16), MixtureStage(72, (3, 1), 16)),
    skipped=((80, 96),),
)


def test_order_left_by_a_rollback_stays_in_the_lineage(checkpoints: Location) -> None:
    put_main(checkpoints, 10, 20)
    first = open_branch(checkpoints, "main", 10, "back", rollback="i-1", data=ORDER)
    assert read_branch(checkpoints, first.name) == first
    put_checkpoint(checkpoints / first.name, 15)
    more = replace(ORDER, skipped=((80, 96), (120, 128)))
    second = open_branch(checkpoints, first.name, 15, "back again", rollback="i-2", data=more)
    line = ancestry(checkpoints, open_branch(checkpoints, second.name, 15, "restored").name)
    assert [one.rollback for one in line] == ["", "i-2", "i-1", ""]
    assert [recorded_order(line[first:]) for first in range(4)] == [more, more, ORDER, None]
    # An entry without content is left out.
    assert set(json.loads((checkpoints / "main" / "BRANCH").read())).isdisjoint({"rollback", "data"})


def test_run_rolled_back_to_its_beginning_may_have_no_checkpoint(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    branch = open_branch(checkpoints, "main", 0, "back", rollback="i-1", data=ORDER)
    assert found(checkpoints) == []
    put_manifest(checkpoints / branch.name, 5)
    with pytest.raises(CheckpointError, match=r"holds .*, but no committed checkpoint to resume from"):
        found(checkpoints)


def test_impossible_order_is_named(checkpoints: Location) -> None:
    branch = put_branch(checkpoints, "main")
    content = json.loads((branch / "BRANCH").read())
    for name, value, message in [
        *(("skipped", value, r"BRANCH: data\.skipped=") for value in ("none", [[3, 1]], [[1, 3], [2, 5]], [[-1, 3]])),
        ("stages", [], r"BRANCH: data\.stages=\[\]; expected a first stage at sample 0"),
        ("sources", 3, r"BRANCH: data\.sources=3; expected a list of objects"),
        ("seed", ..., r"BRANCH: data\.seed is missing; expected an integer"),
    ]:
        data = {key: one for key, one in {**ORDER.to_dict(), name: value}.items() if one != ...}
        (branch / "BRANCH").write(json.dumps({**content, "data": data}).encode())
        with pytest.raises(CheckpointError, match=message):
            read_branch(checkpoints, "main")
