"""A rank hangs or fails on a host whose kernel's log has an error of a broken GPU: the job continues without the
host."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Cordon
from tests.helpers.recovery_checks import ENDLESS, HOSTS, STEPS, running_job
from tests.helpers.step_faults import KERNEL_LOG, gpu_error_now
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

CULPRIT = 1
AT_STEP = 14
NO_ERROR = "6,99,1,-;usb 1-1: new device\n"
# With device "cpu" no host reads the kernel's log. No GPU is visible, so "auto" is the CPU.
DEVICE = {"runtime": {"device": "auto"}}
SHORT_WAIT = {"recovery": {"join_timeout_s": 1.0}}
CHECKED = {"recovery": {"has_health_checks": True, "has_pair_checks": False, "min_free_disk_gb": 0.1}}
SPARE = "host-2"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}


def test_hung_host_with_a_broken_gpu_is_cordoned(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    arguments = {}
    for host, log in ((HOSTS[0], NO_ERROR), (HOSTS[CULPRIT], gpu_error_now())):
        (tmp_path / host).write_text(log)
        arguments[host] = ("--kernel-log", str(tmp_path / host))
    with running_job(
        tmp_path, DEVICE, SHORT_WAIT, nnodes="1:2", orders=[(CULPRIT, AT_STEP, "sleep", "before forward-compute")],
        environment=ENVIRONMENT, arguments_of=arguments,
    ) as running:  # fmt: skip
        struck = running.struck_unix_s()
        assert running.finish() == 0
        incident = running.only_incident()
        error = f"{HOSTS[CULPRIT]} reported Xid 79 of GPU PCI:0000:3b:00 (the GPU has fallen off the bus)"

        assert (incident.kind, incident.state) == (IncidentKind.HANG, IncidentState.RECOVERED)
        assert (incident.culprit_ranks, incident.culprit_hosts) == ((CULPRIT,), (HOSTS[CULPRIT],))
        assert incident.action == "evict", incident
        assert error in incident.reason
        (cordon,) = running.view.all("cordons", Cordon)
        assert (cordon.host, cordon.by, cordon.incident) == (HOSTS[CULPRIT], "driver", incident.incident_id)
        assert any(error in sentence for sentence in incident.evidence), incident.evidence
        assert [part.host for part in running.view.rounds()[-1].hosts] == [HOSTS[0]]
        running.check_recovered(incident, struck)
        # The layout differs after the eviction; the numbers are the same except for rounding.
        assert running.launched.losses() == pytest.approx(undisturbed_losses, rel=1e-9)
        assert len(undisturbed_losses) == STEPS
        running.check_nothing_left()


def test_failed_host_with_a_broken_gpu_fails_its_checks(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    """The host is fit when the job starts: the kernel logs the error as the rank fails. A spare takes its place."""
    log = tmp_path / "faults" / KERNEL_LOG
    log.parent.mkdir()
    log.write_text(NO_ERROR)
    unfit = "not fit to take part: kernel-log: 1 hardware error within the last hour, the newest: Xid 79 of GPU"
    with running_job(
        tmp_path, DEVICE, CHECKED, {"train": {"steps": ENDLESS}}, spare=SPARE, orders=[(CULPRIT, AT_STEP, "lost-gpu")],
        environment=ENVIRONMENT, arguments_of={HOSTS[CULPRIT]: ("--kernel-log", str(log))},
    ) as running:  # fmt: skip
        struck = running.struck_unix_s()
        incident = running.view.wait_recovered(0)
        wait_until(lambda: unfit in running.launched.log(HOSTS[CULPRIT]), "the host's checks")
        running.save_and_stop()

        assert (incident.kind, incident.label) == (IncidentKind.FAILURE, "cuda_illegal_access")
        assert (incident.culprit_ranks, incident.culprit_hosts) == ((CULPRIT,), (HOSTS[CULPRIT],))
        assert incident.reason.endswith(f"; {HOSTS[CULPRIT]} must pass its checks")
        assert [part.host for part in running.view.rounds()[-1].hosts] == [HOSTS[0], SPARE]
        running.check_recovered(incident, struck)
        running.check_first_losses(undisturbed_losses)
        running.check_nothing_left()
