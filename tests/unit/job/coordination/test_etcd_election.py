"""Elections: one leader, in the order of candidacy; no write after leadership is lost; tokens that only rise."""

from __future__ import annotations

import itertools
import subprocess
import threading
from contextlib import ExitStack

import pytest

from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import DeathChecks, Election, Leadership
from megatrain_job.coordination.errors import LeadershipLostError, LeaseLostError, UnknownOutcomeError
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.transport import Deadline
from megatrain_job.coordination.wire import Compare, KeyRange, Put
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.etcd_server import EtcdServers, etcd_program
from tests.helpers.waiting import DEADLINE_S, wait_until


class ElectionCandidate:
    """A campaign in a separate thread."""

    def __init__(self, client: EtcdClient, name: str, value: str, ttl_s: int = 30) -> None:
        self.keeper = LeaseKeeper(client, ttl_s=ttl_s, period_s=0.1)
        self.leadership: Leadership | None = None
        self.error: Exception | None = None
        self._is_cancelled = threading.Event()
        self._election, self._value = Election(client, name), value
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.leadership = self._election.campaign(self.keeper, self._value, is_cancelled=self._is_cancelled.is_set)
        except LeaseLostError as error:
            self.error = error

    def won(self) -> Leadership:
        self._thread.join(DEADLINE_S)
        assert self.leadership is not None
        return self.leadership

    def close(self) -> None:
        self._is_cancelled.set()
        self._thread.join()
        self.keeper.close()


def leader_of(election: Election) -> tuple[bytes, str, int]:
    """Return key, value and token of the leader."""
    found = election.leader()
    assert found is not None
    return found.key, found.value.decode(), found.create_revision


def wait_for_candidates(client: EtcdClient, prefix: str, count: int) -> None:
    wait_until(lambda: len(client.read_all(KeyRange.prefix(prefix)).items) == count, f"{count} candidates")


def test_candidates_lead_one_after_the_other(client: EtcdClient, prefix: str) -> None:
    candidates: list[ElectionCandidate] = []
    try:
        for number in range(4):
            candidates.append(ElectionCandidate(client, prefix + "driver", f"host-{number}"))
            wait_for_candidates(client, prefix, number + 1)
        tokens: list[int] = []
        for number, candidate in enumerate(candidates):
            leadership = candidate.won()
            tokens.append(leadership.token)
            leader = leader_of(Election(client, prefix + "driver"))
            assert leader == (leadership.key, f"host-{number}", leadership.token)
            assert all(later.leadership is None for later in candidates[number + 1 :])
            # one resigns, one loses its lease, one closes
            if number == 0:
                leadership.resign()
                leadership.resign()
            elif number == 1:
                client.revoke_lease(candidate.keeper.lease_id)
            else:
                candidate.keeper.close()
        assert tokens == sorted(set(tokens))
        assert Election(client, prefix + "driver").leader() is None
    finally:
        for candidate in candidates:
            candidate.close()


def test_lost_lease_ends_a_campaign_and_no_other(client: EtcdClient, prefix: str) -> None:
    candidates = []
    try:
        for number in range(3):
            candidates.append(ElectionCandidate(client, prefix + "driver", str(number)))
            wait_for_candidates(client, prefix, number + 1)
        first, middle, last = candidates
        client.revoke_lease(middle.keeper.lease_id)
        wait_until(lambda: isinstance(middle.error, LeaseLostError), "the campaign to end")
        with pytest.raises(LeaseLostError):
            Election(client, prefix + "driver").campaign(middle.keeper, "1")
        assert last.leadership is None
        first.won().resign()
        assert last.won().token > first.won().token
    finally:
        for candidate in candidates:
            candidate.close()


@pytest.mark.parametrize(
    ("is_suspected", "refuses_from_s", "asked_at_s"),
    [
        (False, 100.0, [0.0, 1.0, 2.0, 3.0, 4.0]),
        (True, 100.0, [0.25 * number for number in range(20)]),
        (False, 2.25, [0.0, 1.0, 2.0, 3.0, 3.25]),
        (True, 2.25, [0.25 * number for number in range(11)]),
    ],
)
def test_two_refusals_in_a_row_prove_a_death(
    is_suspected: bool, refuses_from_s: float, asked_at_s: list[float]
) -> None:
    checks, asked = DeathChecks(), []
    for now_s in (0.25 * number for number in range(20)):
        if checks.is_due(now_s, is_suspected=is_suspected):
            asked.append(now_s)
            if checks.proves(now_s, is_dead=now_s >= refuses_from_s):
                break

    assert asked == asked_at_s
    assert not checks.proves(now_s, is_dead=False)
    assert not checks.proves(now_s, is_dead=True), "the answer before it was another"


def test_cancelled_campaigns_leave_no_key(client: EtcdClient, prefix: str) -> None:
    election = Election(client, prefix + "driver")
    with LeaseKeeper(client) as first, LeaseKeeper(client) as second:
        leadership = election.campaign(first, "a")
        assert leadership is not None

        # Cancelled while it waits for the first candidate.
        asked = itertools.count()
        assert election.campaign(second, "b", is_cancelled=lambda: next(asked) >= 2) is None
        assert election.campaign(second, "b", is_cancelled=lambda: True) is None

        assert [item.value for item in client.read_all(KeyRange.prefix(prefix)).items] == [b"a"]
        # With the same lease it is the same candidacy.
        again = election.campaign(first, "a2")
        assert again is not None
        assert again.token == leadership.token
        assert leader_of(election) == (leadership.key, "a2", leadership.token)


def test_guarded_transaction_is_a_leaders_only(client: EtcdClient, prefix: str) -> None:
    key = prefix + "round"
    with LeaseKeeper(client, period_s=0.1) as old_keeper, LeaseKeeper(client) as new_keeper:
        old = Election(client, prefix + "driver").campaign(old_keeper, "old")
        assert old is not None
        assert old.txn([Put(key, "1")]).succeeded
        # A failed condition of the leader itself is not a loss of leadership.
        assert not old.txn([Put(key, "2")], [Compare.is_absent(key)]).succeeded
        assert old.is_certain

        client.revoke_lease(old_keeper.lease_id)
        new = Election(client, prefix + "driver").campaign(new_keeper, "new")
        assert new is not None
        new.txn([Put(key, "3")])

        for stale in (lambda: old.txn([Put(key, "4")]), old.renew_revision):
            with pytest.raises(LeadershipLostError, match=f"token {old.token} is over"):
                stale()
        old.resign()
        item = client.get(key)
        assert item is not None
        assert item.value == b"3"
        assert leader_of(Election(client, prefix + "driver")) == (new.key, "new", new.token)
        wait_until(lambda: not old.is_certain, "the old leader to notice")


def test_never_two_leaders_and_no_stale_write(etcd: EtcdServers, client: EtcdClient, prefix: str) -> None:
    """Candidates start, lead, write guarded numbers and lose their leases without notice: each write is its
    leader's."""
    key, history = prefix + "written", []
    client.put(key, "0")

    def lead(name: str) -> None:
        deadline = Deadline(DEADLINE_S)
        with EtcdClient(EtcdSettings.of(etcd.urls)) as own:
            election = Election(own, prefix + "driver")
            for _ in range(4):
                with LeaseKeeper(own, ttl_s=5, period_s=0.1) as keeper:
                    leadership = election.campaign(keeper, name, is_cancelled=lambda: deadline.left_s <= 0)
                    assert leadership is not None
                    history.append(leadership.token)
                    leadership.txn([Put(key, str(leadership.token))])
                    client.revoke_lease(keeper.lease_id)
                    with pytest.raises(LeadershipLostError):
                        leadership.txn([Put(key, "stale")])

    threads = [threading.Thread(target=lead, args=(name,)) for name in "abc"]
    start = client.get(key)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert start is not None
    assert len(history) == 12
    assert len(set(history)) == 12
    # etcd's own history of the key: tokens rise, and no write is stale
    item, written = client.get(key), []
    while item is not None and item.mod_revision > item.create_revision:
        written.append(int(item.value))
        item = client.get(key, revision=item.mod_revision - 1)
    assert written[::-1] == sorted(history)


def test_etcdctl_takes_part(etcd: EtcdServers, client: EtcdClient, prefix: str) -> None:
    name = prefix + "driver"
    arguments = [etcd_program("etcdctl"), "--endpoints", etcd.urls[0], "elect", name, "theirs"]
    with LeaseKeeper(client) as keeper:
        ours = Election(client, name).campaign(keeper, "ours")
        assert ours is not None
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                wait_for_candidates(client, prefix, 2)
                ours.resign()
                assert process.stdout is not None
                # It prints its key when it leads.
                assert process.stdout.readline().startswith(name)
                leader = Election(client, name).leader()
                assert leader is not None
                assert leader.value == b"theirs"
            finally:
                process.kill()
    client.delete(KeyRange.prefix(prefix))


def test_abandoned_transaction_is_not_applied_later(etcd: EtcdServers) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(EtcdProxy(etcd.members[0].client_port))
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        far = stack.enter_context(EtcdClient(EtcdSettings.of([proxy.url])))
        keeper = stack.enter_context(LeaseKeeper(client, ttl_s=10))
        leadership = Election(far, "/marks").campaign(keeper, "one")
        assert leadership is not None
        proxy.keeps_back = lambda request: b"/v3/kv/txn" in request
        with pytest.raises(UnknownOutcomeError):
            leadership.txn([Put("/marked", "late")])
        with pytest.raises(RuntimeError, match="renewed"):
            leadership.txn([Put("/marked", "new")])
        proxy.keeps_back = lambda request: False
        leadership.renew_revision()
        proxy.deliver()
        assert client.get("/marked") is None
        assert leadership.txn([Put("/marked", "new")]).succeeded
        client.put(leadership.key, "etcdctl", lease_id=keeper.lease_id)
        with pytest.raises(UnknownOutcomeError, match="another client wrote"):
            leadership.txn([Put("/marked", "again")])
        leadership.renew_revision()
        assert leadership.txn([Put("/marked", "again")]).succeeded
