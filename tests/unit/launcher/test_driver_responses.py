"""The table of responses: the consequence of a failure, by exit code, label, history and limits."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments
from megatrain_job.failures.verdict import LABELS, Label
from megatrain_launcher.driver.evictions import EvictionCause, EvictionReason
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.response import Facts
from megatrain_launcher.driver.responses import respond

NOW = 10_000.0
POLICY = Policy(min_hosts=2, max_hosts=2, num_workers=2, feasible_counts={2: 1})
HOST_OF = {0: "a", 1: "a", 2: "b", 3: "b"}


def failure(rank: int = 2, code: int = 1, label: str = "", **more: object) -> RankFailure:
    action = LABELS[Label(label)].action if label else ""
    return replace(RankFailure(rank, code, NOW - 1, label, action, line="the line"), **more)


def facts(*failures: RankFailure, kind: IncidentKind = IncidentKind.FAILURE, step: int | None = 24) -> Facts:
    return Facts(kind, 3, failures, HOST_OF, {}, (), last_step=step)


def past(
    age_s: float, label: str = "", *, hosts: tuple[str, ...] = ("b",), step: int | None = 24,
    kind: IncidentKind = IncidentKind.FAILURE, action: str = "restart",
) -> Incident:  # fmt: skip
    began = NOW - age_s
    return Incident(
        f"i-{10**6 - age_s:09.1f}", kind, IncidentState.RECOVERED, 1, Moments(began, began), "", action, hosts,
        label=label, last_step=step,
    )  # fmt: skip


def test_first_failure_has_the_response_of_its_code_and_label() -> None:
    for code, label, action, is_cordoned, needs_health_check in [
        (-9, "", "restart", False, False),
        (1, "user_code", "restart", False, False),
        (1, "cuda_oom", "restart", False, False),
        (1, "gpu_hardware", "evict", True, False),
        (1, "network", "restart", False, False),
        (-11, "segfault", "restart", False, True),
        (1, "cuda_illegal_access", "restart", False, True),
        (1, "preemption", "requeue", False, False),
        (71, "storage", "restart", False, False),
        (74, "", "restart", False, False),
        (67, "", "rollback", False, False),
        (78, "", "stop", False, False),
        (65, "gpu_hardware", "stop", False, False),
        (66, "", "stop", False, False),
        (77, "", "stop", False, False),
    ]:
        found = respond(facts(failure(code=code, label=label)), (), POLICY, NOW)
        reported = (found.action, bool(found.cordoned), bool(found.checked))
        assert reported == (action, is_cordoned, needs_health_check), (code, label)
        assert found.culprit_hosts == ("b",), (code, label)
        assert found.culprit_ranks == (2,), (code, label)
        assert "rank 2 on b" in found.reason, (code, label)
        assert "the line" in found.reason, (code, label)
        if action == "stop":
            assert found.exit_code == code, (code, label)


def test_repeated_failure_at_the_same_step_stops_the_job() -> None:
    for label in ["user_code", "data", "cuda_oom", "host_oom", "driver_software", "storage", "numerics"]:
        again = respond(facts(failure(label=label)), (past(60, label),), POLICY, NOW)
        assert (again.action, again.exit_code) == ("stop", 1), label
        assert "a restart did not help" in again.reason, label
        assert respond(facts(failure(label=label), step=25), (past(60, label),), POLICY, NOW).action == "restart", label
        assert respond(facts(failure(label=label)), (past(60, "network"),), POLICY, NOW).action == "restart", label


def test_exit_code_overrides_the_label_of_the_log() -> None:
    found = respond(facts(failure(code=67, label="user_code")), (past(60, "numerics"),), POLICY, NOW)
    assert (found.label, found.action, found.exit_code) == ("numerics", "stop", 67)


def test_network_is_tolerated_then_evicted() -> None:
    flap = facts(failure(label="network"))
    assert respond(flap, (past(400, "network"),), POLICY, NOW).action == "restart"
    assert respond(flap, (past(200, "network", hosts=("a",)),), POLICY, NOW).action == "restart"
    found = respond(flap, (past(200, "network"),), POLICY, NOW)
    assert (found.action, found.culprit_hosts, found.cordoned) == ("evict", ("b",), ("b",))
    assert "2nd time within 300 s" in found.reason
    # the storage of the data, which this host does not reach, whatever the log shows
    found = respond(facts(failure(code=71, label="storage")), (past(200, "network"),), POLICY, NOW)
    assert (found.action, found.label, found.culprit_hosts) == ("evict", "network", ("b",))


def test_hangs_of_one_host_evict_it() -> None:
    hang = replace(facts(kind=IncidentKind.HANG), suspects=("b",), suspect_ranks=(3,))
    first = respond(hang, (), POLICY, NOW)
    assert (first.action, first.culprit_hosts, first.culprit_ranks) == ("restart", ("b",), (3,))
    found = respond(hang, (past(60, "hang", kind=IncidentKind.HANG),), POLICY, NOW)
    assert (found.action, found.cordoned) == ("evict", ("b",))
    assert respond(hang, (past(4000, "hang", kind=IncidentKind.HANG),), POLICY, NOW).action == "restart"
    assert respond(replace(hang, suspects=()), (), POLICY, NOW).culprit_hosts == ()


def test_only_the_host_that_hangs_again_is_evicted() -> None:
    hang = replace(facts(kind=IncidentKind.HANG), suspects=("a", "b"), suspect_ranks=(1, 3))
    found = respond(hang, (past(60, "hang", kind=IncidentKind.HANG),), POLICY, NOW)
    assert (found.action, found.culprit_hosts, found.cordoned) == ("evict", ("a", "b"), ("b",))


def test_hang_evicts_the_culprit_whose_log_shows_broken_hardware() -> None:
    hang = replace(facts(kind=IncidentKind.HANG), suspects=("a", "b"), suspect_ranks=(1, 3))
    broken = failure(label="gpu_hardware")
    before = (past(60, "hang", hosts=("a",), kind=IncidentKind.HANG),)
    for name, one, history, cordoned, ending in [
        ("of a culprit", broken, (), ("b",), ": b is broken"),
        ("of a victim", replace(broken, is_cascade=True), (), (), "held up all others"),
        ("of no host of the round", replace(broken, rank=9), (), (), "held up all others"),
        ("of the program", failure(label="user_code"), (), (), "held up all others"),
        ("beside one that hangs often", broken, before, ("b", "a"), ": b is broken; a for the 2nd time within an hour"),
    ]:
        found = respond(replace(hang, failures=(one,)), history, POLICY, NOW)
        assert (found.action, found.cordoned) == ("evict" if cordoned else "restart", cordoned), name
        assert found.reason.endswith(ending), name


THRICE = [past(600, hosts=("b",), step=1), past(300, kind=IncidentKind.HOST_LOST, hosts=("b",), step=2, action="evict")]


def test_host_with_three_failures_an_hour_is_evicted() -> None:
    fit = frozenset({"a", "b", "c"})
    killed = replace(facts(failure(code=-9)), fit=fit)
    found = respond(killed, THRICE, POLICY, NOW)
    assert (found.action, found.cordoned, found.kind) == ("evict", ("b",), IncidentKind.FAILURE)
    assert found.reason.endswith("b for the 3rd time within an hour")
    gone = replace(facts(failure(0, 69)), lost={"b": "b refuses connections"}, fit=fit - {"b"})
    found = respond(gone, THRICE, POLICY, NOW)
    assert (found.action, found.cordoned, found.kind) == ("evict", ("b",), IncidentKind.HOST_LOST)
    assert respond(killed, THRICE[1:], POLICY, NOW).cordoned == ()
    assert respond(killed, THRICE, replace(POLICY, host_failures_per_hour=4), NOW).cordoned == ()
    old = [replace(one, moments=replace(one.moments, detected=NOW - 4000)) for one in THRICE]
    assert respond(killed, old, POLICY, NOW).cordoned == ()


EVICTIONS: dict[EvictionReason, tuple[Facts, Sequence[Incident]]] = {
    EvictionReason.HOST_LOST: (replace(facts(), lost={"b": "b refuses connections"}), ()),
    EvictionReason.BROKEN_HOST: (facts(failure(label="gpu_hardware")), ()),
    EvictionReason.BROKEN_IN_A_HANG: (
        replace(facts(failure(label="gpu_hardware"), kind=IncidentKind.HANG), suspects=("b",), suspect_ranks=(3,)), (),
    ),
    EvictionReason.NETWORK_FAILURES: (facts(failure(label="network")), [past(200, "network")]),
    EvictionReason.HANGS: (
        replace(facts(kind=IncidentKind.HANG), suspects=("b",)), [past(60, "hang", kind=IncidentKind.HANG)],
    ),
    EvictionReason.FAILURES: (replace(facts(failure(code=-9)), fit=frozenset({"a", "b", "c"})), THRICE),
}  # fmt: skip


def test_an_eviction_has_the_sentence_and_cordon_of_its_row() -> None:
    for reason, (facts_, history) in EVICTIONS.items():
        found = respond(facts_, history, POLICY, NOW)
        assert re.fullmatch(re.sub(r"\\{.+?\\}", ".+", re.escape(reason.sentence)), found.reason), reason
        assert (found.action, bool(found.cordoned)) == ("evict", reason.is_cordoned), reason
    of_driver = {one for one in EvictionReason if one.cause is EvictionCause.DRIVER}
    assert of_driver - EVICTIONS.keys() == {EvictionReason.PAIR_TESTS}


def test_sentence_agrees_with_the_number_of_its_hosts() -> None:
    for lost, who in [({"b": "no lease"}, "b is gone: no lease"), ({"a": "x", "b": "y"}, "a and b are gone: x; y")]:
        assert respond(replace(facts(), lost=lost), (), POLICY, NOW).reason == who
    for ranks, who in [((3,), "b is broken"), ((1, 3), "a and b are broken")]:
        broken = [failure(rank, label="gpu_hardware") for rank in ranks]
        hosts = tuple(HOST_OF[rank] for rank in ranks)
        hang = replace(facts(*broken, kind=IncidentKind.HANG), suspects=hosts, suspect_ranks=ranks)
        assert respond(hang, (), POLICY, NOW).reason.endswith(f": {who}")


def test_needed_host_is_kept_despite_frequent_failures() -> None:
    killed = replace(facts(failure(code=-9)), fit=frozenset({"a", "b"}))
    found = respond(killed, THRICE, POLICY, NOW)
    assert (found.action, found.cordoned) == ("restart", ())
    assert "b for the 3rd time within an hour, and the job cannot continue without it" in found.reason
    elastic = replace(POLICY, min_hosts=1, feasible_counts={1: 2, 2: 1})
    assert respond(killed, THRICE, elastic, NOW).cordoned == ("b",)


def test_failures_that_do_not_count_against_a_host() -> None:
    killed = replace(facts(failure(code=-9)), fit=frozenset({"a", "b", "c"}))
    histories = {
        "code, on any host": [past(600, "user_code", step=1), past(300, "data", step=2)],
        "labels of another program": [past(600, "unknown", step=1), past(300, "of_a_later_version", step=2)],
        "held and requested": [
            past(600, kind=IncidentKind.CONTROL_PLANE, action="hold"), past(300, kind=IncidentKind.REQUEST),
        ],
        "hangs, with their own limit": [past(age, kind=IncidentKind.HANG, step=age) for age in (600, 300)],
        "many at once": [
            past(age, kind=IncidentKind.HOST_LOST, hosts=("a", "b"), step=1, action="evict") for age in (600, 300)
        ],
        "other hosts": [past(600, hosts=("a",), step=1), past(300, hosts=("c",), step=2)],
    }  # fmt: skip
    for name, history in histories.items():
        assert respond(killed, history, POLICY, NOW).cordoned == (), name


def test_rank_that_fails_on_several_hosts_evicts_none() -> None:
    history = [replace(one, culprit_ranks=(2,)) for one in THRICE]
    elsewhere = replace(past(2000, hosts=("old",), step=0), culprit_ranks=(2,))
    killed = replace(facts(failure(code=-11)), fit=frozenset({"a", "b", "c"}))
    assert respond(killed, history, POLICY, NOW).cordoned == ("b",)
    assert respond(killed, [elsewhere, *history], POLICY, NOW).cordoned == ()


def test_limits_go_by_the_drivers_clock() -> None:
    policy = replace(POLICY, restarts_per_hour=1)
    slow = past(60, step=1)
    slow = replace(slow, moments=replace(slow.moments, began=NOW - 7200))  # as its host reported
    assert respond(facts(failure(code=-9)), [slow], policy, NOW).action == "stop"
    flap = replace(past(200, "network"), moments=replace(past(200).moments, began=NOW - 7200))
    assert respond(facts(failure(label="network")), [flap], POLICY, NOW).cordoned == ("b",)


def test_the_root_is_the_earliest_that_follows_from_no_other() -> None:
    victims = [failure(0, 69, at_unix_s=NOW - 9), failure(1, 1, "network", is_cascade=True, at_unix_s=NOW - 8)]
    roots = [failure(3, -9, at_unix_s=NOW - 2), failure(2, 1, "data", at_unix_s=NOW - 3)]
    found = respond(facts(*victims, *roots), (), POLICY, NOW)
    assert (found.label, found.culprit_ranks) == ("data", (2,))


def test_victims_alone_name_the_lost_host() -> None:
    victims = (failure(0, 69), failure(1, 69))
    gone = replace(facts(*victims), lost={"b": "b refuses connections"})
    found = respond(gone, (), POLICY, NOW)
    assert (found.action, found.kind, found.culprit_hosts, found.cordoned) == (
        "evict", IncidentKind.HOST_LOST, ("b",), (),
    )  # fmt: skip
    unlabeled = respond(replace(gone, failures=(failure(0, -6),)), (), POLICY, NOW)
    assert unlabeled.kind is IncidentKind.HOST_LOST
    assert respond(replace(gone, failures=(failure(0, 1, "data"),)), (), POLICY, NOW).label == "data"
    found = respond(replace(facts(*victims), suspects=("b",)), (), POLICY, NOW)
    assert (found.action, found.label, found.culprit_hosts) == ("restart", "network", ("b",))
    assert respond(facts(*victims), (), POLICY, NOW).action == "restart"
    assert respond(facts(), (), POLICY, NOW).action == "restart"


def test_restarts_without_progress_reach_the_restart_limit() -> None:
    history = [past(50 - age, step=24) for age in range(3)]
    found = respond(facts(failure(code=-9)), history, POLICY, NOW)
    assert found.action == "stop"
    assert "3 restarts in a row" in found.reason
    assert all(one.incident_id in found.reason for one in history)
    assert respond(facts(failure(code=-9)), history[1:], POLICY, NOW).action == "restart"
    assert respond(facts(failure(code=-9), step=25), history, POLICY, NOW).action == "restart"
    assert respond(facts(failure(code=-9), step=None), [past(9, step=None)] * 3, POLICY, NOW).action == "stop"
    moved = [past(50, step=10), past(49, step=20), past(48, step=30)]
    assert respond(facts(failure(code=-9), step=30), moved, POLICY, NOW).action == "restart"


def test_requests_do_not_count_for_the_restart_limit() -> None:
    policy = replace(POLICY, restarts_per_hour=3)
    history = [past(100 - age, step=age) for age in range(3)]
    assert respond(facts(failure(code=-9)), history, policy, NOW).action == "stop"
    asked = [past(50, kind=IncidentKind.REQUEST), past(49, kind=IncidentKind.CONTROL_PLANE, action="hold")]
    assert respond(facts(failure(code=-9)), [*history[1:], *asked], policy, NOW).action == "restart"
    assert respond(facts(failure(code=-9)), [past(3700, step=1), *history[1:]], policy, NOW).action == "restart"


def test_every_label_and_exit_code_has_a_response() -> None:
    codes = (-64, -signal.SIGSEGV, -signal.SIGKILL, *range(3), *ExitCode, 200, 255)
    for label in ["", "no such label", *Label]:
        for code in codes if label else range(-64, 256):
            ended = RankFailure(7, code, NOW, label, "", is_cascade=False)
            action = respond(facts(ended), (past(5, label),), POLICY, NOW).action
            assert action in ("restart", "evict", "rollback", "stop", "requeue"), (code, label)
