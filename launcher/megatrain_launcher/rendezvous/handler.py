"""The RendezvousHandler that torch's agent calls: it requests a round, waits for it, and returns a rank and a store.

Ranks here are those of agents; torch computes the ranks of their workers itself, through the round's store. Each round
has a new store server on its first host, because torchrun's workers share one store without a prefix and would find the
keys of an earlier round there.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.process import ROUND_COUNTER_VARIABLE, ROUND_VARIABLE
from megatrain.contracts.records.rounds import Round
from megatrain_job.commands.etcd_flags import PASSWORD_VARIABLE
from megatrain_job.coordination.client import EtcdClient
from megatrain_launcher.rendezvous.leader import RendezvousLeader
from megatrain_launcher.rendezvous.membership import RendezvousMembership, own_record
from megatrain_launcher.rendezvous.rule import still_stopping
from megatrain_launcher.rendezvous.settings import RendezvousSettings, read_settings
from megatrain_launcher.rendezvous.view import View

_logger = logging.getLogger(__name__)
BACKEND = "megatrain"
_POLL_S = 0.25
"""The interval at which a waiting agent checks its deadline and lets Python handle signals."""
_CONNECT_S = 10.0
_STORE_S = 60.0
_LINGER_S = 1.0
"""The time for which the store of a finished round is kept for the last reads of other agents."""


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a handler for torchrun's options. Removes the password from the environment, which workers inherit.

    Raises: ConfigError.
    """
    settings = read_settings(
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.config,
        address=parameters.local_addr or "",
        environment=os.environ,
    )
    os.environ.pop(PASSWORD_VARIABLE, None)
    return MegatrainRendezvous(settings)


class MegatrainRendezvous(RendezvousHandler):  # type: ignore[misc]
    """One agent's side of the rendezvous. The first `next_rendezvous` connects to etcd."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._client: EtcdClient | None = None
        self._membership: RendezvousMembership | None = None
        self._leader: RendezvousLeader | None = None
        self._server: TCPStore | None = None
        self._round: Round | None = None
        self._is_shut_down = False
        # torch does not call shutdown after a signal, because other backends would close the rendezvous permanently
        atexit.register(self.shutdown)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers use the round's store."""
        return True

    def get_run_id(self) -> str:
        return self._settings.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing, because a later agent may begin a new round."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if this agent's round is over, so that torch restarts the workers, else 0. Makes no call to etcd."""
        if self._membership is None or self._round is None:
            return 0
        return int(self._membership.view.is_over(self._round.number))

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round that includes this agent.

        Raises: RendezvousConnectionError when etcd cannot be reached or refuses access; RendezvousTimeoutError when too
        few agents joined in time; ConfigError.
        """
        try:
            return self._next()
        except CoordinationError as error:
            raise RendezvousConnectionError(f"--rdzv-backend={BACKEND}: {error}") from error

    def shutdown(self) -> bool:
        """Leave the job. The other agents continue with fewer agents, or wait for a replacement."""
        atexit.unregister(self.shutdown)
        if not self._is_shut_down:
            self._is_shut_down = True
            if self._membership is not None:
                self._membership.leave()
                self._linger(self._membership)
                if self._leader is not None:
                    self._leader.close()
                self._membership.close()
            if self._client is not None:
                self._client.close()
            self._server = None
        return True

    def _next(self) -> RendezvousInfo:
        membership = self._join()
        deadline = time.monotonic() + self._settings.join_timeout_s
        problem = ""
        after = 0 if self._round is None else self._round.number
        self._round = None
        while True:
            self._server = _open_store()
            membership.ask(self._server.port, after)
            found, deadline = self._wait_for_round(membership, after, deadline, problem)
            store, problem = self._enter(membership, found)
            if store is not None:
                break
            _logger.warning("rendezvous: round %d was not formed: %s", found.number, problem)
            after = found.number
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(self._explain(membership.view, problem))
        part = found.part_of(membership.host, membership.session)
        assert part is not None
        self._round = found
        # unlike torchrun's restart count, this number is the same on all agents
        os.environ[ROUND_VARIABLE] = str(found.number)
        os.environ[ROUND_COUNTER_VARIABLE] = membership.client.gateway.cluster_id
        return RendezvousInfo(
            PrefixStore(f"{self._settings.run_id}/{found.number}", store),
            part.first_rank,
            found.world_size,
            RendezvousStoreInfo(found.store_address, found.store_port),
        )

    def _join(self) -> RendezvousMembership:
        if self._membership is None:
            client = self._client = EtcdClient(self._settings.etcd)
            membership = RendezvousMembership(client, self._settings, own_record(self._settings))
            membership.open()
            self._membership = membership
            self._leader = RendezvousLeader(membership)
        return self._membership

    def _wait_for_round(
        self, membership: RendezvousMembership, after: int, deadline: float, problem: str
    ) -> tuple[Round, float]:
        """Wait for a round that includes this agent; return it and the deadline for its formation."""

        def is_ours(view: View) -> bool:
            live = view.live_round
            return (
                live is not None
                and live.number > after
                and live.part_of(membership.host, membership.session) is not None
            )

        while True:
            view = membership.wait(is_ours, _POLL_S)
            live = view.live_round
            if live is not None and is_ours(view):
                return live, deadline
            if live is not None and live.number > after:
                # a round of other agents trains: this agent waits as a spare, without a deadline
                deadline = time.monotonic() + self._settings.join_timeout_s
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(self._explain(view, problem))

    def _enter(self, membership: RendezvousMembership, found: Round) -> tuple[TCPStore | None, str]:
        """Connect to the round's store and wait until all its agents have connected.
        Return the store, or None and the reason why the round was not formed.
        """
        is_first = found.hosts[0].session == membership.session
        server = self._server
        if not is_first:
            self._server = server = None
        deadline = time.monotonic() + _CONNECT_S
        store_text = f"store of {found.hosts[0].host} at {found.store_address}:{found.store_port}"
        try:
            while server is None:
                if membership.view.is_over(found.number):
                    return None, _why_over(membership.view, found)
                server = _connect(found, deadline)
        except (OSError, RuntimeError) as error:
            return None, f"{store_text} cannot be reached: {error}"
        membership.arrive(found.number)

        def is_settled(view: View) -> bool:
            return view.is_over(found.number) or not _missing(view, found)

        deadline = time.monotonic() + _CONNECT_S
        view = membership.wait(is_settled, _POLL_S)
        while not is_settled(view) and time.monotonic() < deadline:
            view = membership.wait(is_settled, _POLL_S)
        if view.is_over(found.number):
            return None, _why_over(view, found)
        missing = _missing(view, found)
        return (None, f"{', '.join(missing)} did not reach the {store_text}") if missing else (server, "")

    def _explain(self, view: View, problem: str) -> str:
        waiting = sorted(host for host in view.records if view.is_waiting(host))
        stopping = still_stopping(view)
        stopping_text = f"; workers still stop on {', '.join(stopping)}" if stopping else ""
        return (
            f"--rdzv-id={self._settings.run_id}: no round of --nnodes={self._settings.host_range} hosts was formed "
            f"within {self._settings.join_timeout_s:g} s: waiting: {', '.join(waiting) or 'no host'}{stopping_text}"
            f"{'; ' + problem if problem else ''}. Start the missing agents, or lower --nnodes"
        )

    def _linger(self, membership: RendezvousMembership) -> None:
        """If the round's store is here, keep it until the round's other agents have left, up to _LINGER_S."""
        found = self._round
        if found is None or self._server is None:
            return

        def is_alone(view: View) -> bool:
            return not any(view.is_present(part.host, part.session) for part in found.hosts)

        try:
            membership.wait(is_alone, _LINGER_S)
        except CoordinationError as error:
            _logger.debug("rendezvous: %s", error)


def _missing(view: View, found: Round) -> tuple[str, ...]:
    """Return the hosts of a round that have not reached its store."""

    def has_arrived(host: str) -> bool:
        status = view.statuses.get(host)
        return status is not None and not view.is_waiting(host) and status.round >= found.number

    return tuple(part.host for part in found.hosts if not has_arrived(part.host))


def _why_over(view: View, found: Round) -> str:
    halt = view.halts.get(found.number)
    return halt.reason if halt is not None else "there is a newer round"


def _open_store() -> TCPStore:
    """Return a new store with its server in this process, at a free port."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=_STORE_S))
    return store


def _connect(found: Round, deadline: float) -> TCPStore | None:
    """Return a client of a round's store; None if it does not listen yet. Raises: OSError, RuntimeError."""
    try:
        # connect first: torch's client would continue to wait after the round is over
        socket.create_connection((found.store_address, found.store_port), _POLL_S).close()
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(_POLL_S / 5)
        return None
    timeout = timedelta(seconds=_CONNECT_S)
    store = TCPStore(found.store_address, found.store_port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(timedelta(seconds=_STORE_S))
    return store
