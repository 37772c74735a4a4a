"""A rank hangs on a host whose kernel's log has an error of a broken GPU: the host is evicted at its first hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Cordon
from tests.helpers.recovery_checks import HOSTS, STEPS, running_job

pytestmark = pytest.mark.slow

HUNG = 1
AT_STEP = 14
ERROR = "4,100,{since_boot_us},-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
LOGS = {HOSTS[0]: "6,99,1,-;usb 1-1: new device\n", HOSTS[HUNG]: ERROR}
# With device "cpu" no host reads the kernel's log. No GPU is visible, so "auto" is the CPU.
CHANGES = {"runtime": {"device": "auto"}, "recovery": {"join_timeout_s": 1.0}}


def test_hung_host_with_a_broken_gpu_is_cordoned(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    arguments = {}
    for host, log in LOGS.items():
        since_boot_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        (tmp_path / host).write_text(log.format(since_boot_us=since_boot_us))
        arguments[host] = ("--kernel-log", str(tmp_path / host))
    with running_job(
        tmp_path, CHANGES, nnodes="1:2", orders=[(HUNG, AT_STEP, "sleep", "before forward-compute")],
        environment={"CUDA_VISIBLE_DEVICES": ""}, arguments_of=arguments,
    ) as running:  # fmt: skip
        struck = running.struck_unix_s()
        assert running.finish() == 0
        incident = running.only_incident()
        error = f"{HOSTS[HUNG]} reported Xid 79 of GPU PCI:0000:3b:00 (the GPU has fallen off the bus)"

        assert (incident.kind, incident.state) == (IncidentKind.HANG, IncidentState.RECOVERED)
        assert (incident.culprit_ranks, incident.culprit_hosts) == ((HUNG,), (HOSTS[HUNG],))
        assert incident.action == "evict", incident
        assert error in incident.reason
        (cordon,) = running.view.all("cordons", Cordon)
        assert (cordon.host, cordon.by, cordon.incident) == (HOSTS[HUNG], "driver", incident.incident_id)
        assert any(error in sentence for sentence in incident.evidence), incident.evidence
        assert [part.host for part in running.view.rounds()[-1].hosts] == [HOSTS[0]]
        running.check_recovered(incident, struck)
        # The layout differs after the eviction; the numbers are the same except for rounding.
        assert running.launched.losses() == pytest.approx(undisturbed_losses, rel=1e-9)
        assert len(undisturbed_losses) == STEPS
        running.check_nothing_left()
