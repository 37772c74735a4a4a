"""The driver's campaign: wait for the election, lead a term, step down when leadership is lost or in doubt, and
campaign again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Election
from megatrain_job.coordination.errors import LeadershipLostError, LeaseLostError, NoSpaceError
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.wire import KeyValue
from megatrain_launcher.driver.incident_files import IncidentFiles
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.resume_point_watch import ResumePointWatch
from megatrain_launcher.driver.run_watch import RunWatch
from megatrain_launcher.driver.term import Term
from megatrain_launcher.liveness import Liveness, LivenessReader
from megatrain_launcher.notify.notifier import MakeNotifier

_logger = logging.getLogger(__name__)
_TICK_S = 0.2
_PAUSE_S = 0.5
_REPORT_S = 1.0


class SteadyClock:
    """Unix seconds that never jump: the system's time at the start, advanced by the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset


class Driver:
    """A candidate for the election, and the driver while it is elected. `run` must be called from one thread only.

    `keeper` returns the current lease keeper; a host that lost its lease takes a new one. `incidents_directory`: the
    directory of the incident files. `watched`: directories of the run, each with a text about the consequence of its
    removal (see RunWatch). `checkpoints`: the directory of the run's checkpoints (see ResumePointWatch). `leading` is
    set while this driver is elected. `is_suspected` returns whether something on this host points to the death of the
    elected driver; this candidate then checks that at once. `make_notifier` makes the object that sends notifications
    during a term.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        keeper: Callable[[], LeaseKeeper],
        host: str,
        policy: Policy,
        *,
        leading: threading.Event,
        clock: Callable[[], float],
        incidents_directory: Path | None = None,
        watched: Mapping[Path, str] | None = None,
        checkpoints: Path | None = None,
        is_suspected: Callable[[], bool] = lambda: False,
        make_notifier: MakeNotifier | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._keeper = keeper
        self._host = host
        self._policy = policy
        self._files = IncidentFiles(incidents_directory)
        self._incidents_directory = incidents_directory
        self._run_watch = RunWatch(watched or {}, self._write_again, lambda: self.is_leading)
        self._resume_point_watch = ResumePointWatch(checkpoints, lambda: self.is_leading)
        self._clock = clock
        self._make_notifier = make_notifier
        self._liveness = LivenessReader()
        self._is_leading = leading
        self._is_suspected = is_suspected
        self._reason = ""

    @property
    def is_leading(self) -> bool:
        return self._is_leading.is_set()

    @property
    def reason(self) -> str:
        """The driver's current activity as a sentence; empty while it does not lead."""
        return self._reason if self.is_leading else ""

    def run(self, stop: threading.Event) -> None:
        """Campaign and drive until `stop` is set. After an error of etcd, log it and try again."""
        with self._files, self._run_watch, self._resume_point_watch:
            self._run(stop)

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self._client.gateway.is_closed:
            try:
                self._campaign(stop)
            except (LeadershipLostError, LeaseLostError) as error:
                _logger.warning("driver %s stepped down: %s", self._host, error)
                stop.wait(_TICK_S)
            except CoordinationRefusedError as error:
                _logger.error("driver %s was refused by etcd: %s", self._host, error)
                stop.wait(_PAUSE_S)
            except NoSpaceError as error:
                text = (
                    "no host can drive job %s: etcd accepts no writes; training continues, but failures are not "
                    "handled: %s"
                )
                _logger.error(text, self._keys.job, error)
                stop.wait(_REPORT_S)
            except CoordinationError as error:
                _logger.warning("driver %s cannot reach etcd: %s", self._host, error)
                stop.wait(_PAUSE_S)

    def _campaign(self, stop: threading.Event) -> None:
        keeper = self._keeper()
        if keeper.state is not LeaseState.HELD:
            stop.wait(_TICK_S)
            return
        leadership = Election(self._client, self._keys.election).campaign(
            keeper,
            self._host,
            is_cancelled=lambda: stop.is_set() or keeper is not self._keeper(),
            is_dead=self._is_dead,
            is_suspected=self._is_suspected,
        )
        if leadership is None:
            return
        _logger.info("host %s drives job %s", self._host, self._keys.job)
        self._is_leading.set()
        is_given_up = True
        try:
            notifier = None if self._make_notifier is None else self._make_notifier(leadership)
            with Term(
                self._client,
                self._keys,
                self._host,
                self._policy,
                leadership,
                self._files,
                self._run_watch,
                self._resume_point_watch,
                self._liveness,
                self._clock,
                notifier,
            ) as term:
                term.lead(stop, self._set_reason)
            is_given_up = False
        except CoordinationError as error:
            # this host has no rights to read or write the driver's keys; another host may have them
            is_given_up = isinstance(error, CoordinationRefusedError)
            raise
        finally:
            self._is_leading.clear()
            if is_given_up or stop.is_set():
                # this host's lease is still valid: without resigning, no other host could be elected
                with suppress(CoordinationError):
                    leadership.resign()

    def _write_again(self, path: Path) -> None:
        if path == self._incidents_directory:
            self._files.write_again()

    def _is_dead(self, candidate: KeyValue) -> bool:
        """Return whether a candidate's executor is proven dead: its port refuses, or answers with another session."""
        key = self._keys.host(candidate.value.decode(errors="replace"))
        item = self._client.get(key)
        if item is None or item.lease_id != candidate.lease_id:
            return False
        try:
            record = decode(HostRecord, item.value, key)
        except CoordinationError:  # an unreadable record is no proof
            return False
        liveness, _ = self._liveness.ask(record.address, record.liveness_port, record.session)
        return liveness is Liveness.DEAD

    def _set_reason(self, reason: str) -> None:
        self._reason = reason
