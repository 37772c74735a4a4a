"""The hosts that train together under torchrun: the rule in tables, and its guarantees for any order of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatrain.contracts.records.host_records import HostPhase, HostRecord, HostStatus
from megatrain.contracts.records.rounds import Halt, Round, RoundHost
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.rendezvous.rule import (
    BeginRound,
    Decision,
    EndRound,
    Since,
    decide,
    in_rank_order,
    still_stopping,
)
from megatrain_launcher.rendezvous.settings import RendezvousSettings
from megatrain_launcher.rendezvous.view import View

SETTINGS = RendezvousSettings("a-run", EtcdSettings.of(["e:1"]), 2, 3, last_call_s=2.0, stop_timeout_s=60.0)
PARKED, RUNNING = HostPhase.PARKED, HostPhase.RUNNING


def record(host: str, joined_unix_s: float = 0.0, session: str = "s") -> HostRecord:
    return HostRecord(host, session, 1, "a", 1, 0, 1, "", "0", "", joined_unix_s, is_fit=True)


def a_view(
    hosts: dict[str, tuple[HostPhase, int]], last: tuple[str, ...] = (), number: int = 1, is_halted=False
) -> View:
    """Return a view: phase and round of each registered host, and the hosts of the last round."""
    parts = tuple(RoundHost(host, "s", "a", rank, 1) for rank, host in enumerate(last))
    round_ = Round(number, len(last), parts, "a", 1, "", "d", 0.0)
    return View(
        revision=1,
        records={host: record(host) for host in hosts},
        statuses={host: HostStatus(host, "s", phase, on) for host, (phase, on) in hosts.items()},
        rounds={number: round_} if last else {},
        halts={number: Halt(number, "because", is_saving=False, created_unix_s=0.0)} if is_halted else {},
    )


def decided(view: View, now_s: float = 0.0, since: Since = Since(), **more: bool) -> Decision:  # noqa: B008
    return decide(now_s, view, SETTINGS, since, **more)[0]


def test_too_few_hosts_wait() -> None:
    assert decide(5.0, a_view({"a": (PARKED, 0)}), SETTINGS, Since()) == (None, Since(halted=5.0))


def test_enough_hosts_wait_for_a_last_call() -> None:
    view = a_view({"a": (PARKED, 0), "b": (PARKED, 0)})
    decision, since = decide(5.0, view, SETTINGS, Since())
    assert (decision, since) == (None, Since(5.0, 5.0))
    assert decide(6.9, view, SETTINGS, since) == (None, since)
    assert decide(7.0, view, SETTINGS, since) == (BeginRound(1, ("a", "b"), "the first round"), Since())


def test_last_call_starts_over_when_a_host_leaves() -> None:
    _, since = decide(5.0, a_view({"a": (PARKED, 0), "b": (PARKED, 0)}), SETTINGS, Since())
    _, since = decide(6.0, a_view({"a": (PARKED, 0)}), SETTINGS, since)
    assert decide(8.0, a_view({"a": (PARKED, 0), "b": (PARKED, 0)}), SETTINGS, since)[0] is None


def test_maximum_of_hosts_begins_at_once() -> None:
    view = a_view(dict.fromkeys("abcd", (PARKED, 0)))
    # By revisions: the clock of the last host may be slow.
    view = replace(view, since={**dict.fromkeys("acd", 5), "b": 9})
    assert decided(view) == BeginRound(1, ("a", "c", "d"), "the first round")


def test_round_ends_when_a_host_leaves_restarts_or_joins() -> None:
    for hosts, decision in [
        ({"a": (RUNNING, 1), "b": (RUNNING, 1)}, None),
        # It has not received the round yet.
        ({"a": (RUNNING, 1), "b": (PARKED, 0)}, None),
        ({"a": (RUNNING, 1)}, EndRound(1, "b is gone: its lease ended")),
        ({"a": (RUNNING, 1), "b": (PARKED, 1)}, EndRound(1, "b restarts its workers")),
        ({"a": (RUNNING, 1), "b": (RUNNING, 1), "c": (PARKED, 0)}, EndRound(1, "c joins")),
        ({"a": (RUNNING, 1), "b": (RUNNING, 1), "c": (RUNNING, 0)}, None),
    ]:
        assert decided(a_view(hosts, last=("a", "b"))) == decision, hosts


def test_full_round_takes_no_further_host() -> None:
    hosts = dict.fromkeys("abc", (RUNNING, 1)) | {"d": (PARKED, 0)}
    assert decided(a_view(hosts, last=("a", "b", "c"))) is None


def test_new_session_of_a_host_is_not_in_the_old_round() -> None:
    view = a_view({"a": (RUNNING, 1), "b": (PARKED, 0)}, last=("a", "b"))
    view = replace(view, records={**view.records, "b": record("b", session="another")})
    assert decided(view) == EndRound(1, "b is gone: its lease ended")


def test_no_host_counts_as_gone_after_an_etcd_outage() -> None:
    view = a_view({"a": (RUNNING, 1)}, last=("a", "b"))
    assert decided(view, is_absence_certain=False) is None


def test_the_next_round_waits_for_those_who_stop_their_workers() -> None:
    view = a_view({"a": (PARKED, 1), "b": (PARKED, 0), "c": (RUNNING, 1)}, last=("a", "c"), is_halted=True)
    assert still_stopping(view) == ("c",)
    assert decided(view, now_s=59.0, since=Since(0.0, 0.0)) is None
    assert decided(view, now_s=60.0, since=Since(0.0, 0.0)) == BeginRound(2, ("a", "b"), "because")


def test_a_restart_of_the_same_hosts_needs_no_last_call() -> None:
    view = a_view({"a": (PARKED, 1), "b": (PARKED, 1)}, last=("b", "a"), is_halted=True)
    assert decided(view) == BeginRound(2, ("b", "a"), "because")


def test_hosts_that_stay_keep_their_ranks() -> None:
    view = a_view(dict.fromkeys(("n1", "n2", "n10", "n3"), (PARKED, 0)), last=("n3", "gone", "n1"), is_halted=True)
    last = view.newest_round
    assert in_rank_order(["n1", "n2", "n3"], last, view, 3) == ("n3", "n2", "n1")
    # Rank 2 is gone.
    assert in_rank_order(["n1", "n3"], last, view, 3) == ("n3", "n1")
    # Members of the previous round are chosen before others.
    assert in_rank_order(["n1", "n2", "n3", "n10"], last, view, 3) == ("n3", "n2", "n1")


class Agents(RuleBasedStateMachine):
    """Agents that act as the handler does, at any speed, start and die in any order, and leaders that change."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.since, self.now_s, self.born = View(revision=1), Since(), 0.0, 0
        self.workers: dict[str, int] = {}
        """The round whose workers a host has."""
        self.halted_s = 0.0

    def put(self, host: str, phase: HostPhase, number: int) -> None:
        session = self.view.records[host].session
        status = HostStatus(host, session, phase, number)
        self.view = replace(self.view, statuses={**self.view.statuses, host: status})

    def decide(self) -> None:
        decision, self.since = decide(self.now_s, self.view, SETTINGS, self.since)
        if isinstance(decision, EndRound):
            halt = Halt(decision.number, decision.reason, is_saving=False, created_unix_s=self.now_s)
            assert decision.number not in self.view.halts
            self.halted_s = self.now_s
            self.view = replace(self.view, halts={**self.view.halts, decision.number: halt})
        elif isinstance(decision, BeginRound):
            assert self.view.live_round is None
            assert decision.number == self.view.newest_number + 1
            assert SETTINGS.min_hosts <= len(decision.hosts) <= SETTINGS.max_hosts
            assert len(set(decision.hosts)) == len(decision.hosts)
            # No host has workers left, unless the time to stop them is over.
            assert not self.workers or self.now_s - self.halted_s >= SETTINGS.stop_timeout_s
            parts = tuple(
                RoundHost(host, self.view.records[host].session, "a", rank, 1)
                for rank, host in enumerate(decision.hosts)
            )
            new = Round(decision.number, len(parts), parts, "a", 1, "", "d", 0.0)
            self.view = replace(self.view, rounds={**self.view.rounds, new.number: new})

    @initialize()
    def begin(self) -> None:
        for _ in range(3):
            self.come()
        self.settle()

    @rule()
    def come(self) -> None:
        self.born += 1
        host = f"h{self.born}"
        self.view = replace(self.view, records={**self.view.records, host: record(host, self.born, f"s{self.born}")})
        self.put(host, PARKED, 0)

    @precondition(lambda self: self.view.records)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.view.records)))
        records, statuses = dict(self.view.records), dict(self.view.statuses)
        del records[host], statuses[host]
        self.workers.pop(host, None)
        self.view = replace(self.view, records=records, statuses=statuses)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.workers)))
        self.put(host, PARKED, self.workers.pop(host))

    @precondition(lambda self: self.view.records)
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        self.act_as(data.draw(st.sampled_from(sorted(self.view.records))))

    @precondition(lambda self: self.view.records)
    @rule(data=st.data())
    def all_but_one_act(self, data: st.DataObject) -> None:
        slow = data.draw(st.sampled_from(sorted(self.view.records)))
        for host in sorted(self.view.records.keys() - {slow}):
            self.act_as(host)

    def act_as(self, host: str) -> None:
        """Act as an agent with the current view."""
        if host in self.workers:
            if self.view.is_over(self.workers[host]):
                self.put(host, PARKED, self.workers.pop(host))
            return
        live = self.view.live_round
        session = self.view.records[host].session
        if live is not None and live.part_of(host, session) and self.view.statuses[host].round < live.number:
            self.workers[host] = live.number
            self.put(host, RUNNING, live.number)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def lead(self, seconds: float) -> None:
        self.now_s += seconds
        self.decide()

    @rule()
    def settle(self) -> None:
        for _ in range(4):
            for host in sorted(self.view.records):
                self.act_as(host)
            self.lead(1.0)
        for host in sorted(self.view.records):
            self.act_as(host)

    @rule()
    def change_leaders(self) -> None:
        self.since = Since()

    @invariant()
    def at_most_one_round_is_live(self) -> None:
        assert len([number for number in self.view.rounds if number not in self.view.halts]) <= 1

    @invariant()
    def a_round_comes_about_once_every_agent_acts(self) -> None:
        """Faults stop: after a few turns of all agents, every agent that can train does."""
        saved = self.view, self.since, self.now_s, self.halted_s, dict(self.workers)
        for _ in range(12):
            for host in sorted(self.view.records):
                self.act_as(host)
            self.now_s += 1.0
            self.decide()
        live = self.view.live_round
        num_hosts = len(self.view.records)
        assert (live is not None) == (num_hosts >= SETTINGS.min_hosts)
        if live is not None:
            assert live.world_size == min(num_hosts, SETTINGS.max_hosts)
            assert {host for host, number in self.workers.items() if number == live.number} == {
                part.host for part in live.hosts
            }
        self.view, self.since, self.now_s, self.halted_s, self.workers = saved


class ManyAgents(Agents):
    """As `Agents`, with more examples."""


Agents.TestCase.settings = settings(max_examples=20, stateful_step_count=30)
ManyAgents.TestCase.settings = settings(max_examples=400, stateful_step_count=30)
TestAgents = Agents.TestCase
TestManyAgents = pytest.mark.slow(ManyAgents.TestCase)
