"""Formats incidents as a table, and one incident in full. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatrain.commands.printing import facts, table
from megatrain.contracts.exit_codes import exit_text
from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.incident import Incident, IncidentState, phase_seconds
from megatrain.formatting import age_text, count_text, names_text, seconds_text, short, time_text
from megatrain_job.failures.culprit import FailureRole, failures_by_role
from megatrain_job.jobs.incident_phrases import KIND_TEXTS, down_s, phase_text, receipt_text, where_text
from megatrain_job.jobs.notes import Note, place_text

_COLUMNS = ("id", "ago", "kind", "state", "where", "did", "down", "steps lost", "why")
_MAX_REASON_CHARS = 100
_BAR_CELLS = 40


def incidents_lines(job: str, incidents: Sequence[Incident], now_s: float) -> list[str]:
    """Return a table of incidents, newest first."""
    if not incidents:
        return [f"{job}: no incident"]
    states = Counter(incident.state for incident in incidents)
    summary = ", ".join(f"{states[state]} {state}" for state in IncidentState if states[state])
    known = [incident.effective_time_ratio for incident in incidents if incident.effective_time_ratio is not None]
    ratio = f"; training time {known[-1]:.1%} of the job's time until the last one" if known else ""
    rows = [_row(incident, now_s) for incident in reversed(incidents)]
    return [
        f"{job}: {count_text(len(incidents), 'incident')}: {summary}{ratio}",
        "",
        *table([_COLUMNS, *rows], left=(0, 2, 3, 4, 5, 8)),
    ]


def _row(incident: Incident, now_s: float) -> tuple[str, ...]:
    seconds = down_s(incident)
    return (
        incident.incident_id,
        age_text(incident.moments.began, now_s),
        str(incident.kind),
        str(incident.state),
        where_text(incident.culprit_hosts, incident.culprit_ranks) or "-",
        incident.action,
        "-" if seconds is None else seconds_text(seconds),
        "-" if incident.steps_lost is None else f"{incident.steps_lost:,}",
        short(incident.reason, _MAX_REASON_CHARS),
    )


def incident_lines(incident: Incident, now_s: float) -> list[str]:
    """Return one incident in full: what, where, what was done, what it cost, and the evidence."""
    lines = [f"{incident.incident_id} {incident.state}: {short(incident.reason, 400)}", ""]
    lines += facts(_facts(incident, now_s))
    lines += ["", *_timeline(incident)]
    if incident.evidence:
        lines += ["", "evidence"]
        lines += [f"  {number}. {short(text, 400)}" for number, text in enumerate(incident.evidence, 1)]
    if incident.failures:
        heads = ("rank", "ended", "after", "label", "action", "log")
        by_role = failures_by_role(incident, {})
        rows = [heads, *(_failure_row(failure, role, incident.moments.began) for role, failure in by_role)]
        lines += ["", "workers that ended", *(f"  {line}" for line in table(rows, left=(1, 3, 4, 5)))]
    if incident.receipts:
        receipts = (
            f"{receipt.receiver}: {receipt_text(receipt)} ({time_text(receipt.at_unix_s)})"
            for receipt in incident.receipts
        )
        lines += ["", "notified", *(f"  {short(text, 400)}" for text in receipts)]
    notes = {name: text for name, text in incident.notes.items() if not name.endswith("_s")}  # numbers for programs
    if notes:
        lines += ["", "notes", *(f"  {name}: {short(text, 400)}" for name, text in sorted(notes.items()))]
    return lines


def notes_lines(notes: Sequence[Note], now_s: float) -> list[str]:
    """Return the notes that people wrote and did not retract, newest first, below a heading; empty if there are
    none.
    """
    held = [note for note in reversed(notes) if not note.is_retracted]
    if not held:
        return []
    rows = [
        ("id", "where", "written", "by", "note"),
        *(
            (note.note_id, place_text(note), age_text(note.written_unix_s, now_s), note.user, note.text)
            for note in held
        ),
    ]
    return ["", "notes by people", *(f"  {line}" for line in table(rows, left=(0, 1, 3, 4)))]


def _facts(incident: Incident, now_s: float) -> list[tuple[str, str]]:
    began = incident.moments.began
    label = f" ({incident.label})" if incident.label else ""
    found = [
        ("what", KIND_TEXTS[incident.kind] + label),
        ("when", f"{time_text(began)}, {age_text(began, now_s)} ago, in round {incident.round}"),
    ]
    confidence = f", {incident.confidence}" if incident.confidence else ""
    where = where_text(incident.culprit_hosts, incident.culprit_ranks)
    found.append(("where", f"{where}{confidence}" if where else "no culprit is named"))
    did = incident.action
    if incident.next_round is not None:
        did += f", round {incident.next_round} follows"
    found.append(("did", f"{did} (driver {incident.driver})" if incident.driver else did))
    found.append(("cost", _cost(incident)))
    if incident.effective_time_ratio is not None:
        found.append(("training time", f"{incident.effective_time_ratio:.1%} of the job's time until then"))
    return found


def _cost(incident: Incident) -> str:
    seconds, lost = down_s(incident), incident.steps_lost
    if incident.state is IncidentState.HELD:
        return "nothing: training continued"
    parts = ["no step completed since" if seconds is None else f"{seconds_text(seconds)} without a step"]
    if lost is not None:
        went = f" (from {incident.last_step:,} back to {incident.resumed_step:,})" if lost else ""
        parts.append(f"{count_text(lost, 'step')} lost{went}")
    elif incident.last_step is not None:
        parts.append(f"step {incident.last_step:,} was the last")
    return ", ".join(parts)


def _timeline(incident: Incident) -> list[str]:
    """Return seconds and a bar for each phase of the recovery; each bar begins where the one before ends."""
    phases = phase_seconds(incident.moments)
    in_all_s = sum(seconds for seconds in phases.values() if seconds is not None)
    rows, before_s, is_now_shown = [("timeline", "seconds", "")], 0.0, incident.state is not IncidentState.OPEN
    for phase, seconds in phases.items():
        if seconds is None:
            rows.append((f"  {phase_text(phase)}", "-", "" if is_now_shown else "now"))
            is_now_shown = True
            continue
        rows.append((f"  {phase_text(phase)}", f"{seconds:.2f}", _bar(before_s, seconds, in_all_s)))
        before_s += seconds
    rows.append(("  in all", f"{in_all_s:.2f}", ""))
    return table(rows, left=(0, 2))


def _bar(before_s: float, seconds: float, in_all_s: float) -> str:
    if in_all_s <= 0:
        return ""
    first = round(_BAR_CELLS * before_s / in_all_s)
    last = round(_BAR_CELLS * (before_s + seconds) / in_all_s)
    first = min(first, _BAR_CELLS - 1)
    return " " * first + "#" * max(1, last - first)


def _failure_row(failure: RankFailure, role: FailureRole, began_s: float) -> tuple[str, ...]:
    label = failure.label or "-"
    return (
        str(failure.rank),
        exit_text(failure.exit_code),
        seconds_text(failure.at_unix_s - began_s),
        f"{label} (follows)" if role is FailureRole.FOLLOWS else label,
        failure.action or "-",
        short(f"{f'[{failure.culprit}] ' if failure.culprit else ''}{failure.line}", 160),
    )


def matching(incidents: Sequence[Incident], wanted: str) -> list[Incident]:
    """Return the incidents that `wanted` selects: an id, a prefix of ids, or "last"."""
    if wanted == "last":
        return list(incidents[-1:])
    exact = [incident for incident in incidents if incident.incident_id == wanted]
    return exact or [incident for incident in incidents if incident.incident_id.startswith(wanted)]


def ids_text(incidents: Sequence[Incident]) -> str:
    """Return the newest ids, for messages."""
    return names_text([incident.incident_id for incident in reversed(incidents)], most=6)
