"""Pair tests: which hosts are paired, which is at fault, and one real pair of two probes."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, HostRecord
from megatrain.contracts.records.record import decode, encode
from megatrain_launcher.health.child import ProbeEnd
from megatrain_launcher.health.pair_test import PairTask, pair_results, pair_task, run_pair
from megatrain_launcher.health.pairs import (
    Pair,
    PairFindings,
    PairResult,
    judge_pairs,
    num_turns,
    pairs,
    partners,
)
from tests.helpers.waiting import DEADLINE_S


def hosts_of(count: int) -> list[str]:
    return [f"host-{number}" for number in range(count)]


def schedule_of(count: int) -> list[Pair]:
    hosts = hosts_of(count)
    return [pair for turn in range(num_turns(count)) for pair in pairs(hosts, turn)]


def results_of(
    schedule: list[Pair],
    *,
    slow: set[str] = frozenset(),
    broken: set[str] = frozenset(),
    links: set[Pair] = frozenset(),
) -> list[PairResult]:
    """The reports of all hosts if some are slow or broken in the network, or a link between two is."""
    found = []
    for pair in schedule:
        reduce_s: float | None = 0.010
        if set(pair) & slow or pair in links:
            reduce_s = 0.050
        if set(pair) & broken:
            reduce_s = None
        for host, partner in (pair, pair[::-1]):
            found.append(PairResult(host, partner, 0.020, 0.1, reduce_s, "" if reduce_s else "timed out"))
    return found


def test_turns_of_pairs_around_the_ring() -> None:
    for count, turns in [
        (0, []),
        (1, []),
        (2, [[(0, 1)]]),
        (3, [[(0, 1)], [(1, 2)], [(2, 0)]]),
        (4, [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]),
        (5, [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]),
    ]:
        hosts = hosts_of(count)
        assert num_turns(count) == len(turns), count
        for turn, expected in enumerate(turns):
            assert pairs(hosts, turn) == tuple((hosts[first], hosts[second]) for first, second in expected), count


@given(st.integers(2, 60))
def test_every_host_meets_both_neighbors_once(count: int) -> None:
    hosts = hosts_of(count)
    met: dict[str, list[str]] = {host: [] for host in hosts}
    for turn in range(num_turns(count)):
        some = pairs(hosts, turn)
        both = partners(some)
        assert len(both) == 2 * len(some)  # no host twice in a turn
        assert all(both[both[host]] == host for host in both)
        for host, partner in both.items():
            met[host].append(partner)
    for number, host in enumerate(hosts):
        neighbors = {hosts[number - 1], hosts[(number + 1) % count]}
        assert sorted(met[host]) == sorted(neighbors)


def test_turn_or_host_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="turn 2 of 2"):
        pairs(hosts_of(4), 2)
    with pytest.raises(ValueError, match="turn 0 of 0"):
        pairs(["a"], 0)
    with pytest.raises(ValueError, match="named twice"):
        pairs(["a", "b", "a"], 0)


def test_healthy_pairs_blame_no_host() -> None:
    schedule = schedule_of(6)
    assert judge_pairs(schedule, results_of(schedule), 1.5) == PairFindings()
    assert judge_pairs([], [], 1.5) == PairFindings()


@given(st.integers(4, 12), st.data(), st.booleans())
def test_faulty_host_is_named(count: int, data: st.DataObject, is_broken: bool) -> None:
    host = data.draw(st.sampled_from(hosts_of(count)))
    schedule = schedule_of(count)
    results = results_of(schedule, **({"broken": {host}} if is_broken else {"slow": {host}}))
    verdict = judge_pairs(schedule, results, 1.5)
    assert set(verdict.culprits) == {host}
    assert not verdict.suspects
    assert not verdict.bad_links
    assert ("timed out" if is_broken else "50.0 ms, but 10.0 ms in other pairs") in verdict.culprits[host]


@settings(max_examples=50)
@given(st.integers(3, 16), st.data())
def test_healthy_host_is_never_named(count: int, data: st.DataObject) -> None:
    hosts = hosts_of(count)
    broken = data.draw(st.sets(st.sampled_from(hosts)))
    schedule = schedule_of(count)
    verdict = judge_pairs(schedule, results_of(schedule, broken=broken), 1.5)
    assert set(verdict.culprits) <= broken
    # Every failed pair contains a named host.
    named = set(verdict.culprits) | set(verdict.suspects)
    assert all(set(pair) & named for pair in schedule if set(pair) & broken)


def test_host_between_two_culprits_is_not_named() -> None:
    schedule = schedule_of(6)
    verdict = judge_pairs(schedule, results_of(schedule, broken={"host-1", "host-3"}), 1.5)
    assert list(verdict.culprits) == ["host-1", "host-3"]
    assert not verdict.suspects  # host-2 was paired with no other host: its bad pairs are explained.


def test_two_hosts_alone_prove_nothing() -> None:
    schedule = schedule_of(2)
    verdict = judge_pairs(schedule, results_of(schedule, broken={"host-1"}), 1.5)
    assert not verdict.culprits
    assert set(verdict.suspects) == {"host-0", "host-1"}


def test_bad_link_names_no_host() -> None:
    schedule = schedule_of(6)
    verdict = judge_pairs(schedule, results_of(schedule, links={("host-1", "host-2")}), 1.5)
    assert verdict == PairFindings(bad_links=(("host-1", "host-2"),))


def test_all_bad_pairs_name_no_culprit() -> None:
    schedule = schedule_of(4)
    verdict = judge_pairs(schedule, results_of(schedule, broken=set(hosts_of(4))), 1.5)
    assert not verdict.culprits
    assert len(verdict.suspects) == 4


def test_host_that_does_not_answer_is_at_fault() -> None:
    schedule = schedule_of(4)
    results = [result for result in results_of(schedule) if result.host != "host-2"]
    verdict = judge_pairs(schedule, results, 1.5)
    assert list(verdict.culprits) == ["host-2"]
    assert "host-2 did not answer" in verdict.culprits["host-2"]


def test_host_that_computes_slowly_is_named() -> None:
    """Its partners wait for it and measure the same all-reduce; only its own part identifies it."""
    schedule = schedule_of(2)
    results = results_of(schedule)
    slow = [replace(result, compute_s=0.05) if result.host == "host-1" else result for result in results]
    culprits = judge_pairs(schedule, slow, 1.5).culprits
    assert list(culprits) == ["host-1"]
    assert "50.0 ms, but 20.0 ms on other hosts" in culprits["host-1"]
    assert not judge_pairs(schedule, slow, 3.0).culprits
    assert not judge_pairs(schedule, slow, 1.5, {"host-0": "H100", "host-1": "A100"}).culprits
    # slow in one turn only: another program ran
    schedule = schedule_of(4)
    once = [
        replace(result, compute_s=0.05) if (result.host, result.partner) == ("host-1", "host-2") else result
        for result in results_of(schedule)
    ]
    assert not judge_pairs(schedule, once, 1.5).culprits


def test_differences_below_the_noise_are_no_slowness() -> None:
    schedule = schedule_of(4)
    results = [
        replace(result, reduce_s=0.0025 if "host-1" in (result.host, result.partner) else 0.001)
        for result in results_of(schedule)
    ]
    assert not judge_pairs(schedule, results, 1.5).culprits


# one side and its report


def record(host: str, port: int = 29500, num_workers: int = 1) -> HostRecord:
    return HostRecord(host, f"s-{host}", 1, "127.0.0.1", port, 0, num_workers, "", "", "", 0.0, True)


def test_tasks_of_both_partners_agree() -> None:
    first, second = record("host-1", 1111, 8), record("host-2", 2222, 4)
    one = pair_task(first, second, 7, device="cpu", network_interface="lo", timeout_s=DEADLINE_S)
    other = pair_task(second, first, 7, device="cpu", network_interface="lo", timeout_s=DEADLINE_S)
    assert (one.side, other.side) == (0, 1)
    assert (one.partner, other.partner) == ("host-2", "host-1")
    assert replace(one, partner="", side=0) == replace(other, partner="", side=0)
    assert (one.store_port, one.prefix, one.num_workers) == (1111, "pairs/7/host-1", 4)
    assert pair_task(first, second, 8, device="cpu", network_interface="", timeout_s=DEADLINE_S).prefix != one.prefix


HALF_GOOD = """{"part": "pair", "number": 0, "compute_s": 0.5, "wait_s": 0.1, "reduce_s": 0.2}
{"part": "pair", "number": 1, "error": "wrong sum"}"""


def ended_probe(name, arguments, *, environment, deadline_s, output: str, exit_code: int | None) -> ProbeEnd:
    assert name == "pair_probe"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"
    return ProbeEnd(exit_code, output, "", deadline_s)


def test_a_pair_that_failed_makes_no_host_unfit() -> None:
    for output, exit_code, reason in [
        ('{"part": "pair", "number": 0, "error": "RuntimeError: refused"}', 0, "RuntimeError: refused"),
        ('{"part": "pair", "error": "torch sees no CUDA device"}', 1, "no CUDA device"),
        ("", None, "its probe did not end within 120 s"),
        ("", -9, "SIGKILL"),
        ("", 0, "no measurement"),
        (
            HALF_GOOD,
            0,
            "wrong sum",
        ),
    ]:
        task = pair_task(record("a"), record("b"), 1, device="cpu", network_interface="eth7", timeout_s=60.0)
        result = run_pair(task, {}, partial(ended_probe, output=output, exit_code=exit_code))
        assert result.outcome is CheckOutcome.WARNING, reason
        assert reason in result.detail, reason
        report = decode(CheckReport, encode(CheckReport("a", "s", 1.0, (result,))), "report")
        assert report.is_fit, reason
        (found,) = pair_results(report)
        assert (found.host, found.partner, found.reduce_s) == ("a", "b", None), reason
        assert reason in found.reason, reason


@pytest.mark.slow
def test_two_real_probes_measure_their_all_reduce() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = record("host-1", store.port), record("host-2", 1)
    tasks = [
        pair_task(own, partner, 3, device="cpu", network_interface="lo", timeout_s=DEADLINE_S)
        for own, partner in ((first, second), (second, first))
    ]
    results = {}

    def run(host: str, task: PairTask) -> None:
        results[host] = run_pair(task, dict(os.environ))

    threads = [threading.Thread(target=run, args=one) for one in zip(("host-1", "host-2"), tasks, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[host].outcome for host in ("host-1", "host-2")] == ["passed", "passed"], results
    found = [side for host in results for side in pair_results(CheckReport(host, "s", 0.0, (results[host],)))]
    assert all(side.compute_s and side.wait_s and side.reduce_s for side in found)
    assert not judge_pairs([("host-1", "host-2")], found, 100.0).culprits
