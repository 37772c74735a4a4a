"""Which endpoint to ask next: the first one that has not failed, else the one that failed longest ago."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from megatrain_job.coordination.settings import Endpoint


class EndpointRing:
    """The endpoints of a cluster in this client's order. Safe to use from many threads."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        self._failed_at = dict.fromkeys(self._endpoints, 0)

    def __len__(self) -> int:
        return len(self._endpoints)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return self._endpoints

    def best(self) -> Endpoint:
        """Return the endpoint to ask now."""
        with self._lock:
            return min(self._endpoints, key=self._failed_at.__getitem__)

    def failed(self, endpoint: Endpoint) -> bool:
        """Put an endpoint last. Return whether it was in good standing before."""
        with self._lock:
            was_good = self._failed_at[endpoint] == 0
            self._failed_at[endpoint] = next(self._clock)
            return was_good

    def succeeded(self, endpoint: Endpoint) -> bool:
        """Restore an endpoint's good standing. Return whether it had failed before."""
        with self._lock:
            had_failed = self._failed_at[endpoint] != 0
            self._failed_at[endpoint] = 0
            return had_failed
