"""`megatrain launch` as a fork of the session's fork server: neither it nor its first standby server imports torch.

On two cores, most of the cost of a launched job is the import of torch in the standby server of each host. Here a
host's first server is forked beside the launcher and waits for the launcher's order. Its descriptors, session,
environment and parent are those that the launcher would give it, and it runs the same program. Later servers start
cold, as do launches that enter a namespace.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import SimpleNamespace
from typing import IO, Any

from megatrain.programs.processes import install_parent_death_guard
from tests.helpers.fork_server import fork_context
from tests.helpers.forked_program import ForkedProgram, forked_program

PRELOADED = ("megatrain_launcher.launch.host", "megatrain_launcher.launch.plan", "megatrain_launcher.executor.executor")
_PROGRAM = "megatrain_launcher.standby"
_MAX_ORDER_BYTES = 1 << 17
_MAX_DESCRIPTORS = 8


def forked_launch(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> AbstractContextManager[ForkedProgram]:
    """Start `python -m megatrain launch ARGUMENTS`; at the end that process (alone) is dead. output: the file for
    everything that it prints."""
    return forked_executor(["-m", "megatrain", "launch", *arguments], environment, output)


@contextmanager
def forked_executor(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[ForkedProgram]:
    """Start `python ARGUMENTS`, a program that becomes the executor of a host."""
    fork_context(PRELOADED)
    with forked_program(arguments, environment=environment, output=output, prepare=[fork_standby_server]) as program:
        yield program


def fork_standby_server() -> None:
    """Fork the first standby server of this launcher, and let the launcher use that one."""
    from megatrain_launcher.standby import client

    # a whole message or nothing
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("fork").Process(target=_await_order, args=(its, os.getpid()))
    process.start()
    its.close()
    # before an exiting process waits for its children
    Finalize(None, process.kill, exitpriority=0)
    servers = [_ForkedServer(process, ours)]

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes] | _ForkedServer:
        if not servers:
            return subprocess.Popen(command, **options)
        server = servers.pop()
        server.order(command, **options)
        return server

    used = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    client.subprocess = used  # type: ignore[assignment, attr-defined]


class _ForkedServer:
    """A standby server with the methods of subprocess.Popen that the launcher uses."""

    def __init__(self, process: BaseProcess, channel: socket.socket) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        self._channel = channel

    def order(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **options: Any) -> None:
        """Let the process become what Popen with these arguments would start."""
        assert command[1:3] == ["-m", _PROGRAM], command
        assert options == {"stdin": subprocess.DEVNULL, "stdout": 2, "cwd": None, "start_new_session": True}, options
        order = {"arguments": command[3:], "environment": dict(env), "numbers": list(pass_fds)}
        socket.send_fds(self._channel, [json.dumps(order).encode()], pass_fds)
        self._channel.close()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _await_order(channel: socket.socket, launcher_pid: int) -> None:
    install_parent_death_guard(launcher_pid)
    content, descriptors, _, _ = socket.recv_fds(channel, _MAX_ORDER_BYTES, _MAX_DESCRIPTORS)
    if not content:
        return
    order = json.loads(content)
    channel.detach()
    _keep_only(dict(zip(order["numbers"], descriptors, strict=True)))
    os.setsid()
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [_PROGRAM, *order["arguments"]]
    runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True)


def _keep_only(numbers: Mapping[int, int]) -> None:
    """Close all descriptors except the standard ones and `numbers` (number -> its present number)."""
    free = max(numbers) + 1
    aside = {number: fcntl.fcntl(now, fcntl.F_DUPFD, free) for number, now in numbers.items()}
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *aside.values()}:
        with suppress(OSError):  # the descriptor of the listing itself
            os.close(descriptor)
    for number, now in aside.items():
        os.dup2(now, number)
        os.close(now)
