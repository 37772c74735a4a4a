"""`megatrain driver`, which knows the job only from its record, and the transfer of the driver's cordons to the
cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.recovery import RecoveryConfig
from megatrain.config.serialize import config_of_values
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Cordon, JobEnd
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Election
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.executor.job_record import record_of
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.hosts.adapter import CordonError, HostFacts
from megatrain_launcher.launch.cordons import CordonWatch, parts_with
from megatrain_launcher.launch.dedicated_driver import policy_of, run_dedicated_driver
from megatrain_launcher.launch.plan import LaunchPlan, choose_platform, make_plan
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launch_cases import small_flags
from tests.helpers.waiting import DEADLINE_S, wait_until

KEYS = JobKeys("small")


@pytest.fixture
def client(etcd: EtcdServers) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as one:
        yield one
        one.delete(KeyRange.prefix(KEYS.prefix))


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return make_plan(small_flags(tmp_path, min_hosts=1, max_hosts=5, workers="1", host_id="h1"), {})


def settings_of(plan: LaunchPlan) -> ExecutorSettings:
    return plan.executor_settings(EtcdSettings.of("127.0.0.1:1"), {}, launch_id="one", address="127.0.0.1")


def test_dedicated_driver_has_its_configuration_from_the_record(plan: LaunchPlan) -> None:
    record = record_of(settings_of(plan))
    config = config_of_values(record.config, record.job)
    assert config == plan.config
    assert policy_of(record, config).feasible_counts == plan.feasible_hosts == {1: 12, 2: 6, 3: 4, 4: 3, 5: 3}
    with pytest.raises(ConfigError, match=r"model\.seq_len of job 'small' is '=', which is not a value"):
        config_of_values({**record.config, "model.seq_len": "="}, record.job)


def test_policy_has_the_limits_of_recovery(plan: LaunchPlan) -> None:
    recovery = RecoveryConfig(
        lease_ttl_s=7, join_timeout_s=30.0, hangs_per_hour=5, has_health_checks=False, has_pair_checks=True
    )
    config = replace(plan.config, recovery=recovery)
    policy = Policy.of(config, min_hosts=1, max_hosts=1, num_workers=1, feasible_counts={1: 1})
    assert (policy.lease_ttl_s, policy.join_timeout_s, policy.shrink_after_s, policy.hangs_per_hour) == (7, 30, 30, 5)
    assert not policy.has_pair_checks, "pair checks without health checks"


def test_dedicated_driver_waits_for_the_job_and_ends_with_it(client: EtcdClient, plan: LaunchPlan) -> None:
    reported: list[str] = []
    codes: list[int | None] = []
    stop = threading.Event()
    cluster = Cluster()
    thread = threading.Thread(
        target=lambda: codes.append(run_dedicated_driver(client, KEYS, stop, reported.append, cluster)), daemon=True
    )
    thread.start()
    wait_until(lambda: bool(reported), "the note")
    client.put(KEYS.record, encode(record_of(settings_of(plan))))

    election = Election(client, KEYS.election)
    wait_until(lambda: election.leader() is not None, "the election")
    leader = election.leader()
    assert leader is not None
    assert leader.value.startswith(b"driver-")
    key = KEYS.cordon("host-7")

    def is_reported() -> bool:
        client.delete(key)  # Until its watch has begun, a cordon counts as an earlier one.
        client.put(key, encode(Cordon("host-7", "two hangs", "driver", 0.0)))
        return bool(cluster.cordoned)

    wait_until(is_reported, "the cordon")
    assert cluster.cordoned[0] == ("host-7", "two hangs")

    client.put(KEYS.end, encode(JobEnd(75, "asked to", 0.0)))
    thread.join(DEADLINE_S)
    stop.set()
    assert codes == [75]
    assert reported[0] == "waiting for the first host of job small"
    assert election.leader() is None


class Cluster:
    """An adapter that records its calls, and refuses one host."""

    name = "cluster"

    def __init__(self) -> None:
        self.cordoned: list[tuple[str, str]] = []

    def facts(self) -> HostFacts:
        return HostFacts("h1")

    def cordon(self, host: str, reason: str) -> str:
        self.cordoned.append((host, reason))
        if host == "refused":
            raise CordonError("no right to")
        return f"{host} is cordoned"


def test_driving_host_cordons_hosts_in_the_cluster(client: EtcdClient) -> None:
    def put(host: str, by: str) -> None:
        client.put(KEYS.cordon(host), encode(Cordon(host, "two hangs", by, 0.0)))

    leading, other = Cluster(), Cluster()
    put("from before", "driver")
    with LeaseKeeper(client) as keeper:
        assert Election(client, KEYS.election).campaign(keeper, "h1") is not None
        with CordonWatch(client, KEYS, "h1", leading), CordonWatch(client, KEYS, "h2", other):
            # Until the watch has begun, a cordon counts as an earlier one.
            wait_until(lambda: bool(leading.cordoned) or put("refused", "driver") is not None, "the watch")
            put("by-hand", "user@machine")
            client.delete(KEYS.cordon("refused"))
            put("host-7", "driver")
            wait_until(lambda: leading.cordoned[-1] == ("host-7", "two hangs"), "the cordon")
    assert {host for host, _ in leading.cordoned} == {"refused", "host-7"}
    assert other.cordoned == []


def test_local_platform_has_no_cordon_watch() -> None:
    assert parts_with(choose_platform("local", {})) == parts_with(choose_platform("auto", {}))
    assert parts_with(Cluster()) != parts_with(choose_platform("local", {}))
