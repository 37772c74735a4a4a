"""The executor's client of the standby server: starts, signals and kills workers, and returns their exits."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import MegatrainError
from megatrain_launcher.standby import messages
from megatrain_launcher.standby.messages import Message, WorkerStart, send_message
from megatrain_launcher.standby.server_keeper import ServerKeeper, ServerState, WorkerExit

_logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S: Final = 60.0
"""Timeout for a server to become ready, and for forks, which take milliseconds, or seconds with swapped-out memory."""
_KILL_TIMEOUT_S: Final = 5.0
"""A server that has not confirmed a kill within this time counts as stuck."""
_CLOSE_S: Final = 10.0


class StandbyError(MegatrainError):
    """A worker could not be started on this host."""


class StandbyClient(Closable):
    """Starts the standby server, and workers through it: the server forks them with `preload` imported.

    `environment`: the server's environment; it should contain the workers' variables that libraries read when they are
    loaded. `store`: the socket on which the host's store listens; a child of the server serves the store, without the
    keys of an earlier server. None: no store.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str],
        store: socket.socket | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._preload = tuple(preload)
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._state = ServerState()
        variables = dict(os.environ if environment is None else environment)
        self._keeper = ServerKeeper(self._state, self._preload, store, variables, directory)

    def set_change_callback(self, on_change: Callable[[], None]) -> None:
        """Set the function that the keeper thread calls when something has changed (see ServerKeeper)."""
        self._keeper.on_change = on_change

    @property
    def pid(self) -> int | None:
        """The current server's pid; None while there is none."""
        with self._state.changed:
            return None if self._state.process is None else self._state.process.pid

    @property
    def living(self) -> frozenset[int]:
        """The pids of workers that have not exited."""
        with self._state.changed:
            return frozenset(pid for pid, is_living in self._state.living.items() if is_living)

    @property
    def problem(self) -> str:
        """The problem that an operator should fix; empty if there is none."""
        with self._state.changed:
            return self._state.problem

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the server is ready to fork workers; return whether it is."""
        with self._state.changed:
            return self._state.changed.wait_for(lambda: self._state.is_ready, timeout_s)

    def start_workers(self, starts: Sequence[WorkerStart], outputs: Sequence[int]) -> list[int]:
        """Fork workers, each with its descriptor in `outputs` as stdout and stderr, and return their pids.

        Waits until the server is ready. Raises: StandbyError if not all could be started; the started ones are killed.
        """
        with self._starting:
            state = self._state
            with state.changed:
                if not state.changed.wait_for(lambda: state.is_ready or state.is_closing, _ANSWER_TIMEOUT_S):
                    raise StandbyError(
                        f"the standby server is not ready after {_ANSWER_TIMEOUT_S:.0f} s of importing "
                        f"{', '.join(self._preload)}; check whether the file system of the Python packages is slow"
                    )
                generation = state.generation
                state.answers.clear()
            for start, output in zip(starts, outputs, strict=True):
                self._send(start.to_message(), output)
            answers = self._await_answers(len(starts), generation)
        pids = [answer["pid"] for answer in answers if answer["kind"] == messages.STARTED]
        if len(pids) < len(starts):
            self.kill(pids)
            refused = [answer["reason"] for answer in answers if answer["kind"] == messages.REFUSED]
            raise StandbyError(refused[0] if refused else "the standby server died while it started workers")
        return pids

    def take_exits(self) -> list[WorkerExit]:
        """Return the exits of workers since the last call, in order."""
        with self._state.changed:
            taken, self._state.exits = self._state.exits, []
            return taken

    def signal_workers(self, pids: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to live workers, but not to the processes that they started."""
        self._send({"kind": messages.SIGNAL, "pids": list(pids), "signal": int(number)})

    def kill(self, pids: Iterable[int]) -> None:
        """Kill the process groups of workers, including groups whose worker has exited."""
        state = self._state
        with state.changed:
            generation, answered = state.generation, state.num_killed_answers
            wanted = [pid for pid in pids if pid in state.living]
        if not wanted or not self._send({"kind": messages.KILL, "pids": wanted}):
            return  # the workers of a dead server are killed by the keeper thread
        with state.changed:
            if not state.changed.wait_for(
                lambda: state.num_killed_answers > answered or state.generation > generation, _KILL_TIMEOUT_S
            ):
                _logger.warning("the standby server does not respond; it and all its workers are killed")
                state.kill_server()

    def kill_all(self) -> None:
        """Kill all remaining process groups of workers; `wait_gone` waits until they are gone."""
        with self._state.changed:
            pids = list(self._state.living)
        self.kill(pids)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until no worker's group has a process left; return whether none has."""
        with self._state.changed:
            return self._state.changed.wait_for(lambda: not self._state.living, timeout_s)

    def close(self) -> None:
        """Kill all workers and the server, and stop the thread. A second call does nothing."""
        state = self._state
        with state.changed:
            state.is_closing = True
            state.changed.notify_all()
        self.kill_all()
        self.wait_gone(_CLOSE_S)
        state.kill_server()  # no worker is left, or the rest cannot be killed; the server may still import modules
        self._keeper.join(_CLOSE_S)

    def _send(self, message: Message, descriptor: int | None = None) -> bool:
        with self._state.changed:
            channel = self._state.channel if self._state.is_ready else None
        if channel is None:
            return False
        try:
            with self._sending:
                send_message(channel, message, descriptor)
        except OSError:
            # the server is dead, or stuck after part of a message; the keeper thread handles its death
            self._state.kill_server()
            return False
        return True

    def _await_answers(self, count: int, generation: int) -> list[Message]:
        state = self._state
        with state.changed:
            if not state.changed.wait_for(
                lambda: len(state.answers) >= count or state.generation > generation or state.is_closing,
                _ANSWER_TIMEOUT_S,
            ):
                state.kill_server()
            answers, state.answers = state.answers, []
            return answers
