"""The controller of a running job, with a real etcd: it reads synthetic rows and writes verdicts."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.controller.controller import Controller
from megatrain_diagnostics.controller.etcd_records import BURST_S
from megatrain_diagnostics.events.tables import select
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.synthetic_steps import SyntheticJob, empty_groups, step_values, values_of_ranks
from tests.helpers.waiting import wait_until

START_S = 1_800_000_000.0
_numbers = itertools.count()


def with_temperature(finding: Finding, round_number: int) -> Finding:
    return replace(finding, evidence=(*finding.evidence, f"91 C in round {round_number}"))


class EventStream:
    """A controller that gets one step per second."""

    def __init__(self, client: EtcdClient, config: DiagnosticsConfig | None = None) -> None:
        self.client = client
        self.keys = JobKeys(f"controlled-{next(_numbers)}")
        self.config = config or DiagnosticsConfig()
        self.controller = self.new_controller()
        self.step = 0
        self.clock_ahead_s = 0.0

    def new_controller(self) -> Controller:
        return Controller(
            self.client, self.keys.job, "daemon-1", lambda: self.config, START_S, with_devices=with_temperature
        )

    def begin(self, job: SyntheticJob) -> None:
        self.controller.consume(empty_groups())
        self.controller.consume(job.ranks())

    def run(self, job: SyntheticJob, num_steps: int, silent: int = -1) -> None:
        for _ in range(num_steps):
            totals, values = job.step(self.step)
            self.controller.consume(values)
            self.controller.consume(select(totals, totals.rank != silent))
            self.controller.tick(self.now_s)
            self.step += 1

    @property
    def now_s(self) -> float:
        return START_S + self.step + self.clock_ahead_s

    def verdicts(self) -> list[HostVerdict]:
        found = self.client.read_all(KeyRange.prefix(self.keys.directory("verdicts"))).items
        return [decode(HostVerdict, item.value, "here") for item in found]


def slowed(stream: EventStream) -> SyntheticJob:
    job = SyntheticJob(Layout(dp_size=4), noise=0.02)
    stream.begin(job)
    stream.run(job, 30)
    assert stream.verdicts() == []
    job.compute_factor[2] = 1.3
    stream.run(job, 20)
    return job


def test_a_slow_host_gets_one_verdict(client: EtcdClient) -> None:
    stream = EventStream(client)
    job = slowed(stream)
    stream.run(job, 30)
    (verdict,) = stream.verdicts()
    assert (verdict.cause, verdict.confidence) == (Cause.COMPUTE, VerdictConfidence.HIGH)
    assert (verdict.hosts, verdict.ranks, verdict.round) == (("host-1",), (2,), 1)
    assert verdict.last_step is not None
    assert verdict.last_step - 30 < 20
    assert verdict.gain_s_per_step == pytest.approx(0.27, rel=0.25)
    assert verdict.step_s is not None
    assert verdict.by == "daemon-1"
    assert verdict.evidence[-1] == "91 C in round 1"
    stream.controller = stream.new_controller()
    stream.begin(job)
    stream.run(job, 40)
    assert stream.verdicts() == [verdict], "a restarted daemon repeats no verdict"


def test_findings_of_another_round_are_dropped(client: EtcdClient) -> None:
    stream = EventStream(client)
    old = slowed(stream)
    new = replace(old, round=2, compute_factor={})
    stream.begin(new)
    stream.run(new, 5)
    assert stream.controller.assessment.findings == ()
    before = len(stream.verdicts())
    stream.run(old, 20)  # a spool that is replayed
    assert stream.controller.assessment.findings == ()
    assert len(stream.verdicts()) == before
    new.compute_factor[2] = 1.3
    stream.run(new, 40)
    assert [verdict.round for verdict in stream.verdicts()] == [1, 2]


def test_suspicion_requests_all_spans_for_a_limited_time(client: EtcdClient) -> None:
    stream = EventStream(client)
    mine = DiagSettings(sample_period=25, off_operations=("gc",), by="ops")
    client.put(stream.keys.diag_settings, encode(mine))
    slowed(stream)
    item = client.get(stream.keys.diag_settings)
    assert item is not None
    settings = decode(DiagSettings, item.value, "here")
    assert settings.sample_period == 25
    assert settings.off_operations == ("gc",)
    assert START_S + 30 < settings.full_until_unix_s <= START_S + 50 + BURST_S
    assert settings.period_at(settings.full_until_unix_s) == 25
    assert settings.by == "daemon daemon-1"
    revision = item.mod_revision
    stream.run(SyntheticJob(Layout(dp_size=4), compute_factor={2: 1.3}), 20)
    item = client.get(stream.keys.diag_settings)
    assert item is not None
    assert item.mod_revision == revision


def test_spans_that_a_person_switched_off_stay_off(client: EtcdClient) -> None:
    stream = EventStream(client)
    client.put(stream.keys.diag_settings, encode(DiagSettings(is_on=False, by="ops")))
    slowed(stream)
    item = client.get(stream.keys.diag_settings)
    assert item is not None
    assert decode(DiagSettings, item.value, "here").by == "ops"


def test_loss_that_is_not_finite_is_a_verdict(client: EtcdClient) -> None:
    stream = EventStream(client)
    job = SyntheticJob(Layout(dp_size=4))
    stream.begin(job)
    stream.run(job, 10)
    bad = {StepValue.LOSS: float("nan"), StepValue.GRAD_NORM: float("nan")}
    stream.controller.consume(values_of_ranks([0, 2], 10, bad))
    stream.controller.tick(stream.now_s)
    (verdict,) = stream.verdicts()
    assert verdict.kind is VerdictKind.NUMERICS
    assert (verdict.rollback_to, verdict.skip_from, verdict.skip_to) == (10, 10, 10)


@pytest.mark.slow(kept=["2"])
@pytest.mark.parametrize("num_liars", [1, 2])
def test_ranks_that_lie_about_the_layout_are_outvoted(client: EtcdClient, num_liars: int) -> None:
    stream, job = EventStream(client), SyntheticJob(Layout(dp_size=8))
    liars, others = select(job.ranks(), job.ranks().rank < num_liars), select(job.ranks(), job.ranks().rank >= 1)
    sizes = np.arange(2, 2 + num_liars, dtype=np.int32)
    stream.controller.consume(replace(liars, tp_size=sizes, dp_size=sizes[::-1].copy()))
    stream.controller.consume(others)
    stream.run(job, 30)
    job.compute_factor[4] = 1.3
    stream.run(job, 60)
    assert [verdict.hosts for verdict in stream.verdicts()] == [("host-2",)]


@pytest.mark.parametrize("made_up", [5_000, 2**31 - 1])
def test_steps_that_a_rank_makes_up_hide_no_alarm(client: EtcdClient, made_up: int) -> None:
    stream = EventStream(client)
    job = SyntheticJob(Layout(dp_size=4))
    stream.begin(job)
    stream.run(job, 10)
    stream.controller.consume(step_values(1, made_up, {StepValue.LOSS: 3.0, StepValue.GRAD_NORM: 1.0}))
    stream.run(job, 1)
    bad = {StepValue.LOSS: float("nan"), StepValue.GRAD_NORM: 1.0}
    stream.controller.consume(values_of_ranks([1, 2], 11, bad))
    stream.controller.tick(stream.now_s)
    (verdict,) = stream.verdicts()
    assert (verdict.kind, verdict.first_step) == (VerdictKind.NUMERICS, 11)


@pytest.mark.slow(kept=["3600.0"])
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_by_an_hour_delays_nothing(
    client: EtcdClient, caplog: pytest.LogCaptureFixture, jump_s: float
) -> None:
    stream = EventStream(client)
    job = SyntheticJob(Layout(dp_size=4))
    stream.begin(job)
    stream.run(job, 45, silent=3)
    stream.clock_ahead_s = jump_s
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stream.run(job, 70, silent=3)
    assert [record for record in caplog.records if "sent no telemetry" in record.getMessage()]
    job.compute_factor[2] = 1.3
    stream.run(job, 60, silent=3)
    assert [verdict.hosts for verdict in stream.verdicts()] == [("host-1",)]


def test_silent_ranks_are_reported_once_a_minute(client: EtcdClient, caplog: pytest.LogCaptureFixture) -> None:
    stream = EventStream(client)
    job = SyntheticJob(Layout(dp_size=4))
    stream.begin(job)
    stream.run(job, 5)
    with caplog.at_level(logging.WARNING):
        stream.run(job, 90, silent=3)
    messages = [record.getMessage() for record in caplog.records if "sent no telemetry" in record.getMessage()]
    assert messages
    assert len(messages) <= 2
    assert messages[0].startswith("rank 3 sent")
    assert stream.controller.silent_ranks() == (3,)


@pytest.mark.slow
def test_verdicts_wait_while_etcd_is_away(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        EtcdServers(tmp_path_factory.mktemp("away")) as servers,
        EtcdClient(EtcdSettings.of(servers.urls, attempt_s=0.2, call_s=0.2)) as impatient,
        EtcdClient(EtcdSettings.of(servers.urls)) as client,
    ):
        stream = EventStream(impatient)
        stream.client = client
        job = SyntheticJob(Layout(dp_size=4))
        stream.begin(job)
        stream.run(job, 30)
        job.compute_factor[2] = 1.3
        (member,) = servers.members
        member.kill()
        stream.run(job, 20)
        member.start()
        servers.wait_ready()

        def is_written() -> bool:
            stream.run(job, 1)
            return bool(stream.verdicts())

        wait_until(is_written, "the verdict")
        (verdict,) = stream.verdicts()
        assert verdict.hosts == ("host-1",)


def test_steps_that_come_all_at_once_are_judged_one_by_one(client: EtcdClient) -> None:
    """A verdict has the facts of the step at which it became certain, even if a batch or spool brought later steps."""
    stream = EventStream(client)
    job = SyntheticJob(Layout(dp_size=4), noise=0.02)
    stream.begin(job)
    stream.run(job, 30)
    job.compute_factor[2] = 1.3
    for step in range(30, 60):
        totals, _ = job.step(step)
        stream.controller.consume(totals)
    stream.controller.tick(START_S + 60)
    (verdict,) = stream.verdicts()
    assert verdict.last_step is not None
    assert verdict.last_step - 30 <= 10
