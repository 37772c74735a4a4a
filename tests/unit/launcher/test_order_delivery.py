"""An executor that does not receive its orders: it recovers by itself, and until then it is unfit and reports it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Halt, JobEnd, Round, RoundHost
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch import WatchLimits
from megatrain_job.coordination.watch_event import Snapshot
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.driver.eligibility import Eligible, eligible
from megatrain_launcher.driver.folding import fold
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.executor.executor_control import ExecutorControl, ExecutorControlParts
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.membership import FitnessCheck, Membership
from megatrain_launcher.executor.order_state import OrderState
from megatrain_launcher.liveness import LivenessPort, OrderDelivery, unfit_after_s
from tests.helpers.etcd_proxy import LONG_LENGTH, Conduct, EtcdProxy, FirstWatches, is_watch_of
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.registered_host import a_host
from tests.helpers.waiting import DEADLINE_S, wait_until

KEYS = JobKeys("orders")
FOLLOWED = {name: KEYS.directory(name) for name in ("rounds", "halts", "commands")}


@pytest.fixture
def driver(client: EtcdClient) -> Iterator[EtcdClient]:
    """The client of a driver, which writes the orders; the job's keys are removed after the test."""
    yield client
    client.delete(KeyRange.prefix(KEYS.prefix))


def test_malformed_answer_stops_no_delivery(etcd: EtcdServers, driver: EtcdClient) -> None:
    """Each of the three watches that carry orders is answered once with a length of 5,000 digits."""
    first = FirstWatches(FOLLOWED.values())
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        OrderState(KEYS, "a", "1") as orders,
    ):
        proxy.garbage, proxy.corrupts, proxy.conduct = [LONG_LENGTH], first, Conduct.GARBAGE
        orders.follow(client)
        wait_until(lambda: not first.left, "each watch to be answered with garbage")
        part = RoundHost("a", "1", "127.0.0.1", 0, 1)
        driver.put(KEYS.round(1), encode(Round(1, 1, (part,), "127.0.0.1", 1, "a test", "d", 0.0)))
        driver.put(KEYS.halt(1), encode(Halt(1, "a test", False, 0.0)))
        driver.put(KEYS.end, encode(JobEnd(0, "a test", 0.0)))

        wait_until(lambda: orders.view().named_in == 1, "the round to arrive")
        wait_until(lambda: orders.view().newest_halt == 1, "the halt to arrive")
        wait_until(lambda: orders.view().end is not None, "the end to arrive")
        wait_until(lambda: orders.problem == "", "the problem to be over")
        assert orders.view().end == JobEnd(0, "a test", 0.0)


def test_round_with_a_possibly_missed_halt_is_not_started(etcd: EtcdServers, driver: EtcdClient) -> None:
    """The watch of halts recovers late, the watch of rounds at once: this happened after an outage."""
    part = RoundHost("a", "1", "127.0.0.1", 0, 1)
    taken: list[int] = []

    def take(orders: OrderState) -> None:
        assignment = orders.next_assignment(0)
        taken.append(0 if assignment is None else assignment.round.number)

    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        OrderState(KEYS, "a", "1", max_unconfirmed_s=1.0) as orders,
    ):
        proxy.garbage, proxy.conduct = [LONG_LENGTH], Conduct.GARBAGE
        proxy.corrupts = lambda request: is_watch_of(FOLLOWED["halts"], request)
        orders.follow(client)
        wait_until(lambda: orders.unconfirmed_s > 1.0, "halts to be missed")
        driver.put(KEYS.round(1), encode(Round(1, 1, (part,), "127.0.0.1", 1, "a test", "d", 0.0)))
        wait_until(lambda: orders.view().named_in == 1, "the round to arrive")
        agent = threading.Thread(target=take, args=[orders])
        agent.start()
        corrupted = proxy.num_corrupted
        wait_until(lambda: proxy.num_corrupted > corrupted, "the watch of halts to fail again")
        assert (taken, orders.view().taken_round) == ([], 0)
        proxy.conduct = Conduct.PASS
        agent.join(DEADLINE_S)
        assert taken == [1]


@contextmanager
def executor(client: EtcdClient, bound_s: float) -> Iterator[Membership]:
    """The parts of an executor that check whether orders arrive: lease, orders and executor control."""
    membership = Membership(client, KEYS, ttl_s=10, renew_s=0.1)
    membership.register(a_host(num_workers=1))
    orders, liveness = OrderState(KEYS, "a", "1"), LivenessPort("1", "127.0.0.1")
    parts = ExecutorControlParts(
        client=client, keys=KEYS, host="a", orders=orders, membership=membership, liveness=liveness,
        state=HostStatusBuilder("a"), delivery=OrderDelivery(bound_s), on_stop=lambda: None,
    )  # fmt: skip
    with closing(membership), closing(liveness), orders:
        control = ExecutorControl(parts)
        with closing(control):
            orders.follow(client)
            yield membership


def eligible_now(client: EtcdClient) -> Eligible:
    """Return which hosts the driver would choose now: it folds the records in etcd."""
    answer = client.read_all(KeyRange.prefix(KEYS.prefix))
    began = ClusterState(keys=KEYS, observer="a", began=0.0)
    state = fold(began, [Snapshot(answer.revision, answer.items, "a test")], 1.0)
    return eligible(1.0, state, Policy(min_hosts=1, max_hosts=2, num_workers=1, feasible_counts={1: 2, 2: 1}), None)


@pytest.mark.slow
@pytest.mark.parametrize("followed", FOLLOWED)
def test_host_without_orders_joins_no_new_round(etcd: EtcdServers, driver: EtcdClient, followed: str) -> None:
    """One of its watches breaks each time it is opened, while its lease is renewed and all its calls are answered."""
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
    ):
        proxy.garbage, proxy.conduct = [LONG_LENGTH], Conduct.GARBAGE
        proxy.corrupts = lambda request: is_watch_of(FOLLOWED[followed], request)
        with executor(client, bound_s=0.5) as membership:
            wait_until(lambda: "etcd watch of " in eligible_now(driver).refused.get("a", ""), "the host to be refused")
            reason = eligible_now(driver).refused["a"]
            assert reason.startswith("it is unfit: its orders do not arrive: etcd watch of ")
            assert FOLLOWED[followed] in reason
            assert "bad Content-Length" in reason
            assert membership.is_registered

            membership.set_unfit_reason(FitnessCheck.HEALTH, "disk: full")
            proxy.conduct = Conduct.PASS
            wait_until(
                lambda: eligible_now(driver).refused.get("a") == "it is unfit: disk: full", "it to receive orders again"
            )
            membership.set_unfit_reason(FitnessCheck.HEALTH, "")
            wait_until(lambda: "a" in eligible_now(driver).available, "the host to be chosen")


RECENT, LONG_AGO = 0.1, 60.0


def test_time_without_orders_counts_while_etcd_answers() -> None:
    """Each poll: the time, how long no order has been confirmed, and whether the lease is held."""
    cases: dict[str, tuple[list[tuple[float, float, bool]], str]] = {
        "orders arrive": ([(100.0, RECENT, True)], ""),
        "not for long": ([(9.0, 9.0, True)], ""),
        "too long": ([(11.0, 11.0, True)], "no answer"),
        "orders arrive again": ([(11.0, 11.0, True), (12.0, RECENT, True)], ""),
        "etcd is away": ([(11.0, 11.0, False)], ""),
        "etcd was away": ([(60.0, LONG_AGO, False), (61.0, LONG_AGO, True)], ""),
        "etcd was away, and none arrive": (
            [(60.0, LONG_AGO, False), (61.0, LONG_AGO, True), (72.0, LONG_AGO, True)], "no answer",
        ),
        "none when etcd went": ([(11.0, 11.0, True), (30.0, 30.0, False), (31.0, 31.0, True)], "no answer"),
        "none when etcd went, and they arrive": ([(11.0, 11.0, True), (30.0, 30.0, False), (31.0, RECENT, True)], ""),
    }  # fmt: skip
    for name, (polls, expected) in cases.items():
        delivery, reason = OrderDelivery(10.0), ""
        for now, unconfirmed_s, is_held in [(0.0, RECENT, True), *polls]:
            reason = delivery.poll(now, unconfirmed_s, "no answer", is_lease_held=is_held)
        assert reason == (expected and f"its orders do not arrive: {expected}"), name


def test_reason_without_orders_names_the_first_known_problem() -> None:
    delivery = OrderDelivery(10.0)
    polls = [(0.0, RECENT, ""), (11.0, 11.0, ""), (12.0, 12.0, "no answer"), (13.0, 13.0, "refused")]
    polls += [(14.0, RECENT, ""), (25.0, 11.0, "")]
    reasons = [delivery.poll(now, waited_s, problem, is_lease_held=True) for now, waited_s, problem in polls]
    unknown = "its orders do not arrive: no sign of them for 10 s"
    known = "its orders do not arrive: no answer"
    assert reasons == ["", unknown, known, known, "", unknown]


def test_etcd_outage_below_a_lease_makes_no_host_unfit() -> None:
    """The lease is held during all that time. When etcd is available again, the watch recovers last."""
    limits, ttl_s = WatchLimits(), 10.0
    delivery = OrderDelivery(unfit_after_s(ttl_s))
    back_s = 100.0 + ttl_s
    polls = [(now, now - (100.0 - limits.silence_s)) for now in (100.0, back_s, back_s + limits.silence_s)]
    polls = [(0.0, 0.0), *polls]
    reasons = [delivery.poll(now, unconfirmed_s, "away", is_lease_held=True) for now, unconfirmed_s in polls]
    assert reasons == ["", "", "", ""]
