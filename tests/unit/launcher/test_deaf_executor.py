"""An executor that does not receive its orders: it recovers by itself, and until then it is unfit and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from megatrain.contracts.host_records import HostRecord
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import encode
from megatrain.contracts.rounds import Halt, JobEnd, Round, RoundHost
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain.coordination.watch import Snapshot, WatchLimits
from megatrain.coordination.wire import KeyRange
from megatrain_launcher.driver.folding import fold_all
from megatrain_launcher.driver.forming import Eligible, eligible
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.executor.caretaker import Caretaker, CaretakerParts
from megatrain_launcher.executor.hearing import Hearing, unfit_after_s
from megatrain_launcher.executor.host_state import HostState
from megatrain_launcher.executor.liveness import LivenessPort
from megatrain_launcher.executor.membership import Judge, LeaseTimes, Membership
from megatrain_launcher.executor.orders import OrderBook
from tests.helpers.etcd_proxy import LONG_LENGTH, Conduct, EtcdProxy, FirstWatches, is_watch_of
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import wait_until

KEYS = JobKeys("deaf")
FOLLOWED = {name: KEYS.directory(name) for name in ("rounds", "halts", "commands")}


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


def test_one_malformed_answer_deafens_nobody(etcd: EtcdServers) -> None:
    """Each of the three watches that carry orders is answered once with a length of 5,000 digits."""
    first = FirstWatches(FOLLOWED.values())
    with (
        EtcdClient(EtcdSettings.of(etcd.urls)) as driver,
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        OrderBook(KEYS, "a", "1") as book,
    ):
        proxy.garbage, proxy.spoils, proxy.conduct = [LONG_LENGTH], first, Conduct.GARBAGE
        book.follow(client)
        wait_until(lambda: not first.left, "each watch to be answered with garbage", 10.0)
        part = RoundHost("a", "1", "127.0.0.1", 0, 1)
        driver.put(KEYS.round(1), encode(Round(1, 1, (part,), "127.0.0.1", 1, "a test", "d", 0.0)))
        driver.put(KEYS.halt(1), encode(Halt(1, "a test", False, 0.0)))
        driver.put(KEYS.end, encode(JobEnd(0, "a test", 0.0)))

        wait_until(lambda: book.view().named_in == 1, "the round to arrive", 10.0)
        wait_until(lambda: book.view().newest_halt == 1, "the halt to arrive", 10.0)
        wait_until(lambda: book.view().end is not None, "the end to arrive", 10.0)
        wait_until(lambda: book.trouble == "", "the trouble to be over", 10.0)
        assert book.view().end == JobEnd(0, "a test", 0.0)


def a_host() -> HostRecord:
    return HostRecord("a", "1", 1, "127.0.0.1", 1, 1, 1, "", "", "", 0.0, is_fit=True)


@contextmanager
def executor(client: EtcdClient, bound_s: float) -> Iterator[Membership]:
    """The parts of an executor that judge whether orders arrive: lease, orders and caretaker."""
    membership = Membership(client, KEYS, LeaseTimes(ttl_s=10, renew_s=0.1))
    membership.register(a_host())
    orders, liveness = OrderBook(KEYS, "a", "1"), LivenessPort("1", "127.0.0.1")
    parts = CaretakerParts(
        client=client, keys=KEYS, host="a", orders=orders, membership=membership, liveness=liveness,
        state=HostState("a"), hearing=Hearing(bound_s), on_stop=lambda: None,
    )  # fmt: skip
    with closing(membership), closing(liveness), orders:
        caretaker = Caretaker(parts)
        with closing(caretaker):
            orders.follow(client)
            yield membership


def eligible_now(client: EtcdClient) -> Eligible:
    """Return which hosts the driver would take now: it folds what etcd holds."""
    answer = client.read_all(KeyRange.prefix(KEYS.prefix))
    began = ClusterState(keys=KEYS, observer="a", began=0.0)
    state = fold_all(began, [Snapshot(answer.revision, answer.items, "a test")], 1.0)
    return eligible(
        1.0, state, Policy(min_hosts=1, max_hosts=2, num_workers=1, feasible_counts=frozenset({1, 2})), None
    )


@pytest.mark.slow(kept=["commands"])
@pytest.mark.parametrize("followed", FOLLOWED)
def test_host_that_stays_deaf_is_in_no_new_round_until_it_hears(etcd: EtcdServers, followed: str) -> None:
    """One of its watches breaks each time it is opened, while its lease is renewed and all its calls are answered."""
    with (
        EtcdClient(EtcdSettings.of(etcd.urls)) as driver,
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
    ):
        proxy.garbage, proxy.conduct = [LONG_LENGTH], Conduct.GARBAGE
        proxy.spoils = lambda request: is_watch_of(FOLLOWED[followed], request)
        with executor(client, bound_s=0.5) as membership:
            wait_until(lambda: "a" in eligible_now(driver).refused, "the host to be refused", 20.0)
            reason = eligible_now(driver).refused["a"]
            assert reason.startswith("it is unfit: its orders do not arrive: etcd watch of ")
            assert FOLLOWED[followed] in reason
            assert "bad Content-Length" in reason
            assert membership.is_registered

            membership.judge(Judge.CHECKS, "disk: full")
            proxy.conduct = Conduct.PASS
            wait_until(
                lambda: eligible_now(driver).refused.get("a") == "it is unfit: disk: full", "it to hear again", 20.0
            )
            membership.judge(Judge.CHECKS, "")
            wait_until(lambda: "a" in eligible_now(driver).available, "the host to be taken", 20.0)


HEARD, UNHEARD = 0.1, 60.0


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(0.0, HEARD, True), (100.0, HEARD, True)], ""),
        ([(0.0, HEARD, True), (9.0, 9.0, True)], ""),
        ([(0.0, HEARD, True), (11.0, 11.0, True)], "deaf"),
        ([(0.0, HEARD, True), (11.0, 11.0, True), (12.0, HEARD, True)], ""),
        ([(0.0, HEARD, True), (11.0, 11.0, False)], ""),
        ([(0.0, HEARD, True), (60.0, UNHEARD, False), (61.0, UNHEARD, True)], ""),
        ([(0.0, HEARD, True), (60.0, UNHEARD, False), (61.0, UNHEARD, True), (72.0, UNHEARD, True)], "deaf"),
        ([(0.0, HEARD, True), (11.0, 11.0, True), (30.0, 30.0, False), (31.0, 31.0, True)], "deaf"),
        ([(0.0, HEARD, True), (11.0, 11.0, True), (30.0, 30.0, False), (31.0, HEARD, True)], ""),
    ],
    ids=[
        "it hears", "not for long", "too long", "it hears again", "etcd is away", "etcd was away",
        "etcd was away, and it stays deaf", "deaf when etcd went", "deaf when etcd went, and it hears",
    ],
)  # fmt: skip
def test_time_unheard_counts_while_etcd_answers(looks: list[tuple[float, float, bool]], expected: str) -> None:
    hearing = Hearing(10.0)
    reasons = [hearing.look(now, unheard_s, "deaf", is_lease_held=held) for now, unheard_s, held in looks]
    assert reasons[-1] == (expected and f"its orders do not arrive: {expected}")


def test_an_etcd_that_was_away_for_just_less_than_a_lease_makes_nobody_unfit() -> None:
    """The lease is held all the while. When etcd is back the watch is the last to hear of it."""
    limits, ttl_s = WatchLimits(), 10.0
    hearing = Hearing(unfit_after_s(ttl_s))
    back_s = 100.0 + ttl_s
    looks = [(now, now - (100.0 - limits.silence_s)) for now in (100.0, back_s, back_s + limits.silence_s)]
    told = [hearing.look(now, unheard_s, "away", is_lease_held=True) for now, unheard_s in [(0.0, 0.0), *looks]]
    assert told == ["", "", "", ""]
