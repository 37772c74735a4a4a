"""`megatrain ckpt prune`, `pin` and `unpin`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.checkpoint_files import WRITING_NAME
from megatrain.contracts.lineage import open_branch
from megatrain.contracts.location import LocalLocation
from tests.helpers.checkpoint_tree import found, put_main, tree
from tests.helpers.saved_checkpoint import Ckpt, put_whole


def names(document: dict[str, Any]) -> list[str]:
    return sorted(f"{one['branch']}/{one['step']}" for one in document["removed"])


@pytest.fixture
def line(tmp_path: Path) -> Path:
    """A run of one branch with six checkpoints."""
    main = put_main(LocalLocation(tmp_path / "line/checkpoints"))
    for step in range(10, 70, 10):
        put_whole(main, step)
    return tmp_path / "line"


def test_a_dry_run_removes_nothing(ckpt: Ckpt, line: Path) -> None:
    before = tree(line)
    document = ckpt("prune", line, "--keep-last", 2, "--json")
    text = ckpt("prune", line, "--keep-last", 2)

    assert document["is_dry_run"] is True
    assert names(document) == ["main/10", "main/20", "main/30", "main/40"]
    assert "would remove main/step-000000010" in text
    assert "this was a dry run; --yes removes them" in text
    assert tree(line) == before


def test_yes_removes_just_that(ckpt: Ckpt, line: Path) -> None:
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


def test_keep_last_counts_along_the_line_and_spares_where_branches_begin(ckpt: Ckpt, run: Path) -> None:
    put_whole(LocalLocation(run / "checkpoints/branch-0002"), 30)
    document = ckpt("prune", run, "--keep-last", 1, "--yes", "--json")

    # 20 is where branch-0002 begins; 30 and 40 of main are abandoned
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


def test_leftovers_that_nobody_will_finish_go(ckpt: Ckpt, line: Path) -> None:
    main = LocalLocation(line / "checkpoints/main")
    (main / "step-000000015" / WRITING_NAME).write(b"{}")
    (main / "step-000000065" / WRITING_NAME).write(b"{}")

    document = ckpt("prune", line, "--yes", "--json")

    assert names(document) == ["main/15"]
    assert document["left_alone"] == ["main/step-000000065: unfinished; it may be being written"]
    assert (line / "checkpoints/main/step-000000065").exists()


def test_a_damaged_newest_one_does_not_cost_the_last_whole_one(ckpt: Ckpt, line: Path) -> None:
    (line / "checkpoints/main/step-000000060/.metadata").unlink()
    document = ckpt("prune", line, "--keep-last", 1, "--yes", "--json")

    assert names(document) == ["main/10", "main/20", "main/30", "main/40"]
    assert document["left_alone"] == ["main/step-000000060: damaged; `megatrain ckpt verify` says how"]


def test_without_anything_whole_nothing_goes(ckpt: Ckpt, line: Path) -> None:
    for path in (line / "checkpoints/main").glob("step-*/.metadata"):
        path.unlink()
    assert names(ckpt("prune", line, "--keep-last", 1, "--yes", "--json")) == []


def test_one_checkpoint_is_not_pruned(ckpt: Ckpt, line: Path) -> None:
    assert "name the run" in ckpt("prune", line / "checkpoints/main/step-000000010", code=66)


def test_pinning_and_back(ckpt: Ckpt, line: Path) -> None:
    place = line / "checkpoints/main/step-000000010"
    assert ckpt("pin", place, "--reason", "paper", "--json")["reason"] == "paper"
    assert ckpt("inspect", place, "--json")["pin_reason"] == "paper"
    assert ckpt("unpin", place, "--json")["was_pinned"] is True
    assert ckpt("inspect", place, "--json")["pin_reason"] is None
    assert "was not pinned" in ckpt("unpin", place)
    (place / "COMMIT").unlink()
    assert "no complete checkpoint" in ckpt("pin", place, code=66)
