"""Sentences about failures and incidents, the same in every verb. Pure."""

from __future__ import annotations

import signal

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.host_records import RankFailure
from megatrain.contracts.incident import Incident, IncidentKind, phase_seconds
from megatrain.contracts.texts import count_text, names_text, ranks_text, seconds_text
from megatrain.failures.culprit import is_victim

KIND_TEXTS = {
    IncidentKind.FAILURE: "a worker ended",
    IncidentKind.HANG: "a hang",
    IncidentKind.HOST_LOST: "a host was lost",
    IncidentKind.REQUEST: "somebody asked for it",
    IncidentKind.CONTROL_PLANE: "leases vanished while training went on",
    IncidentKind.STRAGGLER: "hosts made the job slow",
    IncidentKind.NUMERICS: "loss or gradients went wrong",
    IncidentKind.LAUNCH_LOST: "the launch before died without an end",
}


def exit_text(exit_code: int) -> str:
    """Return "by SIGKILL" or "with exit code 66 (checkpoint)"."""
    if exit_code < 0:
        try:
            return f"by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"by signal {-exit_code}"
    try:
        name = ExitCode(exit_code).name.lower().replace("_", " ")
    except ValueError:
        return f"with exit code {exit_code}"
    return f"with exit code {exit_code}" if exit_code <= ExitCode.FAILURE else f"with exit code {exit_code} ({name})"


def rank_end_text(failure: RankFailure) -> str:
    """Return "rank 3 ended by SIGKILL", with what its log says of it, and whether it says that others failed first."""
    label = f": {failure.label}" if failure.label else ""
    names = f", which names {failure.culprit}" if failure.culprit else ""
    victim = ", because others had" if is_victim(failure) else ""
    return f"rank {failure.rank} ended {exit_text(failure.exit_code)}{label}{names}{victim}"


def where_text(incident: Incident) -> str:
    """Return "host-2 (rank 3)"; empty where no culprit is named."""
    ranks = ranks_text(incident.culprit_ranks)
    hosts = names_text(incident.culprit_hosts, most=4)
    return f"{hosts} ({ranks})" if hosts and ranks else hosts or ranks


def down_s(incident: Incident) -> float | None:
    """Return the seconds from the failure until a step was completed again, None while none is."""
    first_step = incident.moments.first_step
    return None if first_step is None else max(0.0, first_step - incident.moments.began)


def cost_text(incident: Incident) -> str:
    """Return "3.2 s, 4 steps lost"; as far as it is known."""
    lost = incident.steps_lost
    seconds = down_s(incident)
    texts = [
        "" if seconds is None else seconds_text(seconds),
        "" if lost is None else f"{count_text(lost, 'step')} lost",
    ]
    return ", ".join(text for text in texts if text)


def current_phase(incident: Incident) -> str:
    """Return the first phase of a recovery that is not over; empty when all are."""
    for phase, seconds in phase_seconds(incident.moments).items():
        if seconds is None:
            return phase_text(phase)
    return ""


def phase_text(phase: str) -> str:
    """Return a phase of a recovery as people read it."""
    return phase.replace("_", " ")
