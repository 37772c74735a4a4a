"""The receipts of an incident's notifications, copied from the receivers' records to the incident's, where they stay.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatrain.contracts.records.incident import TOPIC_PREFIX, Incident
from megatrain.contracts.records.receipts import Receipt
from megatrain_launcher.driver.actions import DriverAction, OpenIncident, UpdateIncident
from megatrain_launcher.driver.state import ClusterState


def kept_receipts(state: ClusterState, actions: Iterable[DriverAction] = ()) -> tuple[UpdateIncident, ...]:
    """Return the incidents with receipts that their records lack.

    An incident that the decision's other `actions` write waits for the next decision, because one of two writes would
    be lost.
    """
    records = state.receivers.values()
    with_receipts = {topic.removeprefix(TOPIC_PREFIX) for record in records for topic in record.receipts}
    if not with_receipts:
        return ()
    busy = {one.incident.incident_id for one in actions if isinstance(one, OpenIncident | UpdateIncident)}
    known = [state.incidents[name] for name in sorted(with_receipts - busy) if name in state.incidents]
    changed = ((one, _receipts_of(state, one)) for one in known)
    return tuple(
        UpdateIncident(replace(one, receipts=receipts)) for one, receipts in changed if receipts != one.receipts
    )


def _receipts_of(state: ClusterState, incident: Incident) -> tuple[Receipt, ...]:
    """Return all receipts of an incident; a receiver's current record replaces the receipts kept for it."""
    said = {name: record.receipts.get(incident.topic, ()) for name, record in state.receivers.items()}
    kept = (one for one in incident.receipts if not said.get(one.receiver))
    new = (one for receipts in said.values() for one in receipts)
    return tuple(sorted((*kept, *new), key=lambda one: (one.receiver, one.at_unix_s, one.stage)))
