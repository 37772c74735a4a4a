"""Checks this host's clock against the etcd members' by the Date of their HTTP answers.

Date tells the server's time in whole seconds, cut off. An answer with date D, asked for at `sent` and here at
`received` (both by our clock), bounds the offset server - ours by D - received and D + 1 - sent: together one second
and the way there and back, so its middle is wrong by half of that at most. More answers narrow the bounds, for they
fall on other parts of a second; asking ends as soon as the bounds lie inside or outside of what is allowed.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

from megatrain.contracts.errors import ConfigError
from megatrain.coordination.settings import Endpoint, EtcdSettings
from megatrain_launcher.health.context import HealthContext
from megatrain_launcher.health.finding import Finding, failed, passed, skipped, warning
from megatrain_launcher.health.history import History

NAMES = ("clock",)
DEADLINE_S = 15.0
_ANSWER_S = 2.0
_MAX_ANSWERS = 8
_BETWEEN_S = 0.13
"""Eight of them are spread over one second."""


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a server's clock is ahead of ours: between these two, in seconds."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2

    @property
    def error(self) -> float:
        return (self.most - self.least) / 2

    def narrowed(self, other: Offset) -> Offset:
        """Return what both say; the newer one where they contradict each other, because a clock was set."""
        least, most = max(self.least, other.least), min(self.most, other.most)
        return Offset(least, most) if least <= most else other

    def is_within(self, limit_s: float) -> bool | None:
        """Say whether the offset is allowed; None while the bounds leave that open."""
        if -limit_s <= self.least and self.most <= limit_s:
            return True
        if self.least > limit_s or self.most < -limit_s:
            return False
        return None


def offset_of(date_unix_s: float, sent_unix_s: float, received_unix_s: float) -> Offset:
    """Return the bounds that one answer gives. Pure."""
    return Offset(date_unix_s - received_unix_s, date_unix_s + 1.0 - sent_unix_s)


def check_clock(context: HealthContext, history: History) -> tuple[Finding, ...]:
    """Ask each member, until it is clear whether our clock is near enough to it."""
    del history
    if context.etcd is None:
        return (skipped(NAMES[0], "no etcd to compare with"),)
    limit_s = context.recovery.max_clock_offset_s
    settings = context.etcd
    if any(endpoint.path for endpoint in settings.endpoints):
        return (skipped(NAMES[0], "etcd is on this host, and has its clock"),)
    try:
        offsets = [
            measured_offset(limit_s, lambda endpoint=endpoint: _ask(endpoint, settings))  # type: ignore[misc]
            for endpoint in settings.endpoints
        ]
    except ConfigError as error:
        return (failed(NAMES[0], str(error)),)
    return (judge_clock(offsets, limit_s),)


def measured_offset(limit_s: float, ask: Callable[[], Offset | None]) -> Offset | None:
    """Return an offset that is clear about the limit, or the best of some answers; None without any."""
    offset: Offset | None = None
    for number in range(_MAX_ANSWERS):
        if number:
            time.sleep(_BETWEEN_S)
        found = ask()
        if found is None:
            break
        offset = found if offset is None else offset.narrowed(found)
        if offset.is_within(limit_s) is not None:
            break
    return offset


def judge_clock(offsets: Sequence[Offset | None], limit_s: float) -> Finding:
    """Return what the offsets from all members mean: it is our clock when it differs from most of theirs. Pure."""
    (name,) = NAMES
    known = [offset for offset in offsets if offset is not None]
    if not known:
        return warning(name, "no etcd member tells its time: not compared")
    # what is still open after eight answers is within the limit by its middle, or not
    wrong = [offset for offset in known if not _is_allowed(offset, limit_s)]
    typical = sorted(known, key=lambda offset: offset.middle)[len(known) // 2]
    sign = "ahead of" if typical.middle < 0 else "behind"
    state = f"{abs(typical.middle):.2f} s {sign} etcd, give or take {typical.error:.2f} s"
    if len(wrong) * 2 > len(known):
        finding = failed(name, f"{state}; recovery.max_clock_offset_s={limit_s:g}: set the clock (NTP, chrony)")
    elif wrong:
        finding = warning(
            name, f"{state}, but {len(wrong)} of {len(known)} etcd members differ by more than {limit_s:g} s"
        )
    else:
        finding = passed(name, state)
    return replace(finding, value=-typical.middle, unit="s")


def _is_allowed(offset: Offset, limit_s: float) -> bool:
    within = offset.is_within(limit_s)
    return abs(offset.middle) <= limit_s if within is None else within


def _ask(endpoint: Endpoint, settings: EtcdSettings) -> Offset | None:
    """Return what one answer says, None without one that has a date. Raises: ConfigError for unusable TLS files."""
    timeout_s = min(_ANSWER_S, settings.attempt_s)
    connection: http.client.HTTPConnection
    if endpoint.scheme == "https":
        context = settings.tls.context()
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    try:
        connection.connect()  # not part of the way there and back
        sent = time.time()
        connection.request("GET", "/version")
        response = connection.getresponse()
        received = time.time()
        response.read()
        date = parsedate_to_datetime(response.headers.get("Date", "")).timestamp()
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return None
    finally:
        connection.close()
    return offset_of(date, sent, received)
