"""Receipts are added to the incident's record, each once, and change nothing else in it."""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.notices import Receipt, ReceiverRecord
from megatrain_launcher.driver.actions import UpdateIncident
from megatrain_launcher.driver.incidents import kept_receipts
from megatrain_launcher.driver.state import ClusterState
from tests.helpers.launched_job import NOW_S, make_incident


def state_of(incident: Incident, *records: ReceiverRecord) -> ClusterState:
    incidents = {incident.incident_id: incident}
    return ClusterState(JobKeys("demo"), "host-1", NOW_S, incidents=incidents,
                        receivers={one.receiver: one for one in records})  # fmt: skip


def record(receiver: str, *receipts: Receipt, topic: str | None = None) -> ReceiverRecord:
    return ReceiverRecord(receiver, receipts={topic or make_incident().topic: receipts})


OPENED = Receipt("slack", "open", NOW_S)
CLOSED = Receipt("slack", "closed", NOW_S + 5)
PAGED = Receipt("pagerduty", "open", NOW_S + 1, "answers 404", num_failed=3)


def test_the_receipts_of_receivers_are_copied_once() -> None:
    incident = make_incident()
    (update,) = kept_receipts(state_of(incident, record("slack", OPENED, CLOSED), record("pagerduty", PAGED)))
    assert update.incident == replace(incident, receipts=(PAGED, OPENED, CLOSED))
    assert kept_receipts(state_of(update.incident, record("slack", OPENED, CLOSED), record("pagerduty", PAGED))) == ()


def test_receipts_stay_when_their_receiver_forgets_them() -> None:
    incident = make_incident(receipts=(OPENED,))
    (update,) = kept_receipts(state_of(incident, ReceiverRecord("slack"), record("pagerduty", PAGED)))
    assert update.incident.receipts == (PAGED, OPENED)


def test_incident_that_a_decision_writes_gets_receipts_later() -> None:
    state = state_of(make_incident(), record("slack", OPENED))
    assert kept_receipts(state, (UpdateIncident(make_incident()),)) == ()


def test_receipts_of_a_removed_incident_are_ignored() -> None:
    assert kept_receipts(state_of(make_incident(), record("slack", OPENED, topic="incident/gone"))) == ()
