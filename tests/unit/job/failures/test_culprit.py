"""The culprit of a broken round, and the relation of the other failures to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.contracts.records.incident import Incident, IncidentKind, Moments
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
