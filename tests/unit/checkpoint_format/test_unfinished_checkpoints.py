"""Checkpoints that are not finished, and those that retention removes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint_format.checkpoint_files import is_unfinished, remove_checkpoint
from megatrain.checkpoint_format.checkpoint_names import manifest_name
from megatrain.checkpoint_format.lineage import candidates, open_branch, unfinished
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.retention import to_remove
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import crash_at, found, path_of, put_checkpoint, put_main, put_manifest


@pytest.fixture
def checkpoints(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "checkpoints")


def begin(branch: Location, step: int) -> Location:
    """Leave the state of a writer that was killed after its first files."""
    directory = branch / f"step-{step:09d}"
    (directory / "WRITING").write(b"{}")
    (directory / "r000000-rank-00000.distcp").write(b"half")
    return directory


def test_run_with_only_an_unfinished_checkpoint_starts_afresh(checkpoints: Location) -> None:
    main = put_main(checkpoints)
    places = [begin(main, 20), begin(main, 10)]
    (places[0] / manifest_name(b"{}", 2)).write(b"{}")
    assert candidates(checkpoints) == []
    assert unfinished(checkpoints) == [places[1], places[0]]
    put_checkpoint(main, 5)
    assert found(checkpoints) == [("main", 5)]
    assert unfinished(checkpoints) == [places[1], places[0]]


def test_empty_directory_does_not_count_as_unfinished(checkpoints: Location) -> None:
    main = put_main(checkpoints)
    path_of(main / "step-000000010").mkdir()
    assert candidates(checkpoints) == []
    assert unfinished(checkpoints) == []


@pytest.mark.parametrize("name", ["COMMIT", "r000002-metadata"])
def test_directory_that_was_once_complete_is_not_unfinished(checkpoints: Location, name: str) -> None:
    """With COMMIT: it was complete, and is damaged. Without WRITING: its removal has begun."""
    directory = begin(put_main(checkpoints), 10)
    (directory / name).write(b"?")
    if name != "COMMIT":
        (directory / "WRITING").remove()
    assert not is_unfinished(directory)
    assert unfinished(checkpoints) == []
    with pytest.raises(CheckpointError, match="holds main/step-000000010, but no committed checkpoint"):
        candidates(checkpoints)


def test_only_checkpoint_directories_are_unfinished(checkpoints: Location) -> None:
    main = put_main(checkpoints)
    (main / "other" / "WRITING").write(b"")
    (main / "step-000000010").write(b"a file")
    assert unfinished(checkpoints) == []
    with pytest.raises(CheckpointError, match=r"holds main/other and main/step-000000010, but no committed checkpoint"):
        candidates(checkpoints)


def test_unfinished_new_branch_resumes_the_old_one(checkpoints: Location) -> None:
    put_main(checkpoints, 10)
    begin(checkpoints / open_branch(checkpoints, "main", 10, "").name, 20)
    assert found(checkpoints) == [("main", 10)]
    (checkpoints / "main" / "step-000000010").remove()
    with pytest.raises(CheckpointError, match="branch-0002 begins at step 10 of main, but no committed"):
        candidates(checkpoints)


REMOVE = """
from pathlib import Path
from megatrain.checkpoint_format.checkpoint_files import remove_checkpoint
from megatrain.checkpoint_format.local_location import LocalLocation
directory = LocalLocation(Path({place!r}))
"""


@pytest.mark.slow(kept=["False"])
@pytest.mark.parametrize("was_complete", [False, True])
def test_a_removal_that_is_killed_does_not_change_what_it_was(checkpoints: Location, was_complete: bool) -> None:
    number = 0
    is_killed = True
    while is_killed:
        main = put_main(checkpoints)
        directory = begin(main, 10)
        put_manifest(main, 10)
        if was_complete:
            # its writer was killed after COMMIT, so WRITING still exists
            put_checkpoint(main, 10)
        is_killed = crash_at(number, REMOVE.format(place=str(directory)), "remove_checkpoint(directory)")
        is_there = bool(directory.entries())
        assert is_unfinished(directory) == (directory.exists() and not (was_complete and is_there))
        checkpoints.remove()
        number += 1
    assert number >= 4
    remove_checkpoint(directory)


STEPS = [10, 20, 30, 40, 50]


EXAMPLES: list[tuple[list[int], int, int, set[int], list[int]]] = [
    (STEPS, 0, 0, set(), []),
    (STEPS, 0, 20, set(), []),
    (STEPS, 1, 0, set(), [10, 20, 30, 40]),
    (STEPS, 2, 0, set(), [10, 20, 30]),
    (STEPS, 5, 0, set(), []),
    (STEPS, 9, 0, set(), []),
    (STEPS, 1, 20, set(), [10, 30]),
    (STEPS, 1, 7, set(), [10, 20, 30, 40]),
    (STEPS, 1, 1, set(), []),
    (STEPS, 1, 0, {20, 30}, [10, 40]),
    (STEPS, 1, 0, {99}, [10, 20, 30, 40]),
    ([], 1, 0, set(), []),
    ([7], 1, 0, set(), []),
    ([0, 1, 2], 1, 5, set(), [1]),
]


def test_examples_of_what_is_removed() -> None:
    for steps, keep_last, keep_every, kept, removed in EXAMPLES:
        assert to_remove(steps, kept, keep_last, keep_every) == removed, (steps, keep_last, keep_every, kept)


SOME_STEPS = st.lists(st.integers(0, 60), max_size=20)
SOME = st.frozensets(st.integers(0, 60), max_size=16)


@settings(max_examples=100, derandomize=True)
@given(SOME_STEPS, SOME, st.integers(0, 8), st.integers(0, 12))
def test_a_step_goes_exactly_when_no_rule_keeps_it(
    steps: list[int], kept: frozenset[int], keep_last: int, keep_every: int
) -> None:
    removed = to_remove(steps, kept, keep_last, keep_every)
    assert removed == sorted(set(removed))
    for step in set(steps):
        num_newer = len({other for other in steps if other > step})
        is_kept = keep_last == 0 or num_newer < keep_last or step in kept
        is_kept = is_kept or (keep_every > 0 and step % keep_every == 0)
        assert (step in removed) is not is_kept
    assert set(removed) <= set(steps)
    if steps:
        assert max(steps) not in removed


@pytest.mark.slow
@settings(max_examples=200, derandomize=True)
@given(SOME_STEPS, SOME, st.integers(0, 8), st.integers(0, 12))
def test_repeated_or_interrupted_removal_has_one_result(
    steps: list[int], kept: frozenset[int], keep_last: int, keep_every: int
) -> None:
    removed = to_remove(steps, kept, keep_last, keep_every)
    rest = sorted(set(steps) - set(removed))
    assert to_remove(rest, kept, keep_last, keep_every) == []
    # The next removal completes an interrupted one, whatever was saved meanwhile.
    newer = max(steps, default=0) + 1
    later = to_remove([*steps, newer], kept, keep_last, keep_every)
    assert set(removed) <= set(later)
    left = removed[len(removed) // 2 :]
    after_a_part = to_remove([*rest, *left, newer], kept, keep_last, keep_every)
    assert set(after_a_part) == set(later) - set(removed[: len(removed) // 2])
