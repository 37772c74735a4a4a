"""The executor's client of the standby server: keeps a server running, starts workers through it, and reports exits.

The keeper thread starts the server, reads its messages and starts another server when it dies. The server exits with
the keeper thread, so the executor's death ends the server and its workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import MegatrainError
from megatrain.contracts.exit_codes import end_text
from megatrain.programs.processes import living_members
from megatrain_launcher.standby import messages
from megatrain_launcher.standby.messages import Message, WorkerStart, receive_message, send_message

_logger = logging.getLogger(__name__)

DEFAULT_PRELOAD: Final = ("megatrain.training.worker",)
_ANSWER_TIMEOUT_S: Final = 60.0
"""Timeout for forks, which take milliseconds, or seconds with swapped-out memory."""
_KILL_TIMEOUT_S: Final = 5.0
"""A server that has not confirmed a kill within this time counts as stuck."""
_CLOSE_S: Final = 10.0
_MAX_DEATHS: Final = 2
"""After this many servers in a row died before they were ready, the next server imports nothing in advance."""
_RESTART_DELAY_S: Final = 0.5
_SWEEP_INTERVAL_S: Final = 0.01


class StandbyError(MegatrainError):
    """A worker could not be started on this host."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The exit of a worker's process. `exit_code` is negative for a signal. `note`: further information."""

    pid: int
    exit_code: int
    at_unix_s: float
    note: str = ""
    is_killed: bool = False
    """Whether the server killed it because of a KILL message."""


@dataclass(slots=True)
class _State:
    """The state shared with the keeper thread; guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket | None = None
    is_ready: bool = False
    is_closing: bool = False
    generation: int = 0
    """The number of servers that have died."""
    answers: list[Message] = field(default_factory=list)
    num_killed_answers: int = 0
    living: dict[int, bool] = field(default_factory=dict)
    """By pid, the workers whose group has processes left; the value: whether the worker itself still runs."""
    exits: list[WorkerExit] = field(default_factory=list)
    problem: str = ""


class StandbyClient(Closable):
    """Starts the standby server, and workers through it: the server forks them with `preload` imported.

    `environment`: the server's environment; it should contain the workers' variables that libraries read when they are
    loaded. `store`: the socket on which the host's store listens; a child of the server serves the store, without the
    keys of an earlier server. None: no store.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        store: socket.socket | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._preload = tuple(preload)
        self._store = store
        self._environment = dict(os.environ if environment is None else environment)
        self._directory = directory
        self._on_change: Callable[[], None] | None = None
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._state = _State()
        self._keeper = threading.Thread(target=self._keep, name="standby-keeper", daemon=True)
        self._keeper.start()

    def set_change_callback(self, on_change: Callable[[], None]) -> None:
        """Set `on_change`.

        The keeper thread calls it when a worker exits, when a worker's group is gone, and when the server is ready.
        """
        self._on_change = on_change

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
            return  # the workers of a dead server are killed by _clean_up_after
        with state.changed:
            if not state.changed.wait_for(
                lambda: state.num_killed_answers > answered or state.generation > generation, _KILL_TIMEOUT_S
            ):
                _logger.warning("the standby server does not respond; it and all its workers are killed")
                self._kill_server()

    def kill_all(self) -> None:
        """Kill all remaining process groups of workers; `wait_gone` waits until they are gone."""
        with self._state.changed:
            pids = list(self._state.living)
        self.kill(pids)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until no worker's group has a process left; return whether that is so."""
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
        self._kill_server()  # no worker is left, or the rest cannot be killed; the server may still import modules
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
            self._kill_server()
            return False
        return True

    def _kill_server(self) -> None:
        with self._state.changed:
            if self._state.process is not None:
                self._state.process.kill()

    def _await_answers(self, count: int, generation: int) -> list[Message]:
        state = self._state
        with state.changed:
            if not state.changed.wait_for(
                lambda: len(state.answers) >= count or state.generation > generation or state.is_closing,
                _ANSWER_TIMEOUT_S,
            ):
                self._kill_server()
            answers, state.answers = state.answers, []
            return answers

    # The keeper thread's methods

    def _keep(self) -> None:
        num_deaths = 0
        while True:
            with self._state.changed:
                if self._state.is_closing:
                    return
            was_ready = self._run_server(self._preload if num_deaths < _MAX_DEATHS else ())
            num_deaths = 0 if was_ready and num_deaths < _MAX_DEATHS else num_deaths + 1
            with self._state.changed:
                if num_deaths == _MAX_DEATHS:
                    names = ", ".join(self._preload)
                    self._state.problem = (
                        f"importing {names} crashes the standby server; workers start without preloaded modules, so "
                        "they start slowly"
                    )
                if num_deaths:
                    self._state.changed.wait_for(lambda: self._state.is_closing, _RESTART_DELAY_S)

    def _run_server(self, preload: Sequence[str]) -> bool:
        """Start a server and read its messages until it dies. Return whether it was ready, which any message shows."""
        ours, its_own = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(_KILL_TIMEOUT_S), 0))
        with ours:
            with its_own:
                process = self._spawn(its_own, preload)
            with self._state.changed:
                self._state.process, self._state.channel = process, ours
                if self._state.is_closing:
                    process.kill()
            was_ready = False
            while (received := receive_message(ours)) is not None:
                self._take_message(received[0])
                was_ready = True
            with self._state.changed:
                self._state.is_ready = False
        process.kill()  # the server closed its side of the channel, or died
        code = process.wait()
        with self._state.changed:
            is_expected = self._state.is_closing
        if not is_expected:
            _logger.warning("the standby server (pid %d) %s; starting another", process.pid, end_text(code))
        self._clean_up_after(process.pid)
        return was_ready

    def _spawn(self, channel: socket.socket, preload: Sequence[str]) -> subprocess.Popen[bytes]:
        passed = [channel.fileno()]
        store = "none"
        if self._store is not None:
            passed.append(self._store.fileno())
            store = str(self._store.fileno())
        program = "megatrain_launcher.standby"
        command = [sys.executable, "-m", program, str(channel.fileno()), str(os.getpid()), store, *preload]
        return subprocess.Popen(
            command,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=self._environment,
            cwd=self._directory,
            start_new_session=True,
        )

    def _take_message(self, message: Message) -> None:
        state = self._state
        with state.changed:
            match message["kind"]:
                case messages.READY:
                    state.is_ready = True
                    state.problem = "; ".join(message["problems"]) or state.problem
                case messages.STARTED:
                    state.living[message["pid"]] = True
                    state.answers.append(message)
                case messages.REFUSED:
                    state.answers.append(message)
                case messages.ENDED:
                    state.living[message["pid"]] = False
                    found = WorkerExit(
                        message["pid"], message["exit_code"], message["at_unix_s"], is_killed=message["is_killed"]
                    )
                    state.exits.append(found)
                case messages.KILLED:
                    state.num_killed_answers += 1
                case messages.GONE:
                    del state.living[message["pid"]]
            state.changed.notify_all()
        self._notify_change()

    def _clean_up_after(self, server_pid: int) -> None:
        """Kill the workers of a dead server, and add the exits that it could not report."""
        state = self._state
        with state.changed:
            groups = set(state.living)
            died = [pid for pid, is_living in state.living.items() if is_living]
        while groups and (left := living_members(groups, server_pid)):
            for stat in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stat.pid, signal.SIGKILL)
            threading.Event().wait(_SWEEP_INTERVAL_S)
        note = "its standby server died, so all workers of the host were killed"
        with state.changed:
            state.exits += [WorkerExit(pid, -signal.SIGKILL, time.time(), note) for pid in died]
            state.living.clear()
            state.process = state.channel = None
            state.generation += 1
            state.changed.notify_all()
        self._notify_change()

    def _notify_change(self) -> None:
        if self._on_change is not None:
            self._on_change()
