"""The culprit of a broken round, the relation of other failures to it, and where the failure began in the logs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megatrain.contracts.records.incident import Incident, IncidentKind, Moments
from megatrain_job.failures.bundle import classify_bundle
from megatrain_job.failures.culprit import (
    NO_CULPRIT,
    Culprit,
    FailureRole,
    culprit_of_incident,
    failures_by_role,
    first_of,
    is_victim,
    recorded_culprit,
    root_of,
)
from tests.helpers.launched_job import make_failure, make_incident

HOSTS = {rank: f"host-{rank // 2}" for rank in range(4)}
LOST = {"label": "network", "line": "Connection closed by peer"}
CASCADE = {**LOST, "is_cascade": True}


def broken(kind: IncidentKind = IncidentKind.FAILURE, **changes: object) -> Incident:
    """Return a judged incident of round 2."""
    moments = Moments(10.0, 10.1, 10.1, halted=10.5)
    return replace(make_incident(kind=kind, round=2, moments=moments, culprit_hosts=(), culprit_ranks=()), **changes)  # type: ignore[arg-type]


def roles(incident: Incident) -> list[tuple[int, FailureRole]]:
    return [(one.rank, role) for role, one in failures_by_role(incident, HOSTS)]


@pytest.mark.parametrize(
    ("incident", "wanted"),
    [
        # Killed: the others lost it, and one of them shows it only by its exit code.
        (
            broken(
                culprit_ranks=(2,),
                culprit_hosts=("host-1",),
                failures=(
                    make_failure(0, 69, at_unix_s=1.0, **CASCADE),
                    make_failure(2, -9, at_unix_s=2.0),
                    make_failure(3, 69, at_unix_s=3.0, label="user_code"),
                ),
            ),
            [(2, FailureRole.ROOT), (0, FailureRole.FOLLOWS), (3, FailureRole.FOLLOWS)],
        ),
        # Two failed by themselves: one is the culprit, the other one did not follow from it.
        (
            broken(
                culprit_ranks=(1,),
                culprit_hosts=("host-0",),
                failures=(
                    make_failure(1, 1, at_unix_s=1.0, label="data"),
                    make_failure(3, 1, at_unix_s=1.5, label="storage"),
                    make_failure(2, 1, at_unix_s=1.6, **LOST),
                ),
            ),
            [(1, FailureRole.ROOT), (3, FailureRole.CAUSE), (2, FailureRole.FOLLOWS)],
        ),
        # Stopped: a rank that gave up waiting for it is not a cause, whatever its log indicates.
        (
            broken(
                IncidentKind.HANG,
                culprit_ranks=(3,),
                culprit_hosts=("host-1",),
                failures=(
                    make_failure(0, 1, at_unix_s=1.0, label="collective_timeout"),
                    make_failure(1, -6, at_unix_s=1.0, label=""),
                ),
            ),
            [(0, FailureRole.FOLLOWS), (1, FailureRole.FOLLOWS)],
        ),
        # A host is gone: no rank is named, and its ranks belong to the culprit.
        (
            broken(
                IncidentKind.HOST_LOST,
                culprit_hosts=("host-1",),
                failures=(make_failure(0, 1, at_unix_s=1.0, **LOST), make_failure(2, -9, at_unix_s=1.1)),
            ),
            [(2, FailureRole.ROOT), (0, FailureRole.FOLLOWS)],
        ),
        # No rank is the culprit: the victims identify themselves.
        (
            broken(failures=(make_failure(0, 69, **CASCADE), make_failure(1, 1, **LOST))),
            [(1, FailureRole.CAUSE), (0, FailureRole.FOLLOWS)],
        ),
    ],
)
def test_role_of_each_failure_in_the_incident(incident: Incident, wanted: list[tuple[int, FailureRole]]) -> None:
    assert roles(incident) == wanted


def test_the_newest_incident_that_broke_the_round_is_the_answer() -> None:
    older = broken(incident_id="20260101-1", culprit_ranks=(1,))
    newer = broken(IncidentKind.HANG, incident_id="20260101-2", culprit_ranks=(3,), confidence="certain")
    asked = broken(IncidentKind.REQUEST, incident_id="20260101-3", culprit_hosts=("host-0",))
    found = recorded_culprit([newer, older, asked], 2)
    assert found is not None
    assert (found.ranks, found.incident, found.confidence) == ((3,), "20260101-2", "certain")
    assert recorded_culprit([asked], 2) is None, "it was requested, not a failure"
    assert recorded_culprit([older], 3) is None


def test_open_incident_blames_the_rank_that_is_no_victim() -> None:
    open_ = broken(moments=Moments(1.0, 1.1), failures=(make_failure(0, 69, **CASCADE),))
    assert culprit_of_incident(open_) is None, "victims alone do not show the cause"
    reported = replace(open_, failures=(*open_.failures, make_failure(2, 1, label="data")))
    found = culprit_of_incident(reported)
    assert found is not None
    assert (found.ranks, found.label) == ((2,), "data")


def test_judged_incident_without_a_culprit_is_marked() -> None:
    found = culprit_of_incident(broken(reason="because of another rank; no log names the culprit"))
    assert found is not None
    assert (found.is_named, found.reason) == (False, "because of another rank; no log names the culprit")


def test_the_root_is_the_earliest_that_is_no_victim() -> None:
    cases: list[tuple[list[tuple[int, int, float]], int | None, int | None]] = [
        ([], None, None),
        ([(0, 69, 1.0), (1, 69, 0.5)], None, 1),
        ([(0, 69, 1.0), (1, -9, 2.0), (2, 1, 2.0)], 1, 1),
    ]
    for failures, root, first in cases:
        made = [make_failure(rank, code, at_unix_s=at_s) for rank, code, at_s in failures]
        found, reported = root_of(made), first_of(made)
        assert ((found and found.rank), (reported and reported.rank)) == (root, first), failures
        assert [is_victim(one) for one in made] == [code == 69 for _, code, _ in failures]


def test_text_of_a_culprit() -> None:
    assert Culprit((3, 4), ("host-1", "host-2")).text == "ranks 3-4 on host-1 and host-2"
    assert (Culprit((), ("host-1",)).text, Culprit((3,)).text, NO_CULPRIT.text) == ("host-1", "rank 3", "")


TIMEOUT = (
    "[rank{0}]:[E101 01:02:03.4 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600011 milliseconds before timing out.\n"
)
ENQUEUED = "[rank{0}]:[E] [PG ID 0 PG GUID 0 Rank {0}] last enqueued work: {1}, last completed work: {2}\n"
LOST_LOG = "[rank{0}]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.1.7]:23411\n"
CLOSING = "W0302 multiprocessing/api.py:900] Sending process 77 closing signal SIGTERM\n"
REFUSED = (
    "node{0}:1:2 [0] misc/socket.cc NCCL WARN socketStartConnect: Connect to 10.0.3.4<41> failed : Connection refused\n"
)


CAUSES = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", "cuda_oom", "stop_user"),
    ("KeyError: 'x'\n", "user_code", "stop_user"),
    (
        "RuntimeError: CUDA error: an illegal memory access was encountered\n",
        "cuda_illegal_access",
        "restart_then_check",
    ),
    ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n", "gpu_hardware", "evict_host"),
    ("train.sh: line 8: 10121 Killed                  python train.py\n", "host_oom", "stop_user"),
    ("Fatal Python error: Segmentation fault\n", "segfault", "restart_then_check"),
    ("OSError: [Errno 28] No space left on device\n", "storage", "retry_then_stop"),
]
"""The log of rank 2, its label and its action."""


def test_the_rank_with_a_cause_of_its_own_is_the_root() -> None:
    for others, (tail, label, action) in product((LOST_LOG, TIMEOUT, CLOSING, REFUSED), CAUSES):
        tails = {str(rank): others.format(rank, 9) for rank in range(4)} | {"2": tail}
        found = classify_bundle(tails)
        assert (found.root_rank, found.verdict.label, found.verdict.action) == ("2", label, action), tails
        assert not found.verdict.is_cascade, tails


def test_the_root_of_equal_causes_follows_their_times() -> None:
    """A day may end between the first failure and the last, and a line may have no time."""
    of_times = "of the equally strong causes whose lines have a time, its log names the earliest"
    without = "its log names one of the equally strong causes, whose lines have no times"
    cases = [
        (("03:04:20", "03:04:19", "03:04:18", "03:04:17"), "3", of_times),
        (("00:00:01", "23:59:58", "00:00:02"), "1", of_times),
        (("", "03:04:07", "03:04:05"), "2", of_times),
        (("", "", ""), "0", without),
    ]
    for times, root, reason in cases:
        heads = [f"2026-01-02 {time},1 ERROR " if time else "" for time in times]
        found = classify_bundle({str(rank): f"{head}RuntimeError: boom\n" for rank, head in enumerate(heads)})
        assert (found.root_rank, found.reason) == (root, reason), times


def test_rank_that_is_behind_is_the_root_of_a_hang() -> None:
    tails = {str(rank): TIMEOUT.format(rank, 9) + ENQUEUED.format(rank, 11, 8) for rank in range(4)}
    tails["1"] = TIMEOUT.format(1, 9) + ENQUEUED.format(1, 9, 8)

    found = classify_bundle(tails)

    assert (found.root_rank, found.verdict.label, found.verdict.action) == ("1", "collective_timeout", "diagnose_hang")


def test_silent_rank_is_the_root() -> None:
    silent: dict[str, str]
    for others, silent in product((LOST_LOG, TIMEOUT), ({"3": ""}, {"3": "step 100 loss: 2.3\n"}, {})):
        tails = {str(rank): others.format(rank, 9) for rank in range(5) if rank != 3} | silent
        found = classify_bundle(tails)
        assert (found.root_rank, found.verdict.culprit) == ("3", "rank 3"), tails
        assert found.verdict.action != "none", tails
        assert not found.verdict.is_cascade, tails


def test_rank_named_by_the_others_is_the_root() -> None:
    line = "[rank{0}]: RuntimeError: received errors while waiting for send/recv from rank 2\n"
    tails = {str(rank): line.format(rank) for rank in range(4)} | {"2": LOST_LOG.format(2)}

    assert classify_bundle(tails).root_rank == "2"


def test_benign_logs_have_no_root() -> None:
    found = classify_bundle({"0": "step 1\n", "1": "UserWarning: odd\n"})

    assert (found.root_rank, found.verdict.label, found.verdict.action) == (None, "benign", "none")


def test_order_and_names_of_ranks_change_nothing() -> None:
    tails = {str(rank): TIMEOUT.format(rank, 9) for rank in range(12)} | {"10": "KeyError: 'x'\n"}
    reverse = dict(reversed(tails.items()))

    assert classify_bundle(tails) == classify_bundle(reverse)
    assert classify_bundle({"host-a": "KeyError: 'x'\n", "host-b": CLOSING}).root_rank == "host-a"
