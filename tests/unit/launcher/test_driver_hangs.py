"""The rank that causes a hang, from the evidence of the hosts, and the driver's end of the round because of it."""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.records.host_records import HangEvidence, RankEvidence, RankPosition
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import HostCommand, Round, RoundHost
from megatrain_launcher.driver.hangs import find_culprit
from tests.helpers.driver_story import DriverStory, begin
from tests.helpers.simulated_etcd import KEYS

ROUND = Round(
    3, 4, (RoundHost("a", "a-1", "a", 0, 2), RoundHost("b", "b-1", "b", 2, 2)), "a", 1, "", "", 0.0
)  # fmt: skip
GROUP = {"dp:0+4x1": (0, 4, 1)}


def rank(number: int, entered: int, left: int, state: str = "S") -> RankEvidence:
    return RankEvidence(number, {"dp:0+4x1": RankPosition(entered, left)}, state, 7, "step", 0.0, "dp-all-reduce")


def evidence(host: str, *ranks: RankEvidence, silent: tuple[int, ...] = ()) -> HangEvidence:
    return HangEvidence(host, f"{host}-1", 3, 0.0, GROUP, ranks, silent)


WAITING = evidence("a", rank(0, 5, 4), rank(1, 5, 4))


def test_rank_that_never_entered_a_collective_is_named() -> None:
    found = find_culprit(ROUND, {"a": WAITING, "b": evidence("b", rank(2, 5, 4), rank(3, 4, 4))}, ("a complains",))
    assert (found.ranks, found.hosts, found.confidence, found.is_firm) == ((3,), ("b",), "certain", True)
    assert "rank 3 never entered collective 5" in found.sentences[0]
    assert "a complains" in found.sentences


def test_stopped_process_is_the_only_culprit() -> None:
    for entered, waiting in [(4, "0-1"), (5, "0-1, 3")]:  # rank 3 is late too, or waits
        found = find_culprit(ROUND, {"a": WAITING, "b": evidence("b", rank(2, entered, 4, "T"), rank(3, entered, 4))})
        assert (found.ranks, found.hosts, found.confidence) == ((2,), ("b",), "certain")
        assert found.sentences[:2] == (
            f"rank 2 is stopped (T); ranks {waiting} wait for it in collective 5 of dp:0+4x1",
            "rank 2 is at step 7 in dp-all-reduce",
        )
        assert not any("network" in sentence or "GPU" in sentence for sentence in found.sentences)


def test_a_silent_host_is_likely_and_named() -> None:
    found = find_culprit(ROUND, {"a": WAITING})
    assert (found.ranks, found.hosts, found.confidence) == ((2, 3), ("b",), "likely")
    assert "b sent no evidence" in found.sentences


def test_evidence_of_a_host_takes_few_bytes() -> None:
    hosts = 1250
    parts = tuple(RoundHost(f"h{n}", "s", "a", 8 * n, 8) for n in range(hosts))
    round_ = Round(3, 8 * hosts, parts, "a", 1, "", "", 0.0)
    reported = {}
    for number in range(hosts - 1):
        ranks, groups = [], {}
        for rank in range(8 * number, 8 * number + 8):
            name = f"dp:{rank % 8}+{hosts}x8"
            groups[name] = (rank % 8, hosts, 8)
            ranks.append(RankEvidence(rank, {name: RankPosition(5, 4)}, "S", 7, "step", 0.0, "dp-all-reduce"))
        reported[f"h{number}"] = HangEvidence(f"h{number}", "s", 3, 0.0, groups, tuple(ranks))
    assert max(len(encode(reported[host])) for host in ("h0", f"h{hosts - 2}")) < 4096
    found = find_culprit(round_, reported)
    assert (found.hosts, len(found.ranks), found.confidence) == ((f"h{hosts - 1}",), 8, "likely")


def test_impossible_groups_belong_to_no_rank() -> None:
    groups = {"a": (0, 2**62, 1), "b": (0, 0, 1), "c": (0, 4, 0), "d": (1, 2), "e": (-1, 4, -1), "dp": (3, 4, -1)}
    strange = HangEvidence("b", "b-1", 3, 0.0, groups, (rank(2, 5, 4), rank(3, 4, 4)))
    assert find_culprit(ROUND, {"a": WAITING, "b": strange}).ranks == (3,)


def test_hang_without_evidence_names_no_culprit() -> None:
    found = find_culprit(ROUND, {})
    assert (found.hosts, found.is_firm) == ((), False)
    busy = find_culprit(
        ROUND, {"a": evidence("a", rank(0, 4, 4), rank(1, 4, 4)), "b": evidence("b", rank(2, 4, 4), rank(3, 4, 4))}
    )
    assert (busy.hosts, busy.confidence) == ((), "insufficient")


def test_ranks_outside_the_round_are_ignored() -> None:
    strange = HangEvidence("b", "b-1", 3, 0.0, {"g": (0, 99)}, (rank(99, 0, 0, "T"), rank(2, 5, 4)), (77, 3))
    found = find_culprit(ROUND, {"a": WAITING, "b": strange})
    assert set(found.ranks) <= {0, 1, 2, 3}


def test_rank_with_a_pending_exchange_does_not_wait() -> None:
    # Rank 3 started collective 5 and then hung in something else; the others wait for its end.
    waiting = [replace(rank(number, 5, 4), awaited_group="dp:0+4x1", awaited=5) for number in range(3)]
    other = replace(rank(3, 5, 4), awaited_group="pp:3+2x1", awaited=2, in_flight="forward-compute")
    reported = {"a": evidence("a", *waiting[:2]), "b": evidence("b", waiting[2], other)}
    found = find_culprit(ROUND, reported)
    assert (found.ranks, found.hosts, found.confidence, found.is_firm) == ((3,), ("b",), "likely", True)
    assert "went on to something else" in found.sentences[0]
    all_wait = find_culprit(ROUND, {"a": WAITING, "b": evidence("b", rank(2, 5, 4), rank(3, 5, 4))})
    assert all_wait.ranks == ()


def test_rank_that_waits_for_storage_does_not_hang() -> None:
    at_storage = replace(rank(3, 4, 4), phase="checkpoint", is_at_storage=True)
    found = find_culprit(ROUND, {"a": WAITING, "b": evidence("b", rank(2, 5, 4), at_storage)})
    assert (found.ranks, found.waits_for_storage) == ((3,), "rank 3 waits for storage")
    immobile = replace(at_storage, process_state="T")
    stopped = find_culprit(ROUND, {"a": WAITING, "b": evidence("b", rank(2, 5, 4), immobile)})
    assert stopped.waits_for_storage == ""
    for_data = replace(at_storage, phase="step", in_flight="data-wait")
    found = find_culprit(ROUND, {"a": WAITING, "b": evidence("b", rank(2, 5, 4), for_data)})
    assert found.waits_for_storage == "rank 3 waits for its data"
    two = find_culprit(ROUND, {"a": WAITING, "b": evidence("b", rank(2, 4, 4), at_storage)})
    assert (two.ranks, two.waits_for_storage) == ((2, 3), ""), "one of them does hang"


def test_the_only_rank_is_the_culprit() -> None:
    alone = Round(1, 1, (RoundHost("a", "a-1", "a", 0, 1),), "a", 1, "", "", 0.0)
    found = find_culprit(alone, {"a": HangEvidence("a", "a-1", 1, 0.0, {}, (rank(0, 0, 0),))})
    assert (found.ranks, found.hosts, found.is_firm) == ((0,), ("a",), True)
    assert found.sentences[:2] == ("the only rank makes no progress", "rank 0 is at step 7 in dp-all-reduce")


def write_evidence(job: DriverStory, name: str, *entered: int, is_at_storage: bool = False) -> None:
    """Write the positions of a host's ranks; `is_at_storage`: the ranks that are behind wait for storage."""
    host = job.hosts[name]
    part = job.rounds()[host.running].part_of(name, host.session)
    ranks = tuple(
        RankEvidence(
            part.first_rank + local,
            {"dp": RankPosition(value, 4)},
            "S",
            7,
            "step",
            job.now,
            is_at_storage=is_at_storage and value == 4,
        )
        for local, value in enumerate(entered)
    )
    found = HangEvidence(name, host.session, host.running, job.now, {"dp": (0, 4, 1)}, ranks)
    job.etcd.put(KEYS.evidence(host.running, name), encode(found))


def test_repeated_hang_evicts_the_culprit() -> None:
    job = begin()
    first = job.members(1)
    job.stall(*first)
    job.go_on(0.4)
    assert KEYS.halt(1) not in job.etcd.items
    (command,) = job.records_of(HostCommand, "commands")
    assert (command.kind, set(command.hosts)) == ("evidence", set(first))
    write_evidence(job, first[0], 5, 5)
    write_evidence(job, first[1], 5, 4)
    job.go_on_until(job.goes_on(2), 1.0)
    (incident,) = job.incidents()
    assert (incident.kind, incident.culprit_ranks, incident.culprit_hosts) == ("hang", (3,), (first[1],))
    assert incident.confidence == "certain"
    assert job.members(2) == first
    job.stall(*first)
    write_evidence(job, first[0], 5, 5)
    write_evidence(job, first[1], 5, 4)
    job.go_on_until(job.goes_on(3), 2.0)
    assert first[1] not in job.members(3)
    assert KEYS.cordon(first[1]) in job.etcd.items


def test_host_that_waits_for_storage_is_asked_again() -> None:
    job = begin()
    first = job.members(1)
    job.stall(*first)
    job.go_on(0.4)
    write_evidence(job, first[0], 5, 5)
    write_evidence(job, first[1], 5, 4, is_at_storage=True)
    job.go_on(12.0)
    assert KEYS.halt(1) not in job.etcd.items
    commands = job.records_of(HostCommand, "commands")
    assert {command.kind for command in commands} == {"evidence"}
    assert len(commands) in (2, 3), "every five seconds"
    write_evidence(job, first[0], 5, 5)
    write_evidence(job, first[1], 5, 4)
    job.go_on_until(lambda: KEYS.halt(1) in job.etcd.items, 1.0)
    assert job.incidents()[0].culprit_ranks == (3,)


def test_hang_whose_suspect_is_unreachable_waits_for_the_lease() -> None:
    job = begin()
    first = job.members(1)
    job.hosts[first[1]].is_connected = False
    job.stall(first[0])
    write_evidence(job, first[0], 5, 5)
    job.go_on(9.0)
    assert KEYS.halt(1) not in job.etcd.items
    job.hosts[first[1]].lose_lease()
    # The silence limit passed long ago; the reaction time has not passed.
    assert job.go_on_until(job.goes_on(2), 3.0) > 1.5
    assert job.incidents()[0].kind is IncidentKind.HOST_LOST
