"""Whether this host receives its orders. One that does not must be in no new round: it would neither start nor stop."""

from __future__ import annotations

from megatrain.coordination.watch import WatchLimits

_PROOFS_S = 2 * WatchLimits().silence_s
"""An idle watch proves within half of this that it works; after an outage it works again within the whole."""


def deaf_after_s(lease_ttl_s: float) -> float:
    """Return after how many seconds of unheard orders a host counts as one without a lease."""
    return max(lease_ttl_s, _PROOFS_S)


def deaf_within_s(lease_ttl_s: float) -> float:
    """Return after how many seconds, at the latest, a host that does not receive a halt counts as one without a lease.

    A stream that delivers nothing, while its member answers other calls, seems to work until it is reopened.
    """
    return deaf_after_s(lease_ttl_s) + WatchLimits().renew_s


def unfit_after_s(lease_ttl_s: float) -> float:
    """Return after how many seconds of unheard orders a host with a lease says that it is not fit.

    Longer than an etcd that is away can be the reason: beyond the lease's life the lease says so.
    """
    return deaf_after_s(lease_ttl_s) + _PROOFS_S


class Hearing:
    """Judges from look to look. All times are seconds on one monotonic clock."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._held_since: float | None = None
        self._told = ""

    def look(self, now: float, unheard_s: float, trouble: str, *, is_lease_held: bool) -> str:
        """Return why this host is not fit, empty when it is. The reason stays the same until it receives orders again.

        Only the time counts in which etcd kept the host's lease: while etcd is away no host receives anything, and when
        it is back a watch may take a moment longer than a lease.
        """
        if not is_lease_held:
            self._held_since = None
            return self._told
        if self._held_since is None:
            self._held_since = now
        is_deaf = min(unheard_s, now - self._held_since) > self._bound_s
        if is_deaf and not self._told:
            self._told = (
                f"its orders do not arrive: {trouble or f'for {self._bound_s:g} s nothing proved that they do'}"
            )
        elif not is_deaf and unheard_s <= self._bound_s:
            self._told = ""
        return self._told
