"""A host whose training network is dead although its link is up and it reaches etcd: only tests with neighbors detect
it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Cordon
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.job_under_launch import LaunchedJob, LaunchedJobView, make_launched_job
from tests.helpers.namespaces import HostNetwork
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

TRAIN, MANAGEMENT = "train", "mgmt"
HOSTS = ("host-0", "host-1", "host-2", "host-3")
VICTIM = 1
CHANGES = {
    "recovery": {"has_health_checks": True, "has_pair_checks": True, "pair_timeout_s": 20.0, "min_free_disk_gb": 0.1},
    "runtime": {"network_interface": TRAIN},
    "batch": {"global_batch_size": 6},
    "diagnostics": {"is_streamed": False},
}
PACE_S = 0.3
ENDLESS = 100_000


def test_host_without_neighbors_is_cordoned_before_round_1(tmp_path: Path) -> None:
    job = make_launched_job(tmp_path, ENDLESS, CHANGES)
    (tmp_path / "etcd").mkdir()
    with HostNetwork(len(HOSTS), (TRAIN, MANAGEMENT)) as network:
        own = network.own_address(MANAGEMENT)
        network.mute(VICTIM, TRAIN)
        with EtcdServers(tmp_path / "etcd", 1, addresses=[own]) as etcd:
            urls = [each.replace("127.0.0.1", own) for each in etcd.urls]
            words = ("--nnodes", "3", "--spares", "1", "--nproc-per-node", "1")
            with LaunchedJob(job, urls, FaultDirectory(tmp_path / "faults", PACE_S), words) as launched:
                view = LaunchedJobView.of(job, etcd.urls)
                try:
                    check_launch(launched, view, network)
                finally:
                    view.client.close()


def check_launch(launched: LaunchedJob, view: LaunchedJobView, network: HostNetwork) -> None:
    victim = HOSTS[VICTIM]
    for number in (VICTIM, 0, 2):
        launched.start(HOSTS[number], "--local-addr", network.address(TRAIN, number), enter=network.enter(number))
    key = view.keys.cordon(victim)
    # After up to three turns, each of which waits for the pair's time limit and for torch to load.
    wait_until(lambda: view.client.get(key) is not None, "the cordon", deadline_s=3 * DEADLINE_S)
    item = view.client.get(key)
    assert item is not None
    cordon = decode(Cordon, item.value, key)
    assert (cordon.host, cordon.by) == (victim, "driver")
    assert cordon.reason.startswith("pair tests: with host-")
    assert view.hosts()[victim].is_fit, "none of its own checks detects it"

    launched.start(HOSTS[3], "--local-addr", network.address(TRAIN, 3), enter=network.enter(3))
    launched.wait_for_step(3)
    (only,) = view.rounds()
    assert [part.host for part in only.hosts] == ["host-0", "host-2", "host-3"]
    launched.executors["host-0"].send_signal(signal.SIGTERM)
    assert launched.finish("host-0") == ExitCode.SAVED_AND_STOPPED
    assert all(incident.kind is IncidentKind.REQUEST for incident in view.incidents())
