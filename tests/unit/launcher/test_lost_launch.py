"""A launch that stopped without a recorded end: its traces, and the report of the next driver."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, phase_seconds
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobEnd, LostLaunch
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs.lost_time import measured_restart_cost_s
from megatrain_launcher.executor.job_record import claim_job
from megatrain_launcher.executor.lost_launch import ActivitySign, find_lost_launch, lost_launch_of
from tests.helpers.driver_story import begin
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import make_record
from tests.helpers.simulated_etcd import KEYS

RECORD = make_record(first_host="host-0", created_unix_s=1000.0)
LAUNCHED = ActivitySign(1000.0, "it was launched by host-0")


class TestFound:
    def test_signs_give_the_last_sign_the_step_and_the_cause(self) -> None:
        at_40 = ActivitySign(2000.0, "metrics of step 40", 40)
        on_host_1 = ActivitySign(2000.0, "rank 3 on host-1 in its step 25", 25, "host-1")
        ranks = [ActivitySign(2000.0, "rank 0", 52), ActivitySign(1999.9, "rank 1", 51)]
        other_times = [ActivitySign(900.0, "metrics of step 99", 99), ActivitySign(9000.0, "rank 0", 7)]
        cases: dict[str, tuple[list[ActivitySign], float | None, str, float, int | None, str]] = {
            "the newest sign, the slowest rank": (ranks, 500.0, "host-0", 2000.0, 51, "launcher-lost"),
            "the machine was restarted": ([at_40], 4000.0, "host-0", 2000.0, 40, "machine-restarted"),
            "another host": ([], 500.0, "host-1", 1000.0, None, ""),
            "a black box of this machine": ([on_host_1], 500.0, "host-1", 2000.0, 25, "launcher-lost"),
            "a black box of another machine": ([on_host_1], 500.0, "host-2", 2000.0, 25, ""),
            "signs of other times": (other_times, None, "host-1", 1000.0, None, ""),
        }
        for name, (signs, booted, host, last_sign, step, cause) in cases.items():
            found = lost_launch_of(RECORD, [LAUNCHED, *signs], 5000.0, booted, host)
            assert (found.last_sign_unix_s, found.last_step, found.cause) == (last_sign, step, cause), name

    def test_evidence_has_the_last_sign_and_the_restart(self) -> None:
        found = lost_launch_of(RECORD, [LAUNCHED, ActivitySign(2000.0, "rank 0", 52)], 5000.0, 4000.0, "host-0")
        assert found.evidence[0].endswith("UTC: rank 0")
        assert "the machine of host-0 was restarted after that" in found.evidence[1]

    def test_metrics_with_half_a_line_at_their_end(self, tmp_path: Path) -> None:
        run = RunDirectory(tmp_path)
        run.create()
        lines = [json.dumps({"kind": "step", "unix_time_s": 1500.0 + step, "step": step}) for step in range(3)]
        (run.metrics / "metrics.jsonl").write_text("\n".join([*lines, '{"unix_time_s": 99']))
        found = find_lost_launch(RECORD, run, None, "host-1")
        assert (found.last_sign_unix_s, found.last_step) == (1502.0, 2)

    def test_a_run_without_anything_is_known_by_its_record(self, tmp_path: Path) -> None:
        assert find_lost_launch(RECORD, RunDirectory(tmp_path), tmp_path, "host-1").last_sign_unix_s == 1000.0


@pytest.mark.slow
class TestClaimed:
    @pytest.fixture
    def client(self, etcd: EtcdServers) -> EtcdClient:
        return EtcdClient(EtcdSettings.of(etcd.urls))

    def test_only_a_launch_without_an_end_was_lost(self, client: EtcdClient) -> None:
        keys = JobKeys("claimed")
        lost = LostLaunch("l1", "host-0", 1234.0)
        with client:
            first = claim_job(client, keys, make_record(job="claimed", launch_id="l1"), 5.0, lambda record: lost)
            assert first.lost_launch is None
            assert claim_job(client, keys, make_record(job="claimed", launch_id="l1b"), 5.0, lambda record: lost) == (
                make_record(job="claimed", launch_id="l1b")
            ), "it never began to train"
            client.put(keys.round(1), "{}")
            second = claim_job(client, keys, make_record(job="claimed", launch_id="l2"), 5.0, lambda record: lost)
            assert second.lost_launch == lost
            client.put(keys.round(2), "{}")
            client.put(keys.end, encode(JobEnd(0, "done", 1.0)))
            third = claim_job(client, keys, make_record(job="claimed", launch_id="l3"), 5.0, lambda record: lost)
            assert third.lost_launch is None


class TestReport:
    def relaunched(self, lost: LostLaunch | None) -> list[Incident]:
        """Return the incidents of a job whose hosts all died at one moment, and that was launched again later."""
        job = begin()
        job.go_on(5.0)
        assert job.incidents() == []
        job.etcd.delete([key for key in job.etcd.items if key.split("/")[3] in ("hosts", "status")])
        for host in job.hosts.values():
            host.kill()
        job.now += 600.0
        record = make_record(job="sim", launch_id="again", config_hash="", created_unix_s=job.now, lost_launch=lost)
        job.etcd.put(KEYS.record, encode(record))
        for host in job.hosts.values():
            host.start(job.now)
        job.go_on(10.0)
        return job.incidents()

    def test_next_launch_reports_a_lost_one_once(self) -> None:
        lost = LostLaunch("l1", "host-0", 900.0, 51, "launcher-lost", ("the last sign of life",))
        (incident,) = self.relaunched(lost)
        assert (incident.kind, incident.state, incident.label) == (
            IncidentKind.LAUNCH_LOST, IncidentState.RECOVERED, "launcher-lost"
        )  # fmt: skip
        assert incident.moments.began == 900.0
        assert incident.last_step == 51
        assert incident.next_round == 2
        seconds = phase_seconds(incident.moments)
        assert None not in seconds.values()
        assert seconds["detect"] is not None
        assert "after its last sign of life" in incident.reason
        assert measured_restart_cost_s([incident]) is None
        assert measured_restart_cost_s([replace(incident, kind=IncidentKind.FAILURE)]) is not None

    def test_a_launch_after_one_that_ended_in_order_reports_nothing(self) -> None:
        assert self.relaunched(None) == []
