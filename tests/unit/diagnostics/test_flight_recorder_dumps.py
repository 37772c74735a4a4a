"""Flight Recorder dumps of torch 2.13 on gloo: the culprit, as torch's own analyzer finds it, and invalid dumps."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.flight_recorder import (
    disagreements,
    flight_activities,
    flight_groups,
    known_ranks,
    parse_dump,
)
from megatrain_diagnostics.analysis.hang import find_hang
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.hang_evidence import read_dumps
from megatrain_job.failures.hang import Confidence, Position
from tests.helpers.require import lazy_module

fr_trace = lazy_module("torch.distributed.flight_recorder.fr_trace")

GOLDEN = Path(__file__).parents[2] / "golden" / "flight_recorder"
DEFAULT = GOLDEN.with_name("flight_recorder_default")
NO_RANKS = Roster(0, Layout(dp_size=3), {}, {})


def golden(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"rank_{rank}.json").read_text())
    return found


def test_missing_rank_is_found_in_gloo_dumps() -> None:
    dumps, problems = read_dumps(GOLDEN)
    finding = find_hang(flight_activities(dumps), flight_groups(dumps, 3), NO_RANKS)

    assert problems == ()
    assert [suspect.rank for suspect in finding.suspects] == [1]
    assert finding.report.confidence is Confidence.CERTAIN
    assert finding.report.missing[0].sequence == 4
    assert dumps[0].titles == {"1": "1:dp"}
    assert flight_activities(dumps)[0].in_flight == "all_reduce"
    assert {entry["state"] for entry in golden(0)["entries"]} == {"scheduled"}


def test_rank_whose_gpu_stays_behind_all_hosts_is_found(tmp_path: Path) -> None:
    """Every host has enqueued collective 6; the GPU of rank 1 has not started 4, at which the others wait."""
    for rank in range(3):
        dump, newest = golden(0), 3 if rank == 1 else 4
        call = dump["entries"][-1]
        dump["entries"] += [call | {"collective_seq_id": number} for number in (5, 6)]
        for entry in dump["entries"]:
            number = entry["collective_seq_id"]
            entry["state"] = "completed" if number <= 3 else "started" if number <= newest else "scheduled"
            entry["retired"] = number <= 3
        dump["pg_status"]["1"] |= {"last_enqueued_collective": "6", "last_started_collective": str(newest)}
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps(dump))
    dumps, _ = read_dumps(tmp_path)
    finding = find_hang(flight_activities(dumps), flight_groups(dumps, 3), NO_RANKS)

    assert [suspect.rank for suspect in finding.suspects] == [1]
    assert finding.report.missing[0].sequence == 4
    assert [dump.positions["1"] for dump in dumps] == [Position(4, 3), Position(3, 3), Position(4, 3)]


def test_analyzer_of_torch_names_the_same_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # it does not read what gloo writes: groups without members, and other names
    for rank in range(3):
        dump = golden(rank)
        dump["pg_config"] = {"1": {"name": "1", "desc": "dp", "ranks": "[0, 1, 2]"}}
        for entry in dump["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
            entry["process_group"] = tuple(entry["process_group"])
            entry["frames"] = [{"name": "f", "filename": "x.py", "line": 1}]
            entry["state"] = "completed" if entry["retired"] else "scheduled"
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    try:
        with suppress(SystemExit):
            fr_trace.main(["-p", "nccl_trace_rank_", str(tmp_path)])
    finally:
        gc.enable()  # torch's loader of dumps disables it permanently.
    output = "".join(capsys.readouterr())
    missing = re.search(r"missing ranks: \{([\d, ]+)\}", output)
    assert missing is not None, output
    sequence = re.search(r"sequence number: (\d+)", output)
    assert sequence is not None

    dumps, _ = read_dumps(GOLDEN)
    report = find_hang(flight_activities(dumps), flight_groups(dumps, 3), NO_RANKS).report
    assert report.suspects == tuple(int(rank) for rank in missing[1].split(","))
    assert report.missing[0].sequence == int(sequence[1])


def test_members_without_a_dump_count(tmp_path: Path) -> None:
    for rank in (0, 2):
        dump = golden(rank)
        dump["pg_config"] = {"1": {"name": "1", "desc": "dp", "ranks": "[0, 1, 2]"}}
        (tmp_path / f"trace_{rank}").write_text(json.dumps(dump))
    dumps, _ = read_dumps(tmp_path)
    finding = find_hang(flight_activities(dumps), flight_groups(dumps, 3), NO_RANKS)
    assert [suspect.rank for suspect in finding.suspects] == [1]
    assert finding.suspects[0].evidence == "logs nothing"


def test_ranks_that_call_different_collectives_are_reported(tmp_path: Path) -> None:
    for rank in range(3):
        dump = golden(rank)
        if rank == 2:
            dump["entries"][1]["profiling_name"] = "gloo:all_gather"
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps(dump))
    dumps, _ = read_dumps(tmp_path)
    (found,) = disagreements(dumps)
    assert (found.group, found.sequence) == ("1", 2)
    assert found.calls == {"all_gather [[4]]": (2,), "all_reduce [[4]]": (0, 1)}
    assert disagreements(read_dumps(GOLDEN)[0]) == ()


def test_default_group_has_all_ranks_though_one_left_no_dump(tmp_path: Path) -> None:
    for config, lost in itertools.product(("named", "empty", "nameless group"), (None, 0, 1, 2)):
        directory = tmp_path / f"{config} without {lost}"
        directory.mkdir()
        for rank in {0, 1, 2} - {lost}:
            dump = json.loads((DEFAULT / f"rank_{rank}.json").read_text())
            if config == "empty":  # as gloo writes it once the job has made another group
                dump["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
            if config == "nameless group":
                for entry in dump["entries"]:
                    entry["process_group"] = ["", "default_pg"]
                dump["pg_status"] = {}
            (directory / f"trace_{rank}.json").write_text(json.dumps(dump))
        dumps, _ = read_dumps(directory)
        assert known_ranks(dumps) == (3, True), directory.name
        finding = find_hang(flight_activities(dumps), flight_groups(dumps, 3), NO_RANKS)
        assert [suspect.rank for suspect in finding.suspects] == [1], (directory.name, finding.report)
        assert finding.silent == (frozenset() if lost is None else {lost}), directory.name


def test_number_of_ranks_is_uncertain_without_members() -> None:
    dumps, _ = read_dumps(GOLDEN)
    assert known_ranks(dumps) == (3, False)
    assert known_ranks(dumps[:2]) == (2, False)


def test_sizes_that_may_differ_are_no_disagreement(tmp_path: Path) -> None:
    assert disagreements(read_dumps(DEFAULT)[0]) == ()
    for rank in range(3):
        dump = json.loads((DEFAULT / f"rank_{rank}.json").read_text())
        if rank == 1:
            dump["entries"][4]["input_sizes"] = [[5]]
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps(dump))
    (found,) = disagreements(read_dumps(tmp_path)[0])
    assert found.calls == {"all_reduce [[4]]": (0, 2), "all_reduce [[5]]": (1,)}


def test_without_a_summary_the_entries_are_used() -> None:
    dump = golden(0)
    del dump["pg_status"]
    assert parse_dump(json.dumps(dump).encode(), 0, "d").positions == {"1": Position(4, 3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda dump: dump.pop("version"), "not a Flight Recorder dump"),
        (lambda dump: dump.update(version="9.1"), "version '9.1'"),
        (lambda dump: dump.update(entries=3), "not a Flight Recorder dump"),
        (lambda dump: dump["entries"].append(7), "entry 4 is a int"),
        (lambda dump: dump["entries"][0].pop("process_group"), "entry 0: process_group=None"),
        (lambda dump: dump["entries"][0].update(collective_seq_id="x"), "collective_seq_id='x'"),
        (lambda dump: dump.update(pg_config={"1": {"ranks": "[0, "}}), "not a list of ranks"),
        (lambda dump: dump.update(pg_config={"1": {"ranks": "[0, 1000000000]"}}), "goes from 0 to 1000000000"),
        (lambda dump: dump.update(pg_status=[1]), "a list where a dump has an object"),
    ],
)
def test_file_that_is_not_a_dump_is_named(change: Any, message: str) -> None:
    dump = golden(0)
    change(dump)
    with pytest.raises(DataError, match=re.escape(message)):
        parse_dump(json.dumps(dump).encode(), 0, "file")


def test_a_pickle_is_never_loaded() -> None:
    with pytest.raises(DataError, match="a pickled dump; only JSON dumps can be read"):
        parse_dump(pickle.dumps({"version": "2.10"}), 0, "file")


def test_a_damaged_dump_is_reported_and_the_others_count(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"trace_{rank}").write_bytes((GOLDEN / f"rank_{rank}.json").read_bytes())
    (tmp_path / "trace_7").write_bytes(b"{")
    (tmp_path / "readme.txt").write_text("")
    dumps, problems = read_dumps(tmp_path)
    assert [dump.rank for dump in dumps] == [0, 1, 2]
    assert len(problems) == 1
    assert "trace_7" in problems[0]
    with pytest.raises(DataError, match="no Flight Recorder dump that can be read"):
        read_dumps(tmp_path / "none")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=200, derandomize=True)
@given(JSON, JSON, JSON)
def test_dump_of_any_content_is_read_or_refused(entries: Any, config: Any, status: Any) -> None:
    dump = {"version": "2.10", "entries": [entries], "pg_config": config, "pg_status": {"1": status}}
    try:
        found = parse_dump(json.dumps(dump).encode(), 0, "file")
    except DataError:
        return
    assert all(at.entered >= 0 for at in found.positions.values())
