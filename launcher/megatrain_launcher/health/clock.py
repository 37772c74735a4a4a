"""Compares this host's clock with the clocks of etcd's members, by the Date header of their HTTP responses.

Date is the server's time, truncated to seconds. A response with date D, requested at `sent` and received at `received`
(both by this host's clock), bounds the offset (server's clock - this host's clock) by D - received and D + 1 - sent.
The interval is one second plus the round trip, so the error of its middle is at most half of that. Further responses at
other fractions of a second narrow the bounds. At most eight are requested of a member, and no more once the bounds are
completely within or beyond the limit.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

from megatrain.contracts.errors import ConfigError
from megatrain_job.coordination.settings import Endpoint, EtcdSettings
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

NAMES = ("clock",)
DEADLINE_S = 15.0
_ANSWER_S = 2.0
_MAX_ANSWERS = 8
_BETWEEN_S = 0.13
"""The pause between requests, which spreads eight of them over one second."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Bounds, in seconds, of how far a server's clock is ahead of this host's."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2

    @property
    def error(self) -> float:
        return (self.most - self.least) / 2

    def narrowed(self, other: Offset) -> Offset:
        """Return the intersection with newer bounds; if it is empty, because a clock was set, the newer bounds."""
        least, most = max(self.least, other.least), min(self.most, other.most)
        return Offset(least, most) if least <= most else other

    def is_within(self, limit_s: float) -> bool | None:
        """Return whether the offset is within the limit; None if the bounds do not decide it."""
        if -limit_s <= self.least and self.most <= limit_s:
            return True
        if self.least > limit_s or self.most < -limit_s:
            return False
        return None


def offset_of(date_unix_s: float, sent_unix_s: float, received_unix_s: float) -> Offset:
    """Return the bounds that follow from one response."""
    return Offset(date_unix_s - received_unix_s, date_unix_s + 1.0 - sent_unix_s)


def check_clock(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Compare this host's clock with that of each etcd member."""
    del history
    if context.etcd is None:
        return (skipped(NAMES[0], "no etcd to compare with"),)
    limit_s = context.recovery.max_clock_offset_s
    settings = context.etcd
    if any(endpoint.path for endpoint in settings.endpoints):
        return (skipped(NAMES[0], "etcd is on this host and uses the same clock"),)
    try:
        offsets = [
            measured_offset(limit_s, lambda endpoint=endpoint: _ask(endpoint, settings))  # type: ignore[misc]
            for endpoint in settings.endpoints
        ]
    except ConfigError as error:
        return (failed(NAMES[0], str(error)),)
    return (judge_clock(offsets, limit_s),)


def measured_offset(limit_s: float, ask: Callable[[], Offset | None]) -> Offset | None:
    """Return an offset that is certainly within or beyond the limit, else the narrowest bounds of all responses.

    None without a response.
    """
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


def judge_clock(offsets: Sequence[Offset | None], limit_s: float) -> HealthFinding:
    """Judge the offsets from all members: this host's clock is wrong if it differs from most members' clocks."""
    (name,) = NAMES
    known = [offset for offset in offsets if offset is not None]
    if not known:
        return warning(name, "no etcd member reports its time, so the clock was not compared")
    # if the bounds do not decide, the middle of the bounds does
    wrong = [offset for offset in known if not _is_allowed(offset, limit_s)]
    typical = sorted(known, key=lambda offset: offset.middle)[len(known) // 2]
    sign = "ahead of" if typical.middle < 0 else "behind"
    state = f"{abs(typical.middle):.2f} s {sign} etcd (+/- {typical.error:.2f} s)"
    if len(wrong) * 2 > len(known):
        finding = failed(name, f"{state}; recovery.max_clock_offset_s={limit_s:g}: set the clock (NTP, chrony)")
    elif wrong:
        differ = "differs" if len(wrong) == 1 else "differ"
        finding = warning(
            name, f"{state}, but {len(wrong)} of {len(known)} etcd members {differ} by more than {limit_s:g} s"
        )
    else:
        finding = passed(name, state)
    return replace(finding, value=-typical.middle, unit="s")


def _is_allowed(offset: Offset, limit_s: float) -> bool:
    within = offset.is_within(limit_s)
    return abs(offset.middle) <= limit_s if within is None else within


def _ask(endpoint: Endpoint, settings: EtcdSettings) -> Offset | None:
    """Return the bounds of one response; None if there is no response, or it has no date.

    Raises: ConfigError for unusable TLS files.
    """
    timeout_s = min(_ANSWER_S, settings.attempt_s)
    connection: http.client.HTTPConnection
    if endpoint.scheme == "https":
        context = settings.tls.context()
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    try:
        connection.connect()  # connect first, so that connecting is not part of the round trip
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
