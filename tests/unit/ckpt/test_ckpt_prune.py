"""`megatrain ckpt prune`, `pin` and `unpin`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.write_marks import WritingMark
from megatrain.checkpoint_format.checkpoint_names import PINNED_NAME, WRITING_NAME
from megatrain.checkpoint_format.lineage import open_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.cli import main
from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.checkpoint_tree import found, put_main, tree
from tests.helpers.saved_checkpoint import Ckpt, put_whole


def names(document: dict[str, Any]) -> list[str]:
    return sorted(f"{one['branch']}/{one['step']}" for one in document["removed"])


@pytest.fixture(scope="module")
def line_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    line = tmp_path_factory.mktemp("template") / "line"
    main = put_main(LocalLocation(line / "checkpoints"))
    for step in range(10, 70, 10):
        put_whole(main, step)
    return line


@pytest.fixture
def line(line_template: Path, tmp_path: Path) -> Path:
    """A run of one branch with six checkpoints."""
    return Path(shutil.copytree(line_template, tmp_path / "line"))


def test_a_dry_run_removes_nothing(ckpt: Ckpt, line: Path) -> None:
    before = tree(line)
    document = ckpt("prune", line, "--keep-last", 2, "--json")
    text = ckpt("prune", line, "--keep-last", 2)

    assert document["is_dry_run"] is True
    assert names(document) == ["main/10", "main/20", "main/30", "main/40"]
    assert "would remove main/step-000000010" in text
    assert "this was a dry run; --yes removes them" in text
    assert tree(line) == before


def test_yes_removes_what_retention_does_not_keep(ckpt: Ckpt, line: Path) -> None:
    ckpt("pin", line, "--step", 20)
    document = ckpt("prune", line, "--keep-last", 1, "--keep-every", 30, "--yes", "--json")

    assert names(document) == ["main/10", "main/40", "main/50"]
    assert document["is_dry_run"] is False
    assert found(LocalLocation(line / "checkpoints")) == [("main", 60), ("main", 30), ("main", 20)]
    assert ckpt("verify", line, "--all", "--json")["num_damaged"] == 0


def test_defaults_are_the_job_s_own(ckpt: Ckpt, line: Path) -> None:
    assert names(ckpt("prune", line, "--json")) == []
    put_whole(LocalLocation(line / "checkpoints/main"), 70, config={"checkpoint": {"keep_last": 1, "keep_every": 40}})

    document = ckpt("prune", line, "--json")

    assert (document["keep_last"], document["keep_every"]) == (1, 40)
    assert names(document) == ["main/10", "main/20", "main/30", "main/50", "main/60"]


def test_keep_last_counts_by_lineage_and_keeps_origins(ckpt: Ckpt, run: Path) -> None:
    put_whole(LocalLocation(run / "checkpoints/branch-0002"), 30)
    document = ckpt("prune", run, "--keep-last", 1, "--yes", "--json")

    # branch-0002 begins at 20; 30 and 40 of main are abandoned.
    assert names(document) == ["branch-0002/25", "main/10"]
    assert any("main/step-000000040: abandoned; --abandoned removes it" in one for one in document["left_alone"])
    assert found(LocalLocation(run / "checkpoints")) == [("branch-0002", 30), ("main", 20)]


def test_abandoned_ones_go_when_asked_for_unless_pinned(ckpt: Ckpt, run: Path) -> None:
    ckpt("pin", run, "--branch", "main", "--step", 30)
    open_branch(LocalLocation(run / "checkpoints"), "main", 10, "again")
    (LocalLocation(run / "checkpoints/branch-0002/step-000000026") / WRITING_NAME).write(b"{}")

    document = ckpt("prune", run, "--abandoned", "--yes", "--json")

    assert names(document) == ["branch-0002/25", "branch-0002/26", "main/20", "main/40"]
    remaining = ckpt("ls", run, "--json")
    assert {one["step"]: one["state"] for one in remaining["checkpoints"]} == {10: "committed", 30: "pinned"}
    assert [one["name"] for one in remaining["branches"]] == ["branch-0002", "branch-0003", "main"]


def test_leftovers_of_ended_rounds_are_pruned(ckpt: Ckpt, line: Path) -> None:
    main = LocalLocation(line / "checkpoints/main")
    (main / "step-000000015" / WRITING_NAME).write(b"{}")
    (main / "step-000000065" / WRITING_NAME).write(b"{}")

    document = ckpt("prune", line, "--yes", "--json")

    assert names(document) == ["main/15"]
    assert document["left_alone"] == ["main/step-000000065: unfinished; a job may still be writing it"]
    assert (line / "checkpoints/main/step-000000065").exists()


def test_damaged_newest_one_does_not_count_for_keep_last(ckpt: Ckpt, line: Path) -> None:
    (line / "checkpoints/main/step-000000060/.metadata").unlink()
    document = ckpt("prune", line, "--keep-last", 1, "--yes", "--json")

    assert names(document) == ["main/10", "main/20", "main/30", "main/40"]
    assert document["left_alone"] == ["main/step-000000060: damaged; `megatrain ckpt verify` shows the damage"]


def test_prune_removes_nothing_where_all_checkpoints_are_damaged(ckpt: Ckpt, line: Path) -> None:
    for path in (line / "checkpoints/main").glob("step-*/.metadata"):
        path.unlink()
    (LocalLocation(line / "checkpoints/main/step-000000015") / WRITING_NAME).write(b"{}")
    assert names(ckpt("prune", line, "--yes", "--json")) == []
    assert names(ckpt("prune", line, "--keep-last", 1, "--yes", "--json")) == []


def test_pinning_and_back(ckpt: Ckpt, line: Path) -> None:
    place = line / "checkpoints/main/step-000000010"
    assert ckpt("pin", place, "--reason", "paper", "--json")["reason"] == "paper"
    assert ckpt("inspect", place, "--json")["pin_reason"] == "paper"
    assert ckpt("unpin", place, "--json")["was_pinned"] is True
    assert ckpt("inspect", place, "--json")["pin_reason"] is None
    assert "was not pinned" in ckpt("unpin", place)
    (place / "COMMIT").unlink()
    assert "not a complete checkpoint" in ckpt("pin", place, code=66)


def test_a_branch_that_a_job_may_be_writing_to_is_left_alone(ckpt: Ckpt, run: Path) -> None:
    """The run went back to step 20 while its job was running; the job continues on main until it is started again."""
    arguments = ("prune", run, "--abandoned", "--yes", "--json")
    with RunDirectory(run).locked():
        document = ckpt(*arguments)
    assert names(document) == []
    assert document["left_alone"] == [
        f"main/step-0000000{step}: a job may be writing to main" for step in (30, 40)
    ]  # fmt: skip

    (run / "lock").unlink()  # as on a file system that shows no locks of other hosts
    begun = LocalLocation(run / "checkpoints/main/step-000000050")
    WritingMark(2, "demo", time.time()).write(begun)
    document = ckpt(*arguments)
    assert names(document) == []
    assert len(document["left_alone"]) == 3

    WritingMark(2, "demo", time.time() - 3000.0).write(begun)
    assert names(ckpt(*arguments)) == ["main/30", "main/40", "main/50"]


def test_retention_prunes_while_a_job_is_running(ckpt: Ckpt, line: Path) -> None:
    with RunDirectory(line).locked():
        assert len(names(ckpt("prune", line, "--keep-last", 2, "--yes", "--json"))) == 4


def test_many_leftovers_are_few_reads(ckpt: Ckpt, line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(100, 400):
        (line / f"checkpoints/main/step-{step:09d}").mkdir()
    num_reads, read = 0, LocalLocation.read

    def counting_read(self: LocalLocation) -> bytes:
        nonlocal num_reads
        num_reads += 1
        return read(self)

    monkeypatch.setattr(LocalLocation, "read", counting_read)
    assert names(ckpt("prune", line, "--json")) == []
    assert num_reads < 300 * 10


@pytest.mark.parametrize(("keep_last", "is_reported"), [(0, False), (2, True), (-1, True)])
def test_unpinning_warns_of_removal_by_a_running_job(
    line: Path, capsys: pytest.CaptureFixture[str], keep_last: int, is_reported: bool
) -> None:
    main_branch = LocalLocation(line / "checkpoints/main")
    place = put_whole(main_branch, 70, config={"checkpoint": {"keep_last": keep_last}})
    with RunDirectory(line).locked():
        for verb in ("pin", "unpin", "unpin"):
            assert main(["ckpt", verb, str(place)]) == 0
    assert ("that job may remove it after its next checkpoint" in capsys.readouterr().err) is is_reported
    assert not (place / PINNED_NAME).exists()


def test_checkpoint_removed_while_it_is_pinned_is_reported(
    ckpt: Ckpt, line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, write = LocalLocation(line / "checkpoints/main/step-000000010"), LocalLocation.write

    def remove_and_write(self: LocalLocation, content: bytes) -> None:
        place.remove()
        write(self, content)

    monkeypatch.setattr(LocalLocation, "write", remove_and_write)
    assert "was removed just now" in ckpt("pin", place, code=66)
    assert not place.exists()


def test_ambiguous_prune_is_refused(ckpt: Ckpt, line: Path) -> None:
    before = tree(line)
    assert "name the run" in ckpt("prune", line / "checkpoints/main/step-000000010", code=66)
    assert "prune works on all of a run: name " in ckpt("prune", line / "checkpoints/main", "--yes", code=66)
    assert main(["ckpt", "prune", str(line), "--keep-every", "30", "--yes"]) == 2
    assert tree(line) == before


def test_checkpoint_that_lacks_only_its_commit_is_kept(ckpt: Ckpt, line: Path) -> None:
    main_branch = line / "checkpoints/main"
    for step in (10, 20):
        (main_branch / f"step-{step:09d}/COMMIT").unlink()
    (main_branch / "step-000000020/.metadata").unlink()  # half removed

    document = ckpt("prune", line, "--yes", "--json")

    assert names(document) == ["main/20"]
    assert document["left_alone"] == ["main/step-000000010: complete except for a valid COMMIT; --abandoned removes it"]
    # Retention removes it if it would remove the whole checkpoint: an interrupted removal leaves the same state.
    assert "main/10" not in names(ckpt("prune", line, "--keep-last", 5, "--json"))
    assert "main/10" in names(ckpt("prune", line, "--keep-last", 4, "--json"))
    assert "main/10" in names(ckpt("prune", line, "--abandoned", "--yes", "--json"))


def test_a_long_list_is_shortened(ckpt: Ckpt, line: Path) -> None:
    for step in range(100, 150):
        (line / f"checkpoints/main/step-{step:09d}").mkdir()
    text = ckpt("prune", line)
    assert text.count("a job may still be writing it") == 20
    assert "left alone 30 more; --json lists all" in text
    assert "retention keeps all in the history of the current branch" in text
