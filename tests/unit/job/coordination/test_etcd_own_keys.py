"""Writes of a key's only writer: no abandoned write is applied after a later one."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import LeaseLostError, UnknownOutcomeError
from megatrain_job.coordination.own_keys import OwnKeys
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.etcd_server import EtcdServers


def test_abandoned_write_does_not_come_after_a_later_one(etcd: EtcdServers) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(EtcdProxy(etcd.members[0].client_port))
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        far = stack.enter_context(EtcdClient(EtcdSettings.of([proxy.url], attempt_s=0.7, call_s=0.7)))
        own = OwnKeys(far)
        for number in range(2):
            own.put("/own/status", b"trains")
            proxy.keeps_back = lambda request: b"/v3/kv/txn" in request
            with pytest.raises(UnknownOutcomeError):
                own.put("/own/status", b"stands still")
            proxy.keeps_back = lambda request: False
            own.put("/own/status", f"trains again {number}".encode())
            proxy.deliver()
            item = client.get("/own/status")
            assert item is not None
            assert item.value == f"trains again {number}".encode()


def test_own_key_replaces_another_and_is_rewritten_when_lost(etcd: EtcdServers) -> None:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        own = OwnKeys(client)
        client.put("/own/other", "of the life before")
        lease = client.grant_lease(60)
        own.put("/own/other", b"one", lease_id=lease.lease_id)
        client.revoke_lease(lease.lease_id)
        with pytest.raises(LeaseLostError):
            own.put("/own/other", b"two", lease_id=lease.lease_id)
        own.put("/own/other", b"three")
        item = client.get("/own/other")
        assert item is not None
        assert item.value == b"three"


def test_a_second_writer_is_reported(etcd: EtcdServers) -> None:
    """The second writer writes before each transaction of the first one, including the one that detects it."""
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(etcd.urls)) as other,
        EtcdClient(EtcdSettings.of([proxy.url])) as client,
    ):
        proxy.before = lambda request: b"/v3/kv/txn" in request and other.put("/own/third", "mine")
        with pytest.raises(CoordinationError, match="another client writes"):
            OwnKeys(client).put("/own/third", b"yours")
