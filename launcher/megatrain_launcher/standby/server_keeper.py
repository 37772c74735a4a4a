"""Keeps a standby server running: the keeper thread starts it, reads its messages, and starts another when it dies.

The server exits with the keeper thread, so the executor's death ends the server and its workers.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatrain.contracts.exit_codes import end_text
from megatrain.programs.processes import living_members
from megatrain_launcher.standby import messages
from megatrain_launcher.standby.messages import Message, receive_message

_logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S: Final = 5.0
"""A server that accepts no message for this time counts as stuck."""
_MAX_DEATHS: Final = 2
"""After this many servers in a row died before they were ready, all later servers import nothing in advance."""
_RESTART_DELAY_S: Final = 0.5
_SWEEP_INTERVAL_S: Final = 0.01


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
class ServerState:
    """The state that the keeper thread shares with the client; guarded by `changed`."""

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

    def kill_server(self) -> None:
        with self.changed:
            if self.process is not None:
                self.process.kill()


class ServerKeeper:
    """The keeper thread. It runs until `state.is_closing` is set and the last server is dead.

    `on_change` is called after each message of the server, such as the exit of a worker, and after the server's death.
    """

    def __init__(
        self,
        state: ServerState,
        preload: tuple[str, ...],
        store: socket.socket | None,
        environment: Mapping[str, str],
        directory: Path | None,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._state = state
        self._preload = preload
        self._store = store
        self._environment = environment
        self._directory = directory
        self._thread = threading.Thread(target=self._keep, name="standby-keeper", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

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
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(_SEND_TIMEOUT_S), 0))
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
        self.on_change()

    def _clean_up_after(self, server_pid: int) -> None:
        """Kill the workers of a dead server, and add the exits that it could not report."""
        state = self._state
        with state.changed:
            groups = set(state.living)
            died = [pid for pid, is_living in state.living.items() if is_living]
        while groups and (left := living_members(groups, server_pid)):
            for stat in left:
                with suppress(ProcessLookupError):
                    os.kill(stat.pid, signal.SIGKILL)
            time.sleep(_SWEEP_INTERVAL_S)
        note = "its standby server died, so all workers of the host were killed"
        with state.changed:
            state.exits += [WorkerExit(pid, -signal.SIGKILL, time.time(), note) for pid in died]
            state.living.clear()
            state.process = state.channel = None
            state.generation += 1
            state.changed.notify_all()
        self.on_change()
