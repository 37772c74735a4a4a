"""The validity of answers, and its duration: progress notifications, deadlines of many threads, names that are not
hosts."""

from __future__ import annotations

import threading
import time

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import Credentials, EtcdSettings
from megatrain_job.coordination.watch import Watch, WatchLimits
from megatrain_job.coordination.watch_event import Changes, Snapshot
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.mark.slow
def test_signs_of_progress_are_no_proof_of_a_majority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A member that lost contact with the others continues to send them: a watch that trusts them would never get
    events again."""
    often = ["--experimental-watch-progress-notify-interval", "100ms"]
    with (
        EtcdServers(tmp_path_factory.mktemp("minority"), num_members=3, arguments=often) as cluster,
        EtcdClient(EtcdSettings.of(cluster.members[0].url, attempt_s=0.5)) as client,
        Watch(client, KeyRange.key("a"), limits=WatchLimits(silence_s=0.5)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        for member in cluster.members[1:]:
            member.kill()

        wait_until(lambda: watch.problem != "", "the watch to ask for proof")


@pytest.mark.slow
def test_thread_does_not_wait_for_anothers_authentication(etcd: EtcdServers) -> None:
    with EtcdProxy(etcd.members[0].client_port) as proxy:
        proxy.conduct = Conduct.SWALLOW
        settings = EtcdSettings.of(proxy.url, credentials=Credentials("bob", "x"), attempt_s=60.0, call_s=60.0)
        with EtcdClient(settings) as client:
            patient = threading.Thread(target=_expect_failure, args=(client, 60.0, "this client is closed"))
            patient.start()
            wait_until(lambda: proxy.num_connections > 0, "the first to ask for a token")

            _expect_failure(client, 0.2, "no answer")

            assert patient.is_alive(), "the other one still waits"
            client.close()
            patient.join()


def _expect_failure(client: EtcdClient, deadline_s: float, reason: str) -> None:
    with pytest.raises(CoordinationError, match=reason):
        client.get("a", deadline_s=deadline_s)


def test_hasty_call_leaves_the_watches_alone(etcd: EtcdServers, prefix: str) -> None:
    """A call with a short deadline that etcd missed proves nothing about the member."""
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix(prefix), limits=WatchLimits(silence_s=60.0)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        written = client.put(prefix + "a", "")
        assert isinstance(watch.next(DEADLINE_S), Changes)
        proxy.conduct = Conduct.DRIP
        with pytest.raises(CoordinationError):
            client.get(prefix + "a", deadline_s=0.2)
        proxy.conduct = Conduct.PASS
        before = proxy.num_connections

        assert watch.next(0.5) is None
        assert not watch.problem
        assert watch.next_revision == written + 1
        assert proxy.num_connections == before


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".example", "a..b"])
def test_host_that_cannot_be_resolved_is_a_coordination_error(host: str) -> None:
    with (
        EtcdClient(EtcdSettings.of(f"http://{host}:2379", call_s=0.2)) as client,
        pytest.raises(CoordinationError, match="no answer from etcd") as caught,
    ):
        client.get("a")
    assert host in str(caught.value)


@pytest.mark.slow
def test_proof_by_other_calls_keeps_no_dead_stream_alive(etcd: EtcdServers, prefix: str) -> None:
    """Calls succeed, so the member is trusted; the stream itself delivers nothing and must be replaced."""
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
        Watch(client, KeyRange.prefix(prefix), limits=WatchLimits(silence_s=0.2, renew_s=0.5)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        written = client.put(prefix + "a", "")
        assert isinstance(watch.next(DEADLINE_S), Changes)
        before = proxy.num_connections
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            client.get(prefix + "a")
            assert watch.next(0.05) is None

        assert 1 <= proxy.num_connections - before <= 4
        assert writer.put(prefix + "a", "") == written + 1
        assert isinstance(watch.next(DEADLINE_S), Changes)
