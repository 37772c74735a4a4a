"""`megatrain ckpt ls` and `inspect`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain.checkpoint_format.checkpoint_names import WRITING_NAME, is_manifest_name
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.cli import main
from megatrain.data.mixture import Mixture
from tests.helpers.checkpoint_tree import manifest_path, put_main, put_manifest
from tests.helpers.saved_checkpoint import Ckpt, put_whole, whole_state, with_layout, write_as_job
from tests.helpers.source_tree import ROOT
from tests.helpers.training_case import make_config
from tests.helpers.waiting import DEADLINE_S


def states(document: dict) -> dict[str, str]:
    return {f"{one['branch']}/{one['step']}": one["state"] for one in document["checkpoints"]}


def listed_bytes(place: Path) -> int:
    return sum(
        path.stat().st_size for path in place.iterdir() if path.name != "COMMIT" and not is_manifest_name(path.name)
    )


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_all_branches_are_listed_with_the_resume_point(ckpt: Ckpt, run: Path, name: str) -> None:
    found = ckpt("ls", run / name, "--json")

    assert found["current_branch"] == "branch-0002"
    assert [(one["name"], one["is_current"]) for one in found["branches"]] == [("branch-0002", True), ("main", False)]
    assert set(states(found)) == {"main/10", "main/20", "main/30", "main/40", "branch-0002/25"}
    in_line = {one["step"] for one in found["checkpoints"] if one["is_in_line"]}
    assert in_line == {10, 20, 25}
    assert [one["step"] for one in found["checkpoints"] if one["is_resume_point"]] == [25]
    assert found["resume"]["step"] == 25
    assert "newest committed checkpoint of branch-0002" in found["resume"]["reason"]
    (newest,) = [one for one in found["checkpoints"] if one["step"] == 25]
    assert newest["num_bytes"] == listed_bytes(Path(newest["place"]))
    assert (newest["consumed_tokens"], newest["round"]) == (983_040, 2)


def test_text_marks_the_current_branch_and_what_is_abandoned(ckpt: Ckpt, run: Path) -> None:
    ckpt("pin", run / "checkpoints/main/step-000000010", "--reason", "good\x1b[31m")
    lines = ckpt("ls", run).splitlines()

    assert any(line.startswith("branch-0002 (current): from step 20 of main") for line in lines)
    (pinned,) = [line for line in lines if " pinned " in line]
    assert pinned.endswith("pinned: good\\x1b[31m")
    assert sum(line.endswith("abandoned") for line in lines) == 2
    assert any(line.startswith("->  ") and " 25 " in line for line in lines)
    assert lines[-1].startswith("-> a job resumes from branch-0002/step-000000025: the newest")


def test_a_part_of_a_run_lists_that_part(ckpt: Ckpt, run: Path) -> None:
    assert set(states(ckpt("ls", run / "checkpoints/main", "--json"))) == {"main/10", "main/20", "main/30", "main/40"}
    assert set(states(ckpt("ls", run / "checkpoints/main/step-000000010", "--json"))) == {"main/10"}


def test_states_show_how_far_a_checkpoint_came(ckpt: Ckpt, tmp_path: Path) -> None:
    branch = put_main(LocalLocation(tmp_path))
    put_whole(branch, 1)
    ckpt("pin", put_whole(branch, 2))
    (branch / "step-000000003" / WRITING_NAME).write(b"{}")
    put_manifest(branch, 4)
    (put_whole(branch, 5) / "COMMIT").unlink()
    manifest_path(put_whole(branch, 6)).write_bytes(b"{}")

    found = states(ckpt("ls", tmp_path, "--json"))

    assert found == {
        "main/1": "committed", "main/2": "pinned", "main/3": "unfinished", "main/4": "uncommitted",
        "main/5": "uncommitted", "main/6": "uncommitted",
    }  # fmt: skip


def test_a_damaged_newest_one_is_skipped_and_named(ckpt: Ckpt, run: Path) -> None:
    file = run / "checkpoints/branch-0002/step-000000025/r000002-rank-00000.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    found = ckpt("ls", run, "--json")

    assert (found["resume"]["branch"], found["resume"]["step"]) == ("main", 20)
    assert "the current branch, has no usable checkpoint" in found["resume"]["reason"]
    assert str(file) in found["resume"]["skipped"][0]


def test_listing_explains_why_no_checkpoint_is_resumable(ckpt: Ckpt, tmp_path: Path) -> None:
    put_manifest(put_main(LocalLocation(tmp_path)), 10)
    found = ckpt("ls", tmp_path, "--json")

    assert found["resume"]["step"] is None
    assert "no committed checkpoint to resume from" in found["resume"]["reason"]
    assert "without a checkpoint: " in ckpt("ls", tmp_path)


def test_a_place_without_checkpoints_is_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    assert "is not a checkpoint and contains none" in ckpt("ls", tmp_path, code=66)
    put_whole(LocalLocation(tmp_path / "alone"), 3)
    assert "outside of a run" in ckpt("ls", tmp_path / "alone/step-000000003", code=66)


def test_a_url_is_a_place(ckpt: Ckpt, run: Path) -> None:
    for name in ("", "/checkpoints/", "/checkpoints/branch-0002", "/checkpoints/branch-0002/step-000000025/"):
        assert ckpt("ls", f"file://{run}{name}", "--json")["resume"]["step"] == 25
        assert ckpt("inspect", f"file://{run}{name}", "--json")["step"] == 25


def test_inspect_shows_what_a_job_wrote(ckpt: Ckpt, tmp_path: Path) -> None:
    config = with_layout(make_config(), tp=2, pp=2)
    state = whole_state(config)
    write_as_job(tmp_path / "saved", config, state)

    found = ckpt("inspect", tmp_path / "saved", "--tensors", "--json")

    model = {key: one for key, one in state.items() if key.startswith("model.")}
    assert found["num_parameters"] == sum(one.numel() for one in model.values())
    assert found["mesh"] == {"tp_size": 2, "pp_size": 2, "dp_size": 1, "num_chunks": 1}
    assert (found["step"], found["num_data_files"], found["has_optimizer"]) == (7, 4, True)
    assert {one["key"]: tuple(one["shape"]) for one in found["tensors"]} == {
        key: tuple(one.shape) for key, one in state.items()
    }
    assert found["num_bytes"] == listed_bytes(tmp_path / "saved")


def test_inspect_as_text(ckpt: Ckpt, run: Path) -> None:
    put_whole(LocalLocation(run / "checkpoints/branch-0002"), 26, torch.zeros(5, dtype=torch.bfloat16))
    text = ckpt("inspect", run, "--tensors")

    assert "parameters   5, weights only" in text
    assert "mesh         pp 2, dp 2, tp 2, 2 chunks a stage" in text
    assert "tokens       983,040 in 3,840 samples" in text
    assert text.splitlines()[-1].split() == ["model.word", "bfloat16", "5", "10", "B", "1", "box"]


def test_inspect_shows_what_was_read_of_each_source(ckpt: Ckpt, tmp_path: Path) -> None:
    sources = tuple(StreamSource(name, 100_000 * (number + 1)) for number, name in enumerate(("web", "code", "books")))
    stages = (MixtureStage(0, (3, 1), 16), MixtureStage(3000, (1, 0, 1), 16))
    stream = SampleStream(7, sources, stages)
    # A block of 4,096 samples is mixed, so only the mixture knows which sources its first 3,000 samples read.
    first = Mixture(7, stages[:1], 2).counts(3000).tolist()
    place = put_whole(LocalLocation(tmp_path / "run/checkpoints/main"), 5, data=stream, consumed_samples=3000)

    found = ckpt("inspect", place, "--json")["sources"]

    assert [one["num_samples"] for one in found] == [*first, 0]
    assert [one["weight"] for one in found] == [1, 0, 1]
    lines = ckpt("inspect", place).splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["web", "100,000", f"{first[0]:,}", "50.00%"],
        ["code", "200,000", f"{first[1]:,}", "0.00%"],
        ["books", "300,000", "0", "50.00%"],
    ]


@pytest.mark.parametrize("names", [["web"], ["web", "code"]])
def test_inspect_counts_no_sample_that_was_left_out(ckpt: Ckpt, tmp_path: Path, names: list[str]) -> None:
    sources = tuple(StreamSource(name, 100_000) for name in names)
    skipped = ((10, 30), (2990, 3050), (9000, 9100))
    stream = SampleStream(7, sources, (MixtureStage(0, (1,) * len(names), 16),), skipped=skipped)
    place = put_whole(LocalLocation(tmp_path / "checkpoints/main"), 5, data=stream, consumed_samples=3000)
    read = [one["num_samples"] for one in ckpt("inspect", place, "--json")["sources"]]
    places = [sample for sample in range(3000) if not 10 <= sample < 30 and sample < 2990]
    expected = Mixture.of(stream).places(np.array(places))[0]
    assert read == np.bincount(expected, minlength=len(names)).tolist()


def test_a_step_of_a_run_can_be_named(ckpt: Ckpt, run: Path) -> None:
    assert ckpt("inspect", run, "--step", 20, "--json")["branch"] == "main"
    assert ckpt("inspect", run, "--step", 40, "--branch", "main", "--json")["step"] == 40
    message = ckpt("inspect", run, "--step", 40, code=66)
    assert "no committed checkpoint of step 40" in message
    assert "there are: branch-0002/25, main/20, main/10" in message


def test_an_unfinished_checkpoint_is_not_inspected(ckpt: Ckpt, run: Path) -> None:
    place = run / "checkpoints/main/step-000000010"
    (place / "COMMIT").unlink()
    assert f"not a complete checkpoint, so it is not read: {place / 'COMMIT'}: missing" in ckpt(
        "inspect", place, code=66
    )


def test_inspect_of_a_run_shows_what_a_job_resumes_from(
    ckpt: Ckpt, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = run / "checkpoints/branch-0002/step-000000025"
    (damaged / ".metadata").unlink()
    assert main(["ckpt", "inspect", str(run), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == 20
    assert "note: branch-0002/step-000000025 is damaged and was skipped: " in captured.err
    assert str(damaged / ".metadata") in captured.err

    assert ckpt("inspect", run, "--branch", "main", "--json")["step"] == 40
    for step in (10, 20, 30, 40):
        (run / f"checkpoints/main/step-{step:09d}/index.json").unlink()
    (damaged / "index.json").unlink()
    assert f"{damaged / 'index.json'}: cannot be read: No such file" in ckpt("inspect", run, code=66)


def test_without_a_current_branch_nothing_is_called_abandoned(ckpt: Ckpt, run: Path) -> None:
    assert "abandoned" in ckpt("ls", run)
    (run / "checkpoints/claims/00000002.resume").write_bytes(b"{")
    text = ckpt("ls", run)
    assert "abandoned" not in text
    assert "a job starts without a checkpoint: " in text


def test_a_terminal_of_another_encoding_gets_escapes(tmp_path: Path) -> None:
    place = put_whole(LocalLocation(tmp_path / "p\u00f6rt"), 3)
    done = subprocess.run(
        [sys.executable, "-m", "megatrain", "ckpt", "inspect", str(place)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, cwd=ROOT, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert b"p\\xf6rt/step-000000003" in done.stdout
