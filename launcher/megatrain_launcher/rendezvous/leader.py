"""The leader of the rendezvous: the elected agent, which writes rounds and halts. The other agents only follow.

The leader decides from its view, writes only while it leads, and decides again only after it has seen its own writes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Halt, Round, RoundHost
from megatrain_job.coordination.election import Election, Leadership
from megatrain_job.coordination.errors import LeadershipLostError, LeaseLostError, UnknownOutcomeError
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.maintenance import HistoryTrimmer
from megatrain_job.coordination.wire import Compare, Delete, KeyRange, Operation, Put
from megatrain_launcher.rendezvous.membership import RendezvousMembership
from megatrain_launcher.rendezvous.rule import BeginRound, EndRound, Since, decide
from megatrain_launcher.rendezvous.view import View

_logger = logging.getLogger(__name__)
_TICK_S = 0.2
_RETRY_S = 0.5
_END_S = 2.0
_NUM_KEPT = 50
"""The number of rounds and halts that are kept in etcd for people to read."""


class RendezvousLeader:
    """A thread that takes part in the election, and leads while elected, until `close`."""

    def __init__(self, membership: RendezvousMembership) -> None:
        self._membership = membership
        self._keys = membership.keys
        self._settings = membership.settings
        self._doubt_s = -math.inf
        self._trimmer = HistoryTrimmer(membership.client)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous leader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. The election key is removed with the membership's lease."""
        self._is_closed.set()
        self._thread.join(_END_S)  # it may wait for an unavailable etcd

    @property
    def _is_over(self) -> bool:
        return self._is_closed.is_set() or self._membership.is_over

    def _run(self) -> None:
        election = Election(self._membership.client, self._keys.election)
        while not self._is_over:
            keeper = None if self._membership.has_failed else self._membership.keeper
            try:
                if keeper is not None:
                    self._campaign(election, keeper)
            except (LeaseLostError, LeadershipLostError) as error:
                _logger.info("rendezvous: no longer the leader: %s", error)
            except CoordinationError as error:
                if not self._is_over:
                    _logger.warning("rendezvous: %s; trying again", error)
            except Exception:  # a bug: let another agent lead, and take part in the election again
                _logger.exception("rendezvous: this leader failed")
            self._is_closed.wait(_RETRY_S if keeper is not None else _TICK_S)

    def _campaign(self, election: Election, keeper: LeaseKeeper) -> None:
        leadership = election.campaign(keeper, self._membership.host, is_cancelled=lambda: self._is_over)
        if leadership is None:
            return
        is_fit = False
        try:
            self._lead(leadership)
            is_fit = True
        except CoordinationError:
            is_fit = True
            raise
        finally:
            if self._membership.has_failed or not is_fit:  # let an agent with a current view lead
                leadership.resign()

    def _lead(self, leadership: Leadership) -> None:
        """Decide and write until this agent leaves. Raises: CoordinationError, such as LeadershipLostError."""
        leadership.renew_revision()
        self._membership.refresh()  # the view must include all writes of the previous leader
        view, since = self._membership.view, Since()
        while not self._is_over:
            decision, since = decide(
                time.monotonic(), view, self._settings, since, is_absence_certain=self._is_absence_certain()
            )
            if decision is not None:
                written = self._write(leadership, view, decision)
                if self._membership.wait_beyond(written - 1, _RETRY_S).revision < written:
                    self._membership.refresh()
            else:
                self._membership.wait_beyond(view.revision, _TICK_S)
                self._trim()
            view = self._membership.view

    def _is_absence_certain(self) -> bool:
        """Return whether other agents have had time to register again after etcd may have lost all leases.

        If this agent lost its lease, or does not know whether it still has one, other agents may have lost theirs too.
        """
        keeper, now_s = self._membership.keeper, time.monotonic()
        if keeper is None or keeper.state is not LeaseState.HELD:
            self._doubt_s = now_s
        return now_s - max(self._doubt_s, self._membership.lost_s) > self._settings.ttl_s

    def _write(self, leadership: Leadership, view: View, decision: EndRound | BeginRound) -> int:
        """Write a decision; return the revision at which the view shows whether the write was applied."""
        key, operations = self._operations(view, decision)
        try:
            return leadership.txn(operations, [Compare.is_absent(key)]).revision
        except UnknownOutcomeError:
            leadership.renew_revision()
            self._membership.refresh()
            return self._membership.view.revision

    def _operations(self, view: View, decision: EndRound | BeginRound) -> tuple[str, Sequence[Operation]]:
        number = decision.number
        if isinstance(decision, EndRound):
            _logger.info("rendezvous: round %d is over: %s", number, decision.reason)
            halt = Halt(number, decision.reason, is_saving=False, created_unix_s=time.time())
            return self._keys.halt(number), [Put(self._keys.halt(number), encode(halt))]
        _logger.info("rendezvous: round %d: %s (%s)", number, ", ".join(decision.hosts), decision.reason)
        records = [view.records[host] for host in decision.hosts]
        round_ = Round(
            number=number,
            world_size=len(records),
            hosts=tuple(
                RoundHost(record.host, record.session, record.address, rank, 1) for rank, record in enumerate(records)
            ),
            store_address=records[0].address,
            store_port=records[0].store_port,
            reason=decision.reason,
            driver=self._membership.host,
            created_unix_s=time.time(),
        )
        operations: list[Operation] = [Put(self._keys.round(number), encode(round_))]
        if number > _NUM_KEPT:
            operations += [
                Delete(KeyRange(name(0).encode(), name(number - _NUM_KEPT).encode()))
                for name in (self._keys.round, self._keys.halt)
            ]
        return self._keys.round(number), operations

    def _trim(self) -> None:
        try:
            self._trimmer.tick(time.monotonic())
        except CoordinationError as error:
            # this user may have no permission to compact; etcd can compact automatically
            _logger.debug("rendezvous: history was not trimmed: %s", error)
