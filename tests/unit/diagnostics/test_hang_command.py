"""`megatrain diag hang`: from black boxes, from files kept of a broken round, and from spans; damaged files too."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_records import HangEvidence, RankEvidence, RankPosition
from megatrain.contracts.records.record import encode
from megatrain.run_files.run_directory import RunDirectory, own_box_directory, own_box_paths
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Groups, Spans, Stacks
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.synthetic_steps import rank_rows
from tests.helpers.table_rows import table_rows

LAYOUT = Layout(tp_size=2, dp_size=2)
GOLDEN = Path(__file__).parents[2] / "golden" / "flight_recorder"
LATE = 2


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[Path]:
    """Return a directory with the boxes of four ranks, of which rank 2 never entered the reduction."""
    directory = tmp_path / "boxes"
    directory.mkdir()
    recorders = [stuck_rank(directory, rank) for rank in range(4)]
    yield directory
    for recorder in recorders:
        recorder.close()


def stuck_rank(directory: Path, rank: int, round_number: int = 3, run_key: str = "key") -> Recorder:
    identity = Identity("demo", "main", round_number, rank, LAYOUT, os.getpid(), f"host-{rank // 2}")
    recorder = open_recorder(identity, directory=str(directory), run_key=run_key, num_records=256)
    groups = {"tp": LAYOUT.ranks_along(rank, "tp"), "dp": LAYOUT.ranks_along(rank, "dp")}
    numbers = {name: recorder.add_group(name, ranks) for name, ranks in groups.items()}
    recorder.set_step(7)
    if rank == LATE:
        recorder.begin(Operation.FORWARD_COMPUTE)
        return recorder
    # the neighbor of the late rank waits for it in their tensor group, so it does not enter the reduction of rank 1
    is_neighbor = rank == LATE + 1
    group = numbers["tp" if is_neighbor else "dp"]
    token = recorder.begin(Operation.TP_ALL_GATHER if is_neighbor else Operation.DP_ALL_REDUCE, group=group)
    recorder.await_end(token)
    return recorder


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["diag", "hang", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_black_boxes_of_a_job_that_hangs(boxes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, str(tmp_path), "--blackbox", str(boxes))
    (suspect,) = found["suspects"]
    assert (suspect["rank"], suspect["host"], suspect["doing"]) == (LATE, "host-1", "forward-compute")
    assert (found["confidence"], found["round"], found["grid"]["letters"]) == ("certain", 3, "wwXw")
    assert main(["diag", "hang", str(tmp_path), "--blackbox", str(boxes)]) == 0
    text = capsys.readouterr().out
    assert "culprit     rank 2 on host-1" in text
    assert "never entered collective 1 of" in text
    assert "dp 1  Xw" in text


def test_damaged_and_foreign_boxes_are_reported_and_left_out(
    boxes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_box_directory(boxes) / "megatrain.demo.damaged.blackbox").write_bytes(b"MTBLKBOX" + bytes(99))
    other = open_recorder(
        Identity("other", "main", 9, 0, Layout(), os.getpid(), "host-9"),
        directory=str(boxes),
        run_key="k",
        num_records=64,
    )
    newest = stuck_rank(boxes, 0)  # newer than the box of the other job; the earlier box of rank 0 is set aside
    found = printed(capsys, str(tmp_path), "--blackbox", str(boxes))
    other.close()
    newest.close()
    assert [one["rank"] for one in found["suspects"]] == [LATE]
    assert len(found["problems"]) == 2
    assert any("other jobs are left out: other" in problem for problem in found["problems"])
    assert any("truncated" in problem for problem in found["problems"])


def test_only_boxes_of_the_given_run_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, directory = RunDirectory(tmp_path / "run"), tmp_path / "boxes"
    run.create()
    directory.mkdir()
    recorders = [stuck_rank(directory, rank, round_number=1, run_key=run.key) for rank in range(4)]
    # boxes of an earlier run of the same job, of a later round, and of a job that began later
    recorders += [stuck_rank(directory, rank, round_number=8) for rank in (0, 1)]
    other = Identity("other", "main", 9, 0, Layout(), os.getpid(), "host-9")
    recorders.append(open_recorder(other, directory=str(directory), run_key="k", num_records=64))

    found = printed(capsys, str(run.root), "--blackbox", str(directory))

    for recorder in recorders:
        recorder.close()
    assert (found["round"], [one["rank"] for one in found["suspects"]]) == (1, [LATE])
    assert any("left out 3 black boxes of other runs" in problem for problem in found["problems"])


def test_newer_of_a_box_and_its_copy_counts(boxes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = next(boxes.rglob("*rank-00001.blackbox"))
    early = open_recorder(
        Identity("demo", "main", 3, 1, LAYOUT, os.getpid(), "host-0"),
        directory=str(tmp_path), run_key="key", num_records=256,
    )  # fmt: skip
    shutil.copy(
        next(own_box_directory(tmp_path).glob("*rank-00001.blackbox")), box.with_name(f"{box.stem}_copy.blackbox")
    )
    early.close()
    assert printed(capsys, str(tmp_path), "--blackbox", str(boxes))["grid"]["letters"] == "wwXw"


def test_kept_evidence_of_a_broken_round(boxes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    kept = run.incidents / "round-000003"
    kept.mkdir()
    for number, path in enumerate(own_box_paths(boxes)[:2]):
        (kept / f"rank-{number:05d}.blackbox").write_bytes(path.read_bytes())
    evidence = HangEvidence(
        "host-1",
        "s",
        3,
        0.0,
        {"tp:2+2x1": (2, 2, 1), "strange": (0, 2**62, 1)},
        (RankEvidence(3, {"tp:2+2x1": RankPosition(1, 0)}, "S", 7, "step", 0.0, "tp-all-gather", "tp:2+2x1", 1),),
        silent=(LATE,),
    )
    (kept / "host-1.json").write_bytes(encode(evidence))
    (kept / "host-0.json").write_bytes(b"{}")
    found = printed(capsys, str(run.root))
    assert [one["rank"] for one in found["suspects"]] == [LATE]
    assert (found["confidence"], found["silent"], found["grid"]["letters"]) == ("likely", [LATE], "wwXw")
    assert any("host-0.json" in problem for problem in found["problems"])
    assert main(["diag", "hang", str(run.root), "--round", "8"]) != 0
    assert "neither events nor files of a broken round" in capsys.readouterr().err


def test_spans_and_stacks_of_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wait = "/x/megatrain/training/step_loop.py:1 train\n/x/megatrain/comm/group.py:9 finish"
    each = {"round": 1, "rank": range(3)}
    operation = Operation.DP_ALL_REDUCE.number
    tables = (
        rank_rows(Layout(dp_size=3), 1, ["h0", "h1", "h2"]),
        table_rows(Groups, {**each, "group": 1, "stride": 1, "num_ranks": 3, "name": "dp"}),
        table_rows(Spans, {**each, "group": 1, "collective": [6, 5, 6], "operation": operation,
                           "duration_ns": [-1, 10, -1], "step": 4}),
        table_rows(Stacks, {**each, "thread": "MainThread", "stack": [wait, "/x/loader.py:3 read", wait]}),
    )  # fmt: skip
    with SegmentStore(tmp_path / "events") as store:
        for table in tables:
            store.append(type(table), to_arrow(table))
        store.commit()
    found = printed(capsys, str(tmp_path / "events"))
    assert (found["source"], [one["rank"] for one in found["suspects"]], found["hosts"]) == ("spans", [1], ["h1"])
    assert (found["stacks"]["outliers"], found["stacks"]["shared"]["kind"]) == ([1], "rank")
    assert main(["diag", "hang", str(tmp_path / "events")]) == 0
    text = capsys.readouterr().out
    assert "2 waiting (ranks 0, 2): comm/group.py finish < training/step_loop.py train" in text
    assert "the outliers (rank 1) share rank 1 (1 rank)" in text


def test_flight_recorder_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, str(tmp_path), "--flight-recorder", str(GOLDEN))
    assert ([one["rank"] for one in found["suspects"]], found["layout"]["dp_size"]) == ([1], 3)
    unseen = "ranks above 2 without a dump are not counted"
    assert found["problems"] == [f"the dumps do not show how many ranks the job had: {unseen}"]


def test_hang_without_evidence_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", "hang", str(tmp_path)]) != 0
    assert main(["diag", "hang", str(tmp_path), "--blackbox", str(tmp_path / "none")]) != 0
    assert main(["diag", "hang", str(tmp_path), "--stacks"]) != 0
    errors = capsys.readouterr().err
    assert "neither events nor files of a broken round" in errors
    assert "no such directory" in errors
    assert "name the directory of this machine's black boxes" in errors
