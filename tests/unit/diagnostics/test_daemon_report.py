"""The daemon's report in etcd about its streams, and the metrics of the same state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DaemonRecord, DaemonReport, DeviceProblem, DeviceProblemKind
from megatrain.contracts.records.host_verdict import HostVerdict
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain_diagnostics.analysis.findings import StragglerAssessment
from megatrain_diagnostics.collector.counters import IngestStatistics
from megatrain_diagnostics.metrics.daemon_report import DaemonReporter, disconnected_hosts
from megatrain_diagnostics.metrics.job_metrics import MetricsParts, reading_of
from megatrain_diagnostics.metrics.job_records import records_of
from megatrain_diagnostics.metrics.training_metrics import TrainingMetrics
from megatrain_job.jobs.etcd_job import EtcdPoll, EtcdRecords
from megatrain_job.jobs.health import HealthLevel, ReasonCode
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome
from tests.helpers.launched_job import NOW_S, make_incident, make_snapshot, make_status
from tests.helpers.written_verdicts import STRAGGLER

KEYS = JobKeys("demo")
FAILING, SILENT = DeviceProblemKind.GPU_FAILING, DeviceProblemKind.TELEMETRY_SILENT
RECORD = DaemonRecord("host-1", "d1", "127.0.0.1", 1, "token", started_unix_s=NOW_S - 60)
STREAMED = make_snapshot(statuses={f"host-{n}": make_status(n, is_streamed=True) for n in (1, 2)})


class Etcd:
    """Keeps the reports that are put, and fails while `is_away` is set."""

    def __init__(self) -> None:
        self.written: list[DaemonReport] = []
        self.is_away = False

    def put(self, key: str, value: bytes, **_: Any) -> None:
        if self.is_away:
            raise CoordinationError("refused")
        assert key == KEYS.daemon_report
        self.written.append(decode(DaemonReport, value, key))


class ReportJudge:
    silent: tuple[int, ...] = ()

    def silent_ranks(self) -> tuple[int, ...]:
        return self.silent


class Devices:
    found: tuple[DeviceProblem, ...] = ()

    def problems(self, connected: Collection[str]) -> tuple[DeviceProblem, ...]:
        return tuple(one for one in self.found if one.host in connected or one.kind is not SILENT)


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


def reporter(
    etcd: Etcd,
    judge: ReportJudge,
    statistics: IngestStatistics,
    record: DaemonRecord = RECORD,
    devices: Devices | None = None,
) -> DaemonReporter:
    sources: Any = (judge, statistics, TrainingMetrics(), devices or Devices())
    client: Any = etcd
    return DaemonReporter(client, KEYS, record, sources, lambda: "", lambda: STREAMED)


def test_changes_are_reported_at_once_other_values_periodically(etcd: Etcd) -> None:
    judge, statistics = ReportJudge(), IngestStatistics()
    statistics.count_stream(1, "host-1")
    writer = reporter(etcd, judge, statistics)
    assert [writer.write(NOW_S + at) for at in (0, 1, 4, 5, 6)] == [True, False, False, True, False]
    assert etcd.written[0].away_hosts == ("host-2",)
    judge.silent = (0, 1, 3)
    assert writer.write(NOW_S + 7)
    assert (etcd.written[-1].silent_ranks, etcd.written[-1].num_silent_ranks) == ("0-1, 3", 3)
    etcd.is_away = True
    statistics.count_stream(1, "host-2")
    assert not writer.write(NOW_S + 8)
    etcd.is_away = False
    assert writer.write(NOW_S + 9), "unwritten output is written later"
    assert etcd.written[-1].num_away_hosts == 0


def test_only_hosts_that_stream_are_away_and_only_after_a_while(etcd: Etcd) -> None:
    young = reporter(etcd, ReportJudge(), IngestStatistics(), replace(RECORD, started_unix_s=NOW_S - 5))
    young.write(NOW_S)
    assert etcd.written[0].num_away_hosts == 0, "hosts need time to find a new daemon"
    assert disconnected_hosts(STREAMED, ["host-2"]) == ("host-1",)
    assert disconnected_hosts(make_snapshot(), []) == ()
    assert disconnected_hosts(make_snapshot(rounds={}), []) == ()
    assert disconnected_hosts(None, []) == ()


def test_metrics_show_what_etcd_held_at_the_last_poll() -> None:
    low: HostVerdict = replace(STRAGGLER, verdict_id="v-2")
    cases = tuple(VerdictWithOutcome(one.verdict_id, one, None) for one in (STRAGGLER, low))
    earlier = (make_incident("0000"),)
    poll = EtcdPoll(replace(make_snapshot(), earlier_incidents=earlier), EtcdRecords(cases), NOW_S - 1)
    found = records_of(poll, NOW_S)
    assert found.health is not None
    assert (found.health.level, found.rounds, found.incidents) == (HealthLevel.GREEN, 2, {"failure": 2})
    assert found.verdicts == {("straggler", "compute", "high"): 2}
    assert found.effective_time_ratio == 0.991


def test_metrics_show_what_the_daemon_received() -> None:
    statistics = IngestStatistics()
    for host in ("host-1", "host-1", "host-2"):
        statistics.count_stream(1, host)
    for is_repeated in (False, False, True):
        statistics.count_batch(100, is_duplicate=is_repeated)
    statistics.count_old_rows(7)
    statistics.count_skipped_rows(5)
    statistics.count_failed_commit()
    others: Any = SimpleNamespace(
        assessment=StragglerAssessment(), silent_ranks=tuple, num_bytes=0, last_poll=EtcdPoll(), count=0, saved=None
    )
    parts = MetricsParts(TrainingMetrics(), statistics, others, others, others, others)
    found = reading_of(parts, others, "demo")
    assert found.connected_hosts == 2, "a host with two streams counts once"
    assert (found.batches, found.bytes_received, found.failed_commits) == ({"new": 2, "repeated": 1}, 300, 1)
    assert found.rows_not_analyzed == {"ended-round": 7, "overload": 5}


def test_unreachable_etcd_is_red() -> None:
    assert EtcdPoll().health(NOW_S) is None
    for poll in (EtcdPoll(problem="refused"), EtcdPoll(make_snapshot(), at_unix_s=NOW_S - 9, problem="refused")):
        health = records_of(poll, NOW_S).health
        assert health is not None
        assert [reason.code for reason in health.reasons] == [ReasonCode.UNREACHABLE]
        assert health.reasons[0].since_unix_s == (NOW_S - 9 if poll.snapshot else None)


def test_device_problems_of_training_hosts_are_reported(etcd: Etcd) -> None:
    devices, statistics = Devices(), IngestStatistics()
    statistics.count_stream(1, "host-1")
    statistics.count_stream(2, "host-2")
    writer = reporter(etcd, ReportJudge(), statistics, devices=devices)
    assert writer.write(NOW_S)
    hot = DeviceProblem(DeviceProblemKind.GPU_DEGRADED, "host-2", "GPU 3 is slowed down: 91 C", NOW_S - 60)
    gone = DeviceProblem(FAILING, "host-9", "GPU 1 is lost")
    devices.found = (gone, hot)
    assert writer.write(NOW_S + 1)
    assert (etcd.written[-1].devices, etcd.written[-1].num_device_problems) == ((hot,), 1)
    devices.found = (gone, replace(hot, text="GPU 3 is slowed down: 92 C"))
    assert not writer.write(NOW_S + 2), "another temperature is written with the next report"
    devices.found = tuple(replace(hot, text=f"GPU {number} " + 500 * "x") for number in range(40))
    assert writer.write(NOW_S + 3)
    assert (len(etcd.written[-1].devices), etcd.written[-1].num_device_problems) == (16, 40)
    assert all(len(device.text) <= 300 for device in etcd.written[-1].devices)
