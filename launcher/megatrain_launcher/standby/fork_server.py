"""The standby server's loop: fork workers on request, report their exits, kill their process groups. One thread.

A worker that exited stays a zombie until its group is killed, so that its pid, which is also the group's id, is not
reused while the group may still get signals. Orphaned processes of workers become the server's children, so that the
server can reap the last process of a group. A process that left the group, such as a checkpoint writer in its own
session, is not killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from megatrain.programs.processes import adopt_orphans, children, set_parent_death_signal
from megatrain_launcher.standby import messages
from megatrain_launcher.standby.messages import Message, WorkerStart, receive_message, send_message


@dataclass(frozen=True, slots=True)
class Forked:
    """The return value of `serve` in a new worker."""

    start: WorkerStart
    output: int
    server_pid: int


@dataclass(slots=True)
class _Worker:
    has_ended: bool = False
    is_killed: bool = False


@dataclass(slots=True)
class ForkServer:
    """Serves one executor over `channel` until the executor or the store's process is gone."""

    channel: socket.socket
    executor_pid: int
    store_pid: int | None = None
    """The process that serves the host's store; when it exits, the standby server exits too."""
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _is_orphan: bool = False
    _has_lost_store: bool = False

    def serve(self, problems: Sequence[str]) -> Forked | None:
        """Report that the server is ready, and serve requests until the executor or the store is gone; return None.

        In each forked worker, return the worker's description, with all signals blocked and the server's descriptors
        closed.
        """
        adopt_orphans()
        wakeup, wakeup_end = socket.socketpair()
        wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        signal.signal(signal.SIGCHLD, _do_nothing)
        signal.signal(signal.SIGTERM, self._check_executor)
        # From here on the parent-death signal is SIGTERM, which can be handled: when the executor is killed, this
        # process must still kill the workers' groups.
        set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != self.executor_pid:
            return None
        signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            forked = self._loop(selector, wakeup, problems)
        # reset before any further child exits: SIGCHLD must not write to a closed descriptor
        signal.set_wakeup_fd(-1)
        if forked is None:
            self._end_all()
        else:
            self.channel.close()
        wakeup.close()
        wakeup_end.close()
        return forked

    def _loop(self, selector: selectors.BaseSelector, wakeup: socket.socket, problems: Sequence[str]) -> Forked | None:
        try:
            self._collect()  # the store's process may have exited before SIGCHLD could wake this loop
            send_message(self.channel, {"kind": messages.READY, "problems": list(problems)})
            while not self._is_orphan and not self._has_lost_store:
                ready = {key.fileobj for key, _ in selector.select()}
                if wakeup in ready:
                    with contextlib.suppress(BlockingIOError):
                        wakeup.recv(4096)
                    self._collect()
                if self.channel in ready:
                    received = receive_message(self.channel)
                    if received is None:
                        return None
                    forked = self._obey(*received)
                    if forked is not None:
                        return forked
        except ConnectionError:
            return None
        return None

    def _check_executor(self, _number: int, _frame: FrameType | None) -> None:
        # any process may send SIGTERM, but only the executor's death changes this process's parent
        self._is_orphan = os.getppid() != self.executor_pid

    def _obey(self, message: Message, descriptor: int | None) -> Forked | None:
        kind = message["kind"]
        if kind == messages.START and descriptor is not None:
            return self._start(WorkerStart.from_message(message), descriptor)
        if kind == messages.SIGNAL:
            for pid in message["pids"]:
                if pid in self._workers:
                    os.kill(pid, message["signal"])
        elif kind == messages.KILL:
            self._collect()  # a worker that is already dead must not count as killed by the server
            for pid in message["pids"]:
                self._kill(pid)
            send_message(self.channel, {"kind": messages.KILLED})
            self._collect()
        return None

    def _start(self, start: WorkerStart, output: int) -> Forked | None:
        server_pid = os.getpid()
        # the server's handlers must not run in the worker, which unblocks signals after it has reset their handlers
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            self._unblock()
            os.close(output)
            reason = f"the standby server cannot fork ({error.strerror}); check the limits of processes and memory"
            send_message(self.channel, {"kind": messages.REFUSED, "reason": reason})
            return None
        if pid == 0:
            return Forked(start, output, server_pid)
        self._unblock()
        os.close(output)
        # both the server and the worker do this, so that the group exists before either continues
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._workers[pid] = _Worker()
        send_message(self.channel, {"kind": messages.STARTED, "pid": pid})
        return None

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def _kill(self, pid: int) -> None:
        worker = self._workers.get(pid)
        if worker is not None:
            worker.is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _collect(self) -> None:
        """Report the workers that exited, and the killed groups of which no process is left."""
        for pid, worker in list(self._workers.items()):
            if not worker.has_ended:
                # WNOWAIT: do not reap, so that the pid stays reserved
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None:
                    worker.has_ended = True
                    code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                    # a worker that was killed during its exit, such as while it wrote a core dump, keeps its exit code
                    is_killed = worker.is_killed and code == -signal.SIGKILL
                    ended = {"kind": messages.ENDED, "pid": pid, "exit_code": code, "at_unix_s": time.time()}
                    send_message(self.channel, {**ended, "is_killed": is_killed})
            if worker.is_killed and worker.has_ended and _is_group_gone(pid):
                del self._workers[pid]
                send_message(self.channel, {"kind": messages.GONE, "pid": pid})
        for pid in children():
            if pid not in self._workers:
                with contextlib.suppress(ChildProcessError):
                    has_ended = os.waitpid(pid, os.WNOHANG)[0] == pid
                    self._has_lost_store = self._has_lost_store or (has_ended and pid == self.store_pid)

    def _end_all(self) -> None:
        """Kill all remaining workers, because the executor or the store is gone. They are reaped by init."""
        for pid in self._workers:
            self._kill(pid)


def _is_group_gone(group: int) -> bool:
    """Reap the dead processes of a killed group; return whether none is left."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. Without a handler, SIGCHLD would not wake the loop."""
