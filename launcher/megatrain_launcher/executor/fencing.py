"""When a host stops its workers on its own, because the rest of the job may have gone on without it (decision 11).

Pure. Step progress is proof of life: ranks that complete steps do so with all their peers, so nobody has replaced this
host. Only when the lease is gone by this host's own clock AND nothing moves, it must assume that it was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.host_records import Stall
from megatrain.contracts.rounds import Round


@dataclass(frozen=True, slots=True)
class LeaseView:
    """`valid_s`: for how long etcd has promised to keep the lease; not above 0 when that time is over."""

    valid_s: float
    is_lost: bool

    @property
    def is_gone(self) -> bool:
        """Whether others may by now believe this host dead."""
        return self.is_lost or self.valid_s <= 0


def fence_reason(lease: LeaseView, stall: Stall | None) -> str:
    """Return why the workers must be stopped although nobody ordered it; empty while they may go on."""
    if not lease.is_gone or stall is None:
        return ""
    doubt = "etcd says that its lease is lost" if lease.is_lost else "its lease was not renewed in time"
    return (
        f"this host fenced itself: {doubt}, and {stall.phase} has not moved for {stall.silent_s:.1f} s "
        f"(limit {stall.limit_s:.1f} s)"
    )


def needs_new_session(host: str, session: str, named_in: int, newest: Round | None) -> bool:
    """Say whether the job has gone on without this life of the host, once its workers are gone.

    `named_in`: the newest round that named this session, 0 for none.
    """
    if newest is None or named_in == 0:
        return False
    return newest.number > named_in and newest.part_of(host, session) is None
