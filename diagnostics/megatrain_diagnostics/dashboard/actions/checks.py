"""Whether a wish may be carried out, and what it would do: pure, over what etcd holds of the job."""

from __future__ import annotations

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.printable import is_control, is_seen
from megatrain.contracts.texts import count_text, names_text, natural_order
from megatrain.jobs.asking import check_can_be_asked
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.dashboard.actions.document import ActionRequest
from megatrain_diagnostics.dashboard.answers.errors import RefusalError, bad_query, conflict, not_found
from megatrain_diagnostics.dashboard.security.roles import Caller, Role

HOST_KINDS = ("evict", "cordon", "uncordon")
VERDICT_KINDS = ("approve", "dismiss")
ASKED_KINDS = ("checkpoint", "restart", "stop", "evict", "approve", "dismiss")
"""What the driver does; the rest is written to etcd."""
_LEAST_REASON = 3
"""Characters that can be seen."""


def why_not_act(caller: Caller, *, is_enabled: bool, is_recorded: bool) -> str:
    """Return why somebody cannot act at all; empty where they can."""
    if is_recorded:
        return "this is the history of a run: there is nothing to act on"
    if not is_enabled:
        return "actions are off here: start the dashboard with --enable-actions, or set dashboard.enable_actions"
    if caller.role is not Role.OPERATOR:
        return "viewers may only look: log in with the token of an operator"
    return ""


def check_wish(wish: ActionRequest, snapshot: JobSnapshot) -> None:
    """Refuse a wish whose words do not fit the job. Raises: RefusalError."""
    if wish.confirmation != snapshot.job:
        raise bad_query("confirmation", wish.confirmation, f"type the job's name, {snapshot.job!r}")
    if any(is_control(character) for character in wish.reason + wish.target):
        raise RefusalError(400, "reason and target hold no control characters")
    if sum(map(is_seen, wish.reason)) < _LEAST_REASON:
        raise bad_query("reason", wish.reason, f"say why, in at least {_LEAST_REASON} characters")
    needs_target = wish.kind in HOST_KINDS + VERDICT_KINDS
    if needs_target != bool(wish.target):
        rule = "name what it is about" if needs_target else "this is about the whole job; leave it empty"
        raise bad_query("target", wish.target, rule)
    if wish.kind in HOST_KINDS:
        _check_host(wish, snapshot)
    elif wish.kind in VERDICT_KINDS and all(outcome.verdict_id != wish.target for outcome, _ in snapshot.waiting):
        raise not_found(f"no verdict {wish.target!r} waits for a person")
    if wish.kind in ASKED_KINDS:
        try:
            check_can_be_asked(snapshot)
        except CoordinationError as error:
            raise conflict(str(error)) from error
    elif not snapshot.exists:
        raise conflict(f"etcd knows no job {snapshot.job!r}")


def _check_host(wish: ActionRequest, snapshot: JobSnapshot) -> None:
    newest = snapshot.newest_round
    in_round = {part.host for part in newest.hosts} if newest is not None else set()
    known = {
        "evict": in_round,
        "cordon": in_round | snapshot.hosts.keys(),
        "uncordon": set(snapshot.cordons),
    }[wish.kind]
    if wish.target not in known:
        which = {"evict": "in the round", "cordon": "registered", "uncordon": "cordoned"}[wish.kind]
        there = names_text(sorted(known, key=natural_order)) if known else "none"
        raise not_found(f"no host {wish.target!r} is {which}; there is {there}")
    if wish.kind == "cordon" and wish.target in snapshot.cordons:
        cordon = snapshot.cordons[wish.target]
        raise conflict(f"{wish.target} is cordoned already, by {cordon.by}: {cordon.reason}")


def what_it_does(wish: ActionRequest, snapshot: JobSnapshot) -> str:
    """Return what would be done, for a person who decides: the answer of a dry run."""
    newest = snapshot.newest_round
    hosts = count_text(len(newest.hosts), "host") if newest is not None else "no host"
    match wish.kind:
        case "checkpoint":
            return f"all ranks on {hosts} would save a checkpoint at the next step that they agree on"
        case "restart":
            return f"the workers on {hosts} would be ended and started again from the newest state"
        case "stop":
            return f"the job would save a checkpoint and end, on {hosts}; somebody has to start it again"
        case "evict":
            return f"the round would end, {wish.target} be cordoned, and a round begin without it: {_spares(snapshot)}"
        case "cordon":
            return f"no later round would use {wish.target}; in the round of now it stays"
        case "uncordon":
            return f"the next round might use {wish.target} again"
        case "approve":
            return f"the driver would do what verdict {wish.target} calls for: {_verdict_text(wish.target, snapshot)}"
        case "dismiss":
            return f"verdict {wish.target} would be let be: {_verdict_text(wish.target, snapshot)}"
        case "diag-on":
            return "ranks would time all operations, with the sample period of the configuration"
        case "diag-off":
            return "ranks would time nothing; progress is still seen, and hangs are still found"


def _spares(snapshot: JobSnapshot) -> str:
    newest = snapshot.newest_round
    busy = {part.host for part in newest.hosts} if newest is not None else set()
    free = [
        name
        for name, record in snapshot.hosts.items()
        if name not in busy and name not in snapshot.cordons and record.is_fit
    ]
    return f"{count_text(len(free), 'spare')} could take its place" if free else "there is no spare for its place"


def _verdict_text(verdict_id: str, snapshot: JobSnapshot) -> str:
    outcome, verdict = next(pair for pair in snapshot.waiting if pair[0].verdict_id == verdict_id)
    return f"{verdict.kind} of {names_text(verdict.hosts) or 'the job'}, {outcome.reason}"
