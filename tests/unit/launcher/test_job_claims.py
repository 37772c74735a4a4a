"""The launch that owns a job: names in use, configurations that differ, launches that were killed or ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobEnd, JobRecord, Round
from megatrain_job.coordination.client import EtcdClient
from megatrain_launcher.executor.job_record import claim_job, read_job
from megatrain_launcher.executor.membership import Membership
from megatrain_launcher.liveness import LivenessPort
from tests.helpers.ports import free_ports
from tests.helpers.registered_host import a_host, a_job
from tests.helpers.waiting import DEADLINE_S


def test_all_hosts_of_a_launch_find_the_first_ones_record(client: EtcdClient, keys: JobKeys) -> None:
    first = claim_job(client, keys, a_job(keys, "a", steps="5"), 1.0)
    assert (first.first_host, bool(first.launch_id)) == ("a", True)
    assert claim_job(client, keys, a_job(keys, "b", steps="5"), 1.0) == first


def test_different_configuration_is_refused_with_both_values(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    claim_job(client, keys, a_job(keys, "a", "L", **{"train.steps": "5", "train.seed": "1"}), 1.0)
    member(a_host())
    mine = replace(a_job(keys, "b", "L", **{"train.steps": "6", "train.seed": "1"}), num_workers=4)
    with pytest.raises(ConfigError) as error:
        claim_job(client, keys, mine, 1.0)
    first, second = error.value.problems
    assert first.startswith(f"train.steps: b has 6, but a, the first host of job '{keys.job}', has 5; ")
    assert second.startswith("--nproc-per-node: b was started with num_workers=4, a with 2; ")


def test_different_absolute_run_directories_are_refused(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    claim_job(client, keys, replace(a_job(keys, "a", "L"), run_directory="/one/runs/j"), 1.0)
    member(a_host())
    with pytest.raises(
        ConfigError, match="run_directory: b writes to /two/runs/j, a to /one/runs/j: a relative path starts at"
    ):
        claim_job(client, keys, replace(a_job(keys, "b", "L"), run_directory="/two/runs/j"), 1.0)


def test_another_launch_of_a_running_job_is_refused(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    claim_job(client, keys, a_job(keys, "a", "first"), 1.0)
    member(a_host())
    with pytest.raises(ConfigError, match=r"b cannot launch it: another launch .* is running \(begun by a, .*hosts a;"):
        claim_job(client, keys, a_job(keys, "b", "second"), 0.3)


def test_live_host_proves_that_its_launch_runs(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    claim_job(client, keys, a_job(keys, "a", "first"), 1.0)
    liveness = LivenessPort("1", "127.0.0.1")
    try:
        member(a_host(liveness_port=liveness.port))
        with pytest.raises(ConfigError, match="another launch of this name is running"):
            claim_job(client, keys, a_job(keys, "b", "second"), 3600.0)  # which must not be waited for
    finally:
        liveness.close()


@pytest.mark.slow
def test_name_of_a_killed_launch_is_free_after_its_leases(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    claim_job(client, keys, a_job(keys, "a", "first", steps="5"), 1.0)
    killed = member(a_host())
    over = threading.Timer(0.5, killed.close)
    over.start()
    again = claim_job(client, keys, a_job(keys, "b", "second", steps="6"), 20.0)
    over.join()
    assert (again.launch_id, again.config) == ("second", {"steps": "6"})


@pytest.mark.slow(kept=["True"])
@pytest.mark.parametrize("is_registered", [True, False])
def test_host_without_launch_id_joins_no_dead_launch(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership], is_registered: bool
) -> None:
    """Leases of killed hosts may last for a while, but their ports do not answer."""
    first = claim_job(client, keys, a_job(keys, "a", steps="5"), 1.0)
    client.put(keys.round(1), encode(Round(1, 0, (), "127.0.0.1", 1, "r", "d", 0.0)))
    over = threading.Event()
    if is_registered:
        (port,) = free_ports(1)
        killed = member(a_host(liveness_port=port))
        timer = threading.Timer(0.5, lambda: (over.set(), killed.close()))
        timer.start()
    again = claim_job(client, keys, a_job(keys, "b", steps="5"), DEADLINE_S)
    assert over.is_set() is is_registered
    assert again.launch_id not in ("", first.launch_id)
    assert again.lost_launch is not None
    assert again.lost_launch.launch_id == first.launch_id
    # The second host of the same launch finds it.
    assert claim_job(client, keys, a_job(keys, "c", steps="5"), DEADLINE_S) == again


def test_host_without_launch_id_joins_a_living_launch(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    first = claim_job(client, keys, a_job(keys, "a", steps="5"), 1.0)
    client.put(keys.round(1), encode(Round(1, 0, (), "127.0.0.1", 1, "r", "d", 0.0)))
    liveness = LivenessPort("1", "127.0.0.1")
    try:
        member(a_host(liveness_port=liveness.port))
        assert claim_job(client, keys, a_job(keys, "b", steps="5"), DEADLINE_S) == first
    finally:
        liveness.close()


def test_relaunched_job_continues_its_numbers(client: EtcdClient, keys: JobKeys) -> None:
    claim_job(client, keys, a_job(keys, "a", "first", steps="5"), 1.0)
    client.put(keys.round(1), encode(Round(1, 0, (), "127.0.0.1", 1, "r", "d", 0.0)))
    client.put(keys.end, encode(JobEnd(75, "asked", 0.0)))
    client.put(keys.request("old"), b"{}")
    again = claim_job(client, keys, a_job(keys, "a", "second", steps="6"), 1.0)
    assert again.config == {"steps": "6"}
    view = read_job(client, keys)
    assert (view.end, view.record) == (None, again)
    assert client.get(keys.request("old")) is None
    assert client.get(keys.round(1)) is not None


def test_hosts_of_a_launch_that_ended_are_waited_for(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    claim_job(client, keys, a_job(keys, "a", "first"), 1.0)
    one = member(a_host())
    client.put(keys.end, encode(JobEnd(0, "done", 0.0)))
    with pytest.raises(ConfigError, match="has ended, but its hosts have not left"):
        claim_job(client, keys, a_job(keys, "a", "second"), 0.3)
    late = threading.Timer(0.3, one.close)
    late.start()
    assert claim_job(client, keys, a_job(keys, "a", "second"), DEADLINE_S).launch_id == "second"
    late.join()


def test_a_late_host_of_a_launch_that_ended_gets_its_end(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    first = claim_job(client, keys, a_job(keys, "a", "L"), 1.0)
    member(a_host())
    client.put(keys.end, encode(JobEnd(0, "done", 0.0)))
    assert claim_job(client, keys, a_job(keys, "b", "L"), 1.0) == first
    assert read_job(client, keys).end is not None


def test_concurrent_launches_give_one_the_name(client: EtcdClient, keys: JobKeys) -> None:
    records: list[JobRecord | ConfigError] = []
    memberships: list[Membership] = []

    def launch(host: str) -> None:
        try:
            records.append(claim_job(client, keys, a_job(keys, host, f"launch of {host}"), 1.0))
            membership = Membership(client, keys, ttl_s=10, renew_s=0.2)
            membership.register(a_host(host))
            memberships.append(membership)
        except ConfigError as error:
            records.append(error)

    threads = [threading.Thread(target=launch, args=(host,)) for host in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(type(record).__name__ for record in records) == ["ConfigError", "JobRecord"]
    for membership in memberships:
        membership.close()
