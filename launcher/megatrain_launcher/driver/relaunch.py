"""The previous launch ended without an end record: the first driver opens an incident with its downtime. Pure."""

from __future__ import annotations

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments
from megatrain.formatting.quantities import seconds_text
from megatrain_launcher.driver.actions import Decision, OpenIncident
from megatrain_launcher.driver.incidents import new_id
from megatrain_launcher.driver.responses import RESTART
from megatrain_launcher.driver.state import ClusterState


def report_lost_launch(now: float, state: ClusterState) -> Decision | None:
    """Open the incident of a lost launch before the first round of this one; None if there is nothing to report, or it
    is already reported.

    The first round then continues it like any open incident, and the first step closes it.
    """
    lost = None if state.job is None else state.job.lost_launch
    has_begun = state.round is not None and not state.is_of_older_launch(state.round)
    if state.job is None or lost is None or has_begun:
        return None
    if any(one.kind is IncidentKind.LAUNCH_LOST and state.is_of_this_launch(one) for one in state.incidents.values()):
        return None
    number = 0 if state.round is None else state.round.number
    began = min(lost.last_sign_unix_s, now)
    launched = min(max(state.job.created_unix_s, began), now)
    reason = (
        f"the previous launch, begun by {lost.first_host}, left no record of its end; the job was launched again "
        f"{seconds_text(launched - began)} after its last sign of life"
    )
    incident = Incident(
        incident_id=new_id(now, state, number),
        kind=IncidentKind.LAUNCH_LOST,
        state=IncidentState.OPEN,
        round=number,
        moments=Moments(began=began, detected=launched, decided=now, halted=now),
        reason=reason,
        action=RESTART,
        evidence=lost.evidence,
        label=lost.cause,
        last_step=lost.last_step,
        driver=state.observer,
    )
    return Decision((OpenIncident(incident),), reason)
