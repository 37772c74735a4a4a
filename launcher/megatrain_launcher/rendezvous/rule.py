"""The rules of the rendezvous: when a round ends, and which hosts are in the next one. Pure functions: no I/O and no
clock.

torchrun itself limits how often workers are restarted (--max-restarts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.rounds import Round
from megatrain_launcher.rendezvous.settings import RendezvousSettings
from megatrain_launcher.rendezvous.view import View


@dataclass(frozen=True, slots=True)
class Since:
    """The time since which the conditions for a new round hold, by the leader's clock; None: they do not hold."""

    halted: float | None = None
    """The time since which no round is live."""
    enough: float | None = None
    """The time since which enough hosts wait."""


@dataclass(frozen=True, slots=True)
class EndRound:
    """Halt a round."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Write the next round with these hosts, in the order of their ranks."""

    number: int
    hosts: tuple[str, ...]
    reason: str


Decision = EndRound | BeginRound | None


def decide(
    now_s: float, view: View, settings: RendezvousSettings, since: Since, *, is_absence_certain: bool = True
) -> tuple[Decision, Since]:
    """Return the decision, None to wait, and the state for the next call.

    is_absence_certain: False while hosts may appear missing because etcd lost all leases.
    """
    live = view.live_round
    if live is not None:
        reason = _why_over(view, live, settings, is_absence_certain)
        return (EndRound(live.number, reason) if reason else None), Since()
    waiting = sorted((host for host in view.records if view.is_waiting(host)), key=natural_order)
    is_enough = len(waiting) >= settings.min_hosts
    since = Since(
        halted=now_s if since.halted is None else since.halted,
        enough=(now_s if since.enough is None else since.enough) if is_enough else None,
    )
    if not is_enough or since.halted is None or since.enough is None:
        return None, since
    if still_stopping(view) and now_s - since.halted < settings.stop_timeout_s:
        return None, since
    last = view.newest_round
    is_complete = last is not None and all(view.is_waiting(part.host) for part in last.hosts)
    is_last_call_over = now_s - since.enough >= settings.last_call_s
    if len(waiting) < settings.max_hosts and not is_complete and not is_last_call_over:
        return None, since
    hosts = in_rank_order(waiting, last, view, settings.max_hosts)
    return BeginRound(view.next_number, hosts, _why_begun(view, last)), Since()


def still_stopping(view: View) -> tuple[str, ...]:
    """Return the hosts of the last round that are registered and do not wait yet: they still stop their workers."""
    last = view.newest_round
    if last is None:
        return ()
    return tuple(
        part.host for part in last.hosts if view.is_present(part.host, part.session) and not view.is_waiting(part.host)
    )


def in_rank_order(waiting: list[str], last: Round | None, view: View, max_hosts: int) -> tuple[str, ...]:
    """Choose and order hosts. Hosts of the last round are preferred, and keep their ranks if these still exist."""
    ranks: Mapping[str, int] = {}
    if last is not None:
        ranks = {part.host: part.first_rank for part in last.hosts}
    by_time = sorted(waiting, key=lambda host: (host not in ranks, view.since.get(host, 0)))
    chosen = sorted(by_time[:max_hosts], key=natural_order)
    places: dict[int, str] = {}
    for host in chosen:
        if ranks.get(host, len(chosen)) < len(chosen):
            places[ranks[host]] = host
    others = iter(host for host in chosen if host not in places.values())
    return tuple(places[rank] if rank in places else next(others) for rank in range(len(chosen)))


def _why_over(view: View, live: Round, settings: RendezvousSettings, is_absence_certain: bool) -> str:
    names = {part.host for part in live.hosts}
    for part in live.hosts:
        status = view.statuses.get(part.host)
        if not view.is_present(part.host, part.session):
            if is_absence_certain:
                return f"{part.host} is gone: its lease ended"
        elif view.is_waiting(part.host) and status is not None and status.round >= live.number:
            return f"{part.host} restarts its workers"
    if len(live.hosts) < settings.max_hosts:
        for host in sorted(view.records, key=natural_order):
            if host not in names and view.is_waiting(host):
                return f"{host} joins"
    return ""


def _why_begun(view: View, last: Round | None) -> str:
    halt = view.halts.get(last.number) if last is not None else None
    return halt.reason if halt is not None else "the first round"
