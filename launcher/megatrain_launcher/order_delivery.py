"""Whether the driver's orders reach this host. If not, it must not join a new round, which it could neither start nor
stop.
"""

from __future__ import annotations

from megatrain_job.coordination.watch import WatchLimits

_PROOFS_S = 2 * WatchLimits().silence_s
"""An idle watch proves within half of this time that it works. After an outage it works again within all of it."""


def orders_lost_after_s(lease_ttl_s: float) -> float:
    """Return the seconds without orders after which a host counts as one without a lease."""
    return max(lease_ttl_s, _PROOFS_S)


def orders_lost_within_s(lease_ttl_s: float) -> float:
    """Return the most seconds until a host that receives no halt counts as one without a lease.

    A stream that delivers nothing, while its member answers other calls, seems to work until it is reopened.
    """
    return orders_lost_after_s(lease_ttl_s) + WatchLimits().renew_s


def unfit_after_s(lease_ttl_s: float) -> float:
    """Return the seconds without orders after which a host with a lease reports that it is not fit.

    An outage of etcd alone cannot explain so long a time: a longer outage is visible as a lost lease.
    """
    return orders_lost_after_s(lease_ttl_s) + _PROOFS_S


class OrderDelivery:
    """Checks at each poll whether orders arrive. All times are seconds on one monotonic clock."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._held_since: float | None = None
        self._reason = ""

    def poll(self, now: float, unconfirmed_s: float, problem: str, *, is_lease_held: bool) -> str:
        """Return why this host is not fit, empty if it is. The reason stays the same until the host receives orders
        again.

        Only time in which etcd kept the host's lease counts: while etcd is unavailable no host receives anything, and
        after that a watch may take a moment longer than a lease.
        """
        if not is_lease_held:
            self._held_since = None
            return self._reason
        if self._held_since is None:
            self._held_since = now
        has_lost_orders = min(unconfirmed_s, now - self._held_since) > self._bound_s
        if has_lost_orders and not self._reason:
            self._reason = f"its orders do not arrive: {problem or f'no sign of them for {self._bound_s:g} s'}"
        elif not has_lost_orders and unconfirmed_s <= self._bound_s:
            self._reason = ""
        return self._reason
