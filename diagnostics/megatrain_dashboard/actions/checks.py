"""Decides whether an action is allowed, and describes its effect. Pure functions of the job's state in etcd."""

from __future__ import annotations

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.natural_order import natural_order
from megatrain.formatting import count_text, is_control, is_visible, names_text
from megatrain_dashboard.actions.document import ActionRequest
from megatrain_dashboard.responses.errors import RefusalError, bad_query, conflict, not_found
from megatrain_dashboard.security.roles import Caller, Role
from megatrain_job.jobs.send_request import check_accepts_requests
from megatrain_job.jobs.snapshot import JobSnapshot

HOST_KINDS = ("evict", "cordon", "uncordon")
VERDICT_KINDS = ("approve", "dismiss")
ASKED_KINDS = ("checkpoint", "restart", "stop", "evict", "approve", "dismiss")
"""Actions that are requests to the driver; all others are written to etcd."""
_MIN_REASON = 3
"""The least number of visible characters in a reason."""


def why_not_act(caller: Caller, *, is_enabled: bool, is_recorded: bool) -> str:
    """Return why a caller cannot act; empty if the caller can."""
    if is_recorded:
        return "this is a recorded run: actions need a running job"
    if not is_enabled:
        return "actions are off here: start the dashboard with --enable-actions, or set dashboard.enable_actions"
    if caller.role is not Role.OPERATOR:
        return "viewers may only read: log in with the token of an operator"
    return ""


def check_request(request: ActionRequest, snapshot: JobSnapshot) -> None:
    """Check that the fields of an action fit the job. Raises: RefusalError if they do not."""
    if request.confirmation != snapshot.job:
        raise bad_query("confirmation", request.confirmation, f"type the job's name, {snapshot.job!r}")
    if any(is_control(character) for character in request.reason + request.target):
        raise RefusalError(400, "reason and target must not contain control characters")
    if sum(map(is_visible, request.reason)) < _MIN_REASON:
        raise bad_query("reason", request.reason, f"give a reason of at least {_MIN_REASON} visible characters")
    needs_target = request.kind in HOST_KINDS + VERDICT_KINDS
    if needs_target != bool(request.target):
        rule = "name the host or verdict" if needs_target else "this action is for the whole job; leave it empty"
        raise bad_query("target", request.target, rule)
    if request.kind in HOST_KINDS:
        _check_host(request, snapshot)
    elif request.kind in VERDICT_KINDS and all(outcome.verdict_id != request.target for outcome, _ in snapshot.waiting):
        raise not_found(f"no verdict {request.target!r} waits for a person")
    if request.kind in ASKED_KINDS:
        try:
            check_accepts_requests(snapshot)
        except CoordinationError as error:
            raise conflict(str(error)) from error
    elif not snapshot.exists:
        raise conflict(f"etcd has no job {snapshot.job!r}")


def _check_host(request: ActionRequest, snapshot: JobSnapshot) -> None:
    newest = snapshot.newest_round
    in_round = {part.host for part in newest.hosts} if newest is not None else set()
    known = {
        "evict": in_round,
        "cordon": in_round | snapshot.hosts.keys(),
        "uncordon": set(snapshot.cordons),
    }[request.kind]
    if request.target not in known:
        which = {"evict": "in the round", "cordon": "in the round or registered", "uncordon": "cordoned"}[request.kind]
        there = names_text(sorted(known, key=natural_order)) or "none"
        raise not_found(f"no host {request.target!r} is {which}; hosts that are {which}: {there}")
    if request.kind == "cordon" and request.target in snapshot.cordons:
        cordon = snapshot.cordons[request.target]
        raise conflict(f"{request.target} is cordoned already, by {cordon.by}: {cordon.reason}")


def effect_of(request: ActionRequest, snapshot: JobSnapshot) -> str:
    """Return a description of the action's effect, which a dry run shows to the person who decides."""
    newest = snapshot.newest_round
    hosts = count_text(len(newest.hosts), "host") if newest is not None else "no host"
    match request.kind:
        case "checkpoint":
            return f"all ranks on {hosts} would save a checkpoint at the next step that they agree on"
        case "restart":
            return f"the workers on {hosts} would be stopped and started again from the newest state"
        case "stop":
            return f"the job would save a checkpoint and end, on {hosts}; it would not start again by itself"
        case "evict":
            spares = _spares(snapshot)
            return f"{request.target} would be cordoned, and a new round would begin without it: {spares}"
        case "cordon":
            return f"no later round would use {request.target}; it stays in the current round"
        case "uncordon":
            return f"the next round might use {request.target} again"
        case "approve":
            text = _verdict_text(request.target, snapshot)
            return f"the driver would carry out verdict {request.target}: {text}"
        case "dismiss":
            return f"verdict {request.target} would be dismissed: {_verdict_text(request.target, snapshot)}"
        case "diag-on":
            return "ranks would time all operations, with the sample period of the configuration"
        case "diag-off":
            return "ranks would time no operations; progress is still recorded, and hangs are still detected"


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
