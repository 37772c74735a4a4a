"""Leases that are granted, renewed and lost, and the state that their keeper reports."""

from __future__ import annotations

import threading

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.client import EtcdClient, Lease
from megatrain_job.coordination.errors import LeaseLostError
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.ports import free_ports
from tests.helpers.waiting import DEADLINE_S, wait_until


def test_lease_lives_until_it_is_revoked(client: EtcdClient, prefix: str) -> None:
    lease = client.grant_lease(60)
    client.put(prefix + "a", "", lease_id=lease.lease_id)

    assert lease.ttl_s == 60
    assert client.renew_lease(lease.lease_id) == 60
    assert client.granted_ttl_s(lease.lease_id) == 60
    assert client.revoke_lease(lease.lease_id)
    assert client.get(prefix + "a") is None
    assert not client.revoke_lease(lease.lease_id)


def test_absent_lease_is_lost(client: EtcdClient) -> None:
    with pytest.raises(LeaseLostError, match="renewal of lease 3039: it has expired or was revoked"):
        client.renew_lease(0x3039)
    with pytest.raises(LeaseLostError, match="TTL of lease 3039"):
        client.granted_ttl_s(0x3039)


def test_repeated_grant_gives_one_lease(etcd: EtcdServers) -> None:
    # The answer of the first try is truncated, the second try finds that the lease exists.
    with EtcdProxy(etcd.members[0].client_port) as proxy, EtcdClient(EtcdSettings.of(proxy.url)) as client:
        proxy.conduct = Conduct.HALF_ANSWER
        threading.Timer(0.1, lambda: setattr(proxy, "conduct", Conduct.PASS)).start()

        lease = client.grant_lease(30)

        assert lease == Lease(lease.lease_id, 30)
        assert client.renew_lease(lease.lease_id) == 30
        client.revoke_lease(lease.lease_id)


def test_keeper_revokes_its_lease_unless_disabled(client: EtcdClient, prefix: str) -> None:
    with LeaseKeeper(client, ttl_s=30) as keeper:
        client.put(prefix + "a", "", lease_id=keeper.lease_id)
        assert keeper.state is LeaseState.HELD
        assert 0.0 < keeper.valid_s <= keeper.lease.ttl_s
    assert keeper.state is LeaseState.CLOSED
    assert client.get(prefix + "a") is None

    keeper = LeaseKeeper(client, ttl_s=30)
    keeper.close(is_revoked=False)
    keeper.close()
    assert client.renew_lease(keeper.lease_id) == 30
    client.revoke_lease(keeper.lease_id)


def test_revoked_lease_stays_lost(client: EtcdClient) -> None:
    reported: list[LeaseState] = []
    with LeaseKeeper(client, ttl_s=30, period_s=0.05, on_change=reported.append) as keeper:
        client.revoke_lease(keeper.lease_id)

        assert keeper.wait_until_lost(DEADLINE_S)
        assert keeper.state is LeaseState.LOST
        assert "was revoked" in keeper.lost_because
        wait_until(lambda: reported == [LeaseState.LOST], "the report of the change")
    assert keeper.state is LeaseState.LOST


@pytest.mark.slow
def test_silent_etcd_means_doubt_not_loss(etcd: EtcdServers) -> None:
    reported: list[LeaseState] = []
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        EtcdClient(EtcdSettings.of(etcd.urls)) as other,
        LeaseKeeper(client, ttl_s=2, period_s=0.2, on_change=reported.append) as keeper,
    ):

        def is_kept() -> bool:
            # Another client renews it, as a new etcd leader would by extending all leases.
            return other.renew_lease(keeper.lease_id) > 0

        proxy.conduct = Conduct.SWALLOW
        wait_until(lambda: is_kept() and keeper.state is LeaseState.DOUBTFUL, "doubt")
        wait_until(lambda: is_kept() and reported == [LeaseState.DOUBTFUL], "the report of the doubtful lease")
        kept = keeper.lease_id
        proxy.conduct = Conduct.PASS
        proxy.cut()
        wait_until(lambda: is_kept() and len(reported) == 2, "the end of the doubtful state")
        assert reported == [LeaseState.DOUBTFUL, LeaseState.HELD]
        assert keeper.lease_id == kept, "the same lease: it was never lost"


@pytest.mark.slow
def test_frozen_etcd_ends_in_doubt_and_then_in_loss(tmp_path_factory: pytest.TempPathFactory) -> None:
    with EtcdServers(tmp_path_factory.mktemp("frozen")) as servers:
        settings = EtcdSettings.of(servers.urls)
        with EtcdClient(settings) as client, LeaseKeeper(client, ttl_s=4, period_s=0.2) as keeper:
            client.put("a", "", lease_id=keeper.lease_id)
            servers.members[0].freeze()
            wait_until(lambda: keeper.state is LeaseState.DOUBTFUL, "doubt")
            # etcd counts from its answer, the keeper from its request; etcd's clock continues while etcd is suspended.
            wait_until(lambda: keeper.valid_s < -0.5, "the end of the lease by etcd's clock")
            servers.members[0].thaw()
            assert keeper.wait_until_lost(DEADLINE_S)
            wait_until(lambda: client.get("a") is None, "the key to go")


@pytest.mark.slow
def test_lease_survives_a_killed_and_restarted_etcd(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        EtcdServers(tmp_path_factory.mktemp("restarted")) as servers,
        EtcdClient(EtcdSettings.of(servers.urls)) as client,
        LeaseKeeper(client, ttl_s=5, period_s=0.1) as keeper,
    ):
        client.put("a", "x", lease_id=keeper.lease_id)
        servers.members[0].kill()
        servers.members[0].start()

        item = client.get("a", deadline_s=DEADLINE_S)  # waits until etcd runs again

        assert item is not None
        assert item.lease_id == keeper.lease_id
        assert client.renew_lease(keeper.lease_id) == 5
        wait_until(lambda: keeper.state is LeaseState.HELD, "the keeper's next renewal")


def test_keeper_without_etcd_is_not_created() -> None:
    with (
        EtcdClient(EtcdSettings.of(f"127.0.0.1:{free_ports(1)[0]}", call_s=0.3)) as client,
        pytest.raises(CoordinationError, match="grant of a lease"),
    ):
        LeaseKeeper(client)


def test_keeper_ends_with_its_client(etcd: EtcdServers) -> None:
    client = EtcdClient(EtcdSettings.of(etcd.urls))
    keeper = LeaseKeeper(client, ttl_s=5, period_s=0.05)
    client.close()
    keeper.close()

    with EtcdClient(EtcdSettings.of(etcd.urls)) as other:
        assert other.revoke_lease(keeper.lease_id)
