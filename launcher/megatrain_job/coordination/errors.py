"""The errors of the etcd client. Those that a caller can handle derive from CoordinationError."""

from __future__ import annotations

from megatrain.contracts.errors import CoordinationError


class UnknownOutcomeError(CoordinationError):
    """A write that must not be repeated was sent, and no response came: read to see whether it was applied."""


class CompactedError(CoordinationError):
    """etcd no longer has the requested revision: read again."""


class FutureRevisionError(CoordinationError):
    """etcd has not reached the requested revision: it was emptied or restored since then. Read again."""


class NoSpaceError(CoordinationError):
    """etcd's database has reached its quota and takes no writes until it is compacted and the alarm is disarmed."""


class LeaseExistsError(CoordinationError):
    """A lease with this id was granted before."""


class LeaseLostError(CoordinationError):
    """The lease does not exist: it ran out or was revoked, and its keys are gone."""


class LeadershipLostError(CoordinationError):
    """Another candidate may lead by now; nothing was written."""


class InvalidResponseError(Exception):
    """The bytes are not an HTTP response, or not a response of etcd."""


class AttemptError(Exception):
    """One try failed at one endpoint; another endpoint may succeed. The client does not raise it to its callers."""

    def __init__(self, reason: str, *, may_have_applied: bool) -> None:
        super().__init__(reason)
        self.may_have_applied = may_have_applied
