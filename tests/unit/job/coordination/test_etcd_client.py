"""Calls to a real etcd: values of every kind, ranges, transactions, and the requests that etcd refuses."""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import CompactedError, LeaseLostError, NoSpaceError
from megatrain_job.coordination.maintenance import (
    EtcdAlarm,
    HistoryTrimmer,
    alarms,
    compact,
    status,
)
from megatrain_job.coordination.operation_responses import DeleteResponse, PutResponse
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import Compare, Delete, KeyRange, Put, Range
from tests.helpers.etcd_server import EtcdServers, post
from tests.helpers.ports import free_ports

_NO_SUCH_LEASE = 12345


def test_put_get_delete(client: EtcdClient, prefix: str) -> None:
    key = prefix + "a"
    assert client.get(key) is None

    first = client.put(key, "1")
    second = client.put(key, "2")

    item = client.get(key)
    assert item is not None
    assert (item.value, item.create_revision, item.mod_revision) == (b"2", first, second)
    old = client.get(key, revision=first)
    assert old is not None
    assert old.value == b"1"
    assert client.delete(key).num_deleted == 1
    assert client.delete(key).num_deleted == 0
    assert client.get(key) is None


@given(st.binary(min_size=1, max_size=40), st.binary(max_size=200))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_binary_keys_and_values_come_back(client: EtcdClient, prefix: str, key: bytes, value: bytes) -> None:
    whole = prefix.encode() + key
    client.put(whole, value)

    item = client.get(whole)

    assert item is not None
    assert (item.key, item.value) == (whole, value)


@pytest.mark.slow
def test_big_value_comes_back_and_a_bigger_one_is_refused(client: EtcdClient, prefix: str) -> None:
    value = bytes(range(256)) * (5 << 10)
    client.put(prefix + "big", value)

    item = client.get(prefix + "big")

    assert item is not None
    assert item.value == value
    for bigger in (value + bytes(300 << 10), value * 2):
        with pytest.raises(CoordinationError, match=r"etcd put 'test-.*(too large|larger than max)"):
            client.put(prefix + "bigger", bigger)


def test_prefix_that_ends_in_the_highest_bytes(client: EtcdClient, prefix: str) -> None:
    base = prefix.encode()
    keys = [base + tail for tail in (b"\xfe", b"\xfe\xff", b"\xff", b"\xff\x00", b"\xff\xff", b"\xff\xff\x01")]
    for key in keys:
        client.put(key, b"")

    found = [item.key for item in client.read_all(KeyRange.prefix(base + b"\xff")).items]

    assert found == keys[2:]
    assert [item.key for item in client.read_all(KeyRange.prefix(base)).items] == keys
    assert set(keys) <= {item.key for item in client.read_all(KeyRange.prefix(b""), has_values=False).items}


def test_pages_of_any_size_give_all_keys_once(client: EtcdClient, prefix: str) -> None:
    keys = KeyRange.prefix(prefix)
    for number in range(10):
        client.put(f"{prefix}{number}", str(number))
    client.delete(f"{prefix}9")

    for page_keys in (1, 3, 9, 500):
        answer = client.read_all(keys, page_keys=page_keys)
        assert [item.value for item in answer.items] == [b"%d" % number for number in range(9)], page_keys
        assert not answer.has_more, page_keys
        assert client.read_all(keys, has_values=False, page_keys=page_keys).items[3].value == b""


def test_transaction_that_only_reads_is_refused(client: EtcdClient, prefix: str) -> None:
    keys = Range(KeyRange.prefix(prefix))
    with pytest.raises(ValueError, match="read_together"):
        client.txn([Compare.is_absent(prefix)], [keys], [keys])


def test_transaction_takes_the_branch_of_its_conditions(client: EtcdClient, prefix: str) -> None:
    key = prefix + "a"
    create = ([Compare.is_absent(key)], [Put(key, "1")], [Range(KeyRange.key(key))])

    first, second = client.txn(*create), client.txn(*create)

    assert first.succeeded
    assert first.responses == (PutResponse(first.revision),)
    assert not second.succeeded
    assert [item.value for item in second.range_response().items] == [b"1"]
    with pytest.raises(TypeError, match="PutResponse"):
        first.range_response()


def test_every_condition_decides(client: EtcdClient, prefix: str) -> None:
    key = prefix + "a"
    created = client.put(key, "b")
    changed = client.put(key, "c")
    met = [
        Compare.is_present(key), Compare.is_absent(prefix + "none"), Compare.create_revision(key, created),
        Compare.mod_revision(key, changed),
    ]  # fmt: skip
    unmet = [
        Compare.is_absent(key), Compare.is_present(prefix + "none"), Compare.create_revision(key, created + 1),
        Compare.mod_revision(key, changed + 1), Compare.mod_revision(key, changed - 1),
    ]  # fmt: skip

    assert client.txn(met, []).succeeded
    for condition in unmet:
        assert not client.txn([*met, condition], []).succeeded, condition


def test_operations_of_a_transaction_are_answered_in_order(client: EtcdClient, prefix: str) -> None:
    client.put(prefix + "a", "")
    keys = KeyRange.prefix(prefix)

    # A transaction must not delete a key that it also writes.
    operations = [Put(prefix + "b", "x"), Range(keys), Delete(KeyRange.key(prefix + "a")), Range(keys, limit=1)]
    response = client.txn([], operations)

    assert isinstance(response.responses[0], PutResponse)
    assert [item.value for item in response.range_response(1).items] == [b"", b"x"]
    assert response.responses[2] == DeleteResponse(response.revision, 1)
    assert [item.value for item in response.range_response(3).items] == [b"x"]


def test_client_serves_many_threads(client: EtcdClient, prefix: str) -> None:
    def write(name: str) -> None:
        for number in range(20):
            client.put(f"{prefix}{name}/{number}", name)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(client.read_all(KeyRange.prefix(prefix)).items) == 120


def test_refusals_name_key_and_endpoint(client: EtcdClient, prefix: str) -> None:
    with pytest.raises(LeaseLostError, match=f"etcd put '{prefix}a': .*lease not found .*http://127") as caught:
        client.put(prefix + "a", "", lease_id=_NO_SUCH_LEASE)
    assert caught.value.key == f"'{prefix}a'"
    assert list(caught.value.endpoints) == [str(endpoint) for endpoint in client.settings.endpoints]
    with pytest.raises(CoordinationError, match="key is not provided"):
        client.put("", "")
    with pytest.raises(CoordinationError, match="future revision"):
        client.get(prefix, revision=10**9)


def test_compaction_drops_history_and_happens_once(client: EtcdClient, prefix: str) -> None:
    first = client.put(prefix + "a", "1")
    second = client.put(prefix + "a", "2")

    compact(client, second)
    compact(client, second)

    with pytest.raises(CompactedError):
        client.get(prefix + "a", revision=first)
    item = client.get(prefix + "a")
    assert item is not None
    assert item.value == b"2"


def test_trimmer_compacts_to_what_was_newest_a_while_ago(client: EtcdClient, prefix: str) -> None:
    trimmer = HistoryTrimmer(client, retention_s=100.0, period_s=10.0)
    first = client.put(prefix + "a", "1")
    assert trimmer.tick(1000.0) is None
    client.put(prefix + "a", "2")
    assert trimmer.tick(1005.0) is None
    third = client.put(prefix + "a", "3")
    assert trimmer.tick(1050.0) is None
    assert client.get(prefix + "a", revision=first) is not None

    assert trimmer.tick(1100.0) == first
    assert client.get(prefix + "a", revision=first) is not None
    assert trimmer.tick(1151.0) == third
    with pytest.raises(CompactedError):
        client.get(prefix + "a", revision=first)


def test_status_of_a_member(client: EtcdClient, etcd: EtcdServers) -> None:
    (endpoint,) = client.settings.endpoints

    found = status(client, endpoint)

    assert found.leader_id == int(post(etcd.urls[0], "/v3/maintenance/status", {})["header"]["member_id"])
    assert found.database_bytes > 0


def test_full_database_is_reported(client: EtcdClient, etcd: EtcdServers, prefix: str) -> None:
    member_id = post(etcd.urls[0], "/v3/maintenance/status", {})["header"]["member_id"]
    alarm = {"memberID": member_id, "alarm": "NOSPACE"}
    post(etcd.urls[0], "/v3/maintenance/alarm", {"action": "ACTIVATE", **alarm})
    try:
        with pytest.raises(NoSpaceError, match="disarm"):
            client.put(prefix + "a", "")
        assert client.get(prefix + "a") is None
        assert alarms(client) == (EtcdAlarm("NOSPACE", int(member_id)),)
    finally:
        post(etcd.urls[0], "/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
    assert alarms(client) == ()
    client.put(prefix + "a", "")


def test_unreachable_etcd_is_named_within_the_deadline() -> None:
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
    with EtcdClient(EtcdSettings.of(urls, call_s=0.3)) as client, pytest.raises(CoordinationError) as caught:
        client.put("jobs/a", "")

    text = str(caught.value)
    assert text.startswith("etcd put 'jobs/a': no answer from etcd within 0.3 s: ")
    assert text.count("Connection refused") == 2
    assert all(url in text for url in urls)
    assert sorted(caught.value.endpoints) == sorted(urls)
    assert caught.value.key == "'jobs/a'"
    assert not caught.value.may_have_applied
    assert caught.value.exit_code is ExitCode.COORDINATION


def test_closed_client_raises_an_error(etcd: EtcdServers) -> None:
    client = EtcdClient(EtcdSettings.of(etcd.urls))
    client.put("a", "")
    client.close()
    client.close()

    with pytest.raises(CoordinationError, match="this client is closed"):
        client.get("a")


def test_members_of_another_cluster_are_refused(etcd: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> None:
    with EtcdServers(tmp_path_factory.mktemp("other"), token="other") as other:
        both = EtcdSettings.of([*etcd.urls, *other.urls])
        with EtcdClient(both) as client:
            client.put("where", "here")
            first = client.gateway.ring.best()
            client.gateway.ring.failed(first)

            # The other member answers, but it belongs to another cluster: the client returns to the first member.
            item = client.get("where")

            assert item is not None
            assert client.gateway.ring.best() == first
            with pytest.raises(CoordinationError, match=r"is of cluster \d+, the others are of \d+"):
                status(client, next(endpoint for endpoint in both.endpoints if endpoint != first))
