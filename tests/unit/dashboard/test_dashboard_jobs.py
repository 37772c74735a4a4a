"""The list of all jobs: each run directory and each etcd gives a row as in `status`, whatever it contains."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.jobs.document import JobRow
from megatrain_dashboard.api.jobs.view import Choice, chosen_rows, counts_of, job_row
from megatrain_dashboard.api.overview.view import OverviewInputs, overview_document
from megatrain_dashboard.sources.runs import catalog as catalog_module
from megatrain_dashboard.sources.runs.catalog import JobCatalog
from megatrain_dashboard.sources.runs.metrics_history import read_metrics_history
from megatrain_dashboard.sources.runs.run_summary import read_run_summary
from megatrain_diagnostics.analysis.effective_time import Restart
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs.assessment import assess
from megatrain_job.jobs.run_state import read_facts, run_state_of
from megatrain_job.jobs.snapshot import read_job
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import NOW_S, make_record, make_stall, make_status
from tests.helpers.many_runs import BEGAN_S, STEP_S, held, report_steps, write_run
from tests.helpers.served_run import RecordedPage
from tests.helpers.waiting import wait_until
from tests.helpers.written_job import fill

LATER_S = BEGAN_S + 3600.0
LONG_AGO_S = BEGAN_S - 30 * 86_400.0


def rows_of(runs: Path) -> dict[str, JobRow]:
    catalog = JobCatalog(runs, period_s=60.0)
    try:
        return {name: job_row(seen, LATER_S) for name, seen in catalog.last_poll().jobs.items()}
    finally:
        catalog.close()


def aged(run: RunDirectory, at_s: float) -> None:
    """Set the times of all files of a run."""
    for path in run.root.rglob("*"):
        os.utime(path, (at_s, at_s), follow_symlinks=False)


def test_history_of_metrics_has_the_last_report_of_each_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    report_steps(run, range(1, 31), loss=2.0, step_s=2.0, began_s=BEGAN_S)
    # A round broke, and the next one continued from step 20.
    report_steps(run, range(21, 41), loss=1.0, step_s=4.0, began_s=BEGAN_S + 100.0)
    nested = b"[" * 100_000
    with run.metrics_file.open("ab") as file:
        for line in (
            nested, b'{"kind": "step", "step": ' + b"9" * 5000 + b"}", b'{"kind": "step", "step": true}', b"null", b"{",
            b'{"kind": "step", "step": -4, "loss": 1}', b'{"kind": "step", "step": 41, "loss": NaN, "duration_s": "x"}',
            b'{"kind": "step", "step": 100000000000000000000, "loss": 1}',
            b'{"kind": "evaluation", "step": 40, "loss": 99}', b'{"kind": "step", "st',
        ):  # fmt: skip
            file.write(line + b"\n")
    history = read_metrics_history(run, 1 << 20)
    steps = history.column("step")
    assert steps.tolist() == list(range(1, 42))
    assert history.column("loss")[:40].tolist() == [
        (2.0 if step <= 20 else 1.0) + 8.0 / step**0.5 for step in range(1, 41)
    ]
    assert np.isnan(history.column("loss")[40])
    assert history.column("step_s")[19:21].tolist() == [2.0, 4.0]
    # ten steps of 4096 tokens on 4 ranks at MFU 0.4 where a step takes two seconds
    assert history.mfu[:40] == pytest.approx([0.4] * 20 + [0.2] * 20)
    assert history.restarts == (Restart(-1, BEGAN_S + 40.0, BEGAN_S + 100.0),)
    assert not history.is_sampled


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    report_steps(run, range(1, 2001), loss=2.0, step_s=2.0, began_s=BEGAN_S)
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, num, at: read.append(num) or pread(file, num, at))
    history = read_metrics_history(run, 64 * 1024)
    assert sum(read) <= 64 * 1024 < run.metrics_file.stat().st_size
    assert history.is_sampled
    steps = history.column("step")
    assert (steps[0], steps[-1]) == (1, 2000)
    assert (np.diff(steps) > 0).all()
    assert np.diff(steps).max() < 2000 / 6
    assert history.column("loss") == pytest.approx(2.0 + 8.0 / np.sqrt(steps))


# name -> how it is written, and its row
KINDS = {
    "finished": ({"exit_code": 0}, ("ended", "green", "finished")),
    "saved": ({"exit_code": 75}, ("ended", "green", "saved and stopped")),
    "failed": ({"exit_code": 66}, ("red", "red", "failed")),
    "killed": ({"exit_code": None}, ("red", "red", "killed")),
    "failed-long-ago": ({"exit_code": 66, "began_s": LONG_AGO_S}, ("ended", "red", "failed")),
}


def test_rows_equal_the_output_of_status(tmp_path: Path) -> None:
    for name, (how, _) in KINDS.items():
        run = write_run(tmp_path / name, **how)
        aged(run, how.get("began_s", BEGAN_S))
    lives = write_run(tmp_path / "lives", exit_code=None)
    with held(lives):
        rows = rows_of(tmp_path)
        assert (rows["lives"].severity, rows["lives"].state) == ("red", "unreachable")
        for name, row in rows.items():
            state = run_state_of(read_facts(tmp_path / name))
            assert row.headline == state.headline
            assert row.level == state.health.level.value
            assert [reason.text for reason in row.reasons] == [reason.text for reason in state.health.reasons]
    for name, (_, expected) in KINDS.items():
        assert (rows[name].severity, rows[name].level, rows[name].state) == expected, name
    assert counts_of(list(rows.values())).model_dump() == {"red": 3, "amber": 0, "green": 0, "ended": 3}
    names = [row.name for row in chosen_rows(list(rows.values()), Choice())]
    assert set(names[:3]) == {"failed", "killed", "lives"}
    assert names[-1] == "failed-long-ago"
    only = [row.name for row in chosen_rows(list(rows.values()), Choice(text="NO END of the job IS"))]
    assert only == ["killed"]


# name -> how it is written, the holder of its lock, and the texts of the row and the opened page
OPENED = {
    "lives": ({"exit_code": None}, None, ("unreachable", "red")),
    "sent": ({"exit_code": None}, "process 17 on elsewhere", ("unreachable", "red")),
    "sent-at-its-end": ({"exit_code": None, "num_steps": 240}, "process 17 on elsewhere", ("finished", "green")),
    "killed": ({"exit_code": None}, None, ("killed", "red")),
    "failed": ({"exit_code": 66, "has_incident": True}, None, ("failed", "red")),
    "saved": ({"exit_code": 75}, None, ("saved and stopped", "green")),
}


@pytest.mark.slow(kept=["lives", "sent-at-its-end", "killed"])
@pytest.mark.parametrize("name", OPENED)
def test_a_job_has_one_state_in_the_list_and_on_its_page(tmp_path: Path, name: str) -> None:
    how, holder, expected = OPENED[name]
    run = write_run(tmp_path / name, **how)
    if holder is not None:
        (run.root / "coordination" / "lock").write_text(f"{holder}\n")
    with held(run) if name == "lives" else nullcontext():
        row = rows_of(tmp_path)[name]
        with closing(RecordedPage(run)) as opened:
            page = overview_document(OverviewInputs(LATER_S, opened.source.facts(), is_recorded=True))
    assert (row.state, row.level) == expected
    assert (page.state, page.level, page.headline) == (row.state, row.level, row.headline)
    reported = [(reason.code, reason.text) for reason in row.reasons]
    assert [(reason.code, reason.text) for reason in page.reasons] == reported


def test_a_row_has_the_figures_of_its_run(tmp_path: Path) -> None:
    write_run(tmp_path / "one", num_steps=60, has_incident=True)
    row = rows_of(tmp_path)["one"]
    assert (row.step, row.train_steps, row.num_ranks, row.num_incidents) == (60, 240, 4, 1)
    assert (row.step_s, row.tokens_per_s) == (STEP_S, 2048.0)
    assert row.mfu == pytest.approx(0.4)
    assert row.began_unix_s == BEGAN_S
    assert len(row.loss_line) == 32
    assert row.loss_line[0] == pytest.approx(10.0, abs=2.4)
    assert row.remaining_s is None, "it is over"


def test_damage_is_reported_in_its_row_and_breaks_no_other(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "whole")
    torn = write_run(runs / "torn-config")
    (torn.root / "config.toml").write_text("[job\n")
    invalid = write_run(runs / "invalid")
    (invalid.root / "config.toml").write_text("[job]\nname = 'x'\nis_fast = true\n")
    led = write_run(runs / "led-out")
    led.metrics_file.unlink()
    led.metrics_file.symlink_to("/etc/passwd")
    piped = write_run(runs / "piped")
    piped.metrics_file.unlink()
    os.mkfifo(piped.metrics_file)
    bad = write_run(runs / "bad-incident")
    worse = write_run(runs / "bad-incidents")
    for file in (bad.incidents / "0009.json", worse.incidents / "0009.json", worse.incidents / "0010.json"):
        file.write_text("{")
    (runs / "notes").mkdir()
    (runs / "notes.txt").write_text("of a user\n")
    write_run(tmp_path / "elsewhere")
    (runs / "led").symlink_to(tmp_path / "elsewhere")
    catalog = JobCatalog(runs, period_s=60.0)
    catalog.close()
    poll = catalog.last_poll()
    assert poll.problems == ("symbolic links are not followed: led; name the directory that they point to with --runs",)
    problems = {name: " ".join(job_row(seen, LATER_S).problems) for name, seen in poll.jobs.items()}
    reported = {
        "whole": "", "torn-config": "config.toml is damaged",
        "invalid": "config.toml is not valid in this version of megatrain: job.is_fast",
        "led-out": "is a symbolic link, which is not followed", "piped": "is not a regular file",
        "bad-incident": "0009.json", "bad-incidents": " (and 1 more)",
    }  # fmt: skip
    assert set(problems) == set(reported)
    for name, text in reported.items():
        assert text in problems[name], name
        assert (problems[name] == "") is (text == "")
    assert "more)" not in problems["bad-incident"]


def test_a_directory_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "theirs")
    listdir = os.listdir

    def refused(path: object) -> list[str]:
        if str(path).endswith("theirs"):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    row = rows_of(tmp_path)["theirs"]
    assert (row.state, row.level) == ("damaged", "amber")
    assert row.headline == row.why_not_opened == "the directory cannot be read: Permission denied"


def test_unchanged_run_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
    read: list[str] = []

    def counted(root: Path) -> object:
        read.append(root.name)
        return read_run_summary(root)

    monkeypatch.setattr(catalog_module, "read_run_summary", counted)
    catalog = JobCatalog(tmp_path, period_s=0.01)
    try:
        number = catalog.live().versions["jobs"]
        report_steps(RunDirectory(tmp_path / "two"), range(61, 71), loss=2.0, step_s=2.0, began_s=BEGAN_S + 200.0)
        wait_until(lambda: catalog.live().versions["jobs"] > number, "the change is detected")
        assert job_row(catalog.last_poll().jobs["two"], LATER_S).step == 70
        write_run(tmp_path / "three")
        wait_until(lambda: "three" in catalog.last_poll().jobs, "a new run is detected")
    finally:
        catalog.close()
    assert read.count("one") == 1
    assert read.count("two") <= 3  # the file may have been seen while it was written


def live_rows(catalog: JobCatalog) -> dict[str, JobRow]:
    found = {name: job_row(seen, NOW_S) for name, seen in catalog.last_poll().jobs.items()}
    return {name: row for name, row in found.items() if row.is_live}


def test_jobs_of_an_etcd_agree_with_status_and_outlive_it(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "here", exit_code=None)
    (tmp_path / "etcd").mkdir()
    with EtcdServers(tmp_path / "etcd") as servers:
        settings = EtcdSettings.of(servers.urls)
        with EtcdClient(settings) as client:
            stuck = {"statuses": {"host-1": make_status(1), "host-2": make_status(2, stall=make_stall())}}
            fill(client, JobKeys("here"), record=make_record(job="here", run_directory=str(runs / "here")))
            fill(client, JobKeys("away"), record=make_record(job="away", run_directory="/nowhere/away"), **stuck)
            impatient = replace(settings, attempt_s=0.5, call_s=0.5)
            catalog = JobCatalog(runs, impatient, period_s=0.05, clock=lambda: NOW_S)
            try:
                wait_until(lambda: set(live_rows(catalog)) == {"here", "etcd:away"}, "both jobs to be read from etcd")
                rows = live_rows(catalog)
                for name, job in (("here", "here"), ("etcd:away", "away")):
                    expected = assess(read_job(client, JobKeys(job)), NOW_S)
                    row = rows[name]
                    assert (row.job, row.is_live, row.headline) == (job, True, expected.headline)
                    assert (row.level, row.state) == (expected.health.level.value, str(expected.state))
                    assert [reason.code for reason in row.reasons] == [
                        reason.code.value for reason in expected.health.reasons[:3]
                    ]
                assert rows["etcd:away"].severity == "red"
                assert rows["etcd:away"].why_not_opened == "its run directory is not on this machine"
                assert rows["here"].why_not_opened == ""
                assert (rows["here"].num_hosts, rows["here"].num_ranks, rows["here"].train_steps) == (2, 4, 100)
                servers.end()
                wait_until(lambda: bool(catalog.last_poll().problems), "the etcd outage is noticed")
                rows = {name: job_row(seen, NOW_S) for name, seen in catalog.last_poll().jobs.items()}
            finally:
                catalog.close()
    assert "cannot list its jobs" in catalog.last_poll().problems[0]
    assert set(rows) == {"here", "etcd:away"}
    assert {row.reasons[0].code for row in rows.values()} == {"unreachable"}
    assert {row.severity for row in rows.values()} == {"red"}


def test_a_copied_run_contacts_no_server(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sent", exit_code=None)
    (run.root / "coordination" / "lock").write_text("process 17 on elsewhere\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        place = run.root / "coordination" / "endpoint"
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        place.write_text(json.dumps({"endpoints": [url], "job": "sent"}))
        place.chmod(0o600)
        row = rows_of(tmp_path)["sent"]
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (row.state, row.is_live) == ("unreachable", False)
    assert "is running cannot be seen from here" in row.headline


def test_rows_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", num_steps=3)
    with run.metrics_file.open("a") as file:
        file.write('{"kind": "step", "step": 4, "loss": 1e999, "duration_s": 1e-320, "num_tokens": 1e308}\n')
    row = rows_of(tmp_path)["one"]
    assert json.loads(row.model_dump_json())["step"] == 4
