"""What etcd may answer that a caller can do something about. Their base is `contracts.errors.CoordinationError`."""

from __future__ import annotations

from megatrain.contracts.errors import CoordinationError


class UnknownOutcomeError(CoordinationError):
    """A write that must not be repeated was sent, and no answer came: read to see whether it was applied."""


class CompactedError(CoordinationError):
    """The revision asked for is no longer kept: read anew."""


class NoSpaceError(CoordinationError):
    """etcd's database has reached its quota and takes no writes until it is compacted and the alarm is disarmed."""


class LeaseExistsError(CoordinationError):
    """A lease with this id was granted before."""


class LeaseLostError(CoordinationError):
    """The lease is not there: it ran out or was revoked, and its keys are gone."""


class LeadershipLostError(CoordinationError):
    """Somebody else may lead by now; nothing was written."""
