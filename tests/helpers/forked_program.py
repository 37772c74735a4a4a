"""Python programs that have torch from the start: forks of the session's fork server instead of cold interpreters.

A fork becomes what `python -m MODULE ...` or `python -c SOURCE ...` would be: it has its own arguments, environment,
directory, streams, main module and exit code. Settings that an interpreter reads only at its start (PYTHONHASHSEED) are
those of the server, and there is no atexit. A test of a program's imports or of its start must start Python.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests.helpers.fork_server import fork_context
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

_ENVIRONMENT_FIELDS = (47, 48)
"""Begin and end of /proc/<pid>/environ in memory, among the fields of /proc/<pid>/stat after the name."""


class ForkedProgram:
    """A program that runs or ran, with the interface of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], process: BaseProcess, outputs: Sequence[IO[bytes]]) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._arguments = arguments
        self._process = process
        self._outputs = outputs

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr, "" for a stream that goes to a file of the caller."""
        self.wait(timeout)
        texts = []
        for file in self._outputs:
            file.seek(0)
            texts.append(file.read().decode())
        return (texts[0], texts[1]) if texts else ("", "")


@contextmanager
def forked_program(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path = ROOT,
    output: IO[bytes] | None = None,
    prepare: Sequence[Callable[[], object]] = (),
) -> Iterator[ForkedProgram]:
    """Start the program that `python ARGUMENTS` would run; at the end the process (alone) is dead.

    arguments: those after `python`, with -m or -c first. environment: all of it; that of this process by default.
    output: the file for its output. prepare: functions that it calls first, each of a module, or of an object that can
    be pickled.
    """
    with ExitStack() as stack:
        outputs = [] if output is not None else [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        descriptors = [_Descriptor(file.fileno()) for file in (outputs or [output, output]) if file is not None]
        program = (
            tuple(arguments),
            dict(os.environ if environment is None else environment),
            str(directory),
            tuple(prepare),
        )
        process = fork_context().Process(target=_become, args=(*descriptors, *program))
        process.start()
        try:
            yield ForkedProgram(arguments, process, outputs)
        finally:
            if process.exitcode is None:
                process.kill()
            process.join()
            process.close()


def run_forked(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with the options of `forked_program`, and return what subprocess.run would."""
    with forked_program(arguments, **options) as program:
        stdout, stderr = program.communicate(DEADLINE_S)
        assert program.returncode is not None
        return subprocess.CompletedProcess(list(arguments), program.returncode, stdout, stderr)


class _Descriptor:
    """A file descriptor that is sent to the fork, which receives it as a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._number),)


def _received(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


def _become(
    stdout: int,
    stderr: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    prepare: Sequence[Callable[[], object]],
) -> None:
    _take_streams(stdout, stderr)
    # Processes that the program starts by multiprocessing are its own.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(environment)
    _show_environment()
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    for action in prepare:
        action()
    os.chdir(directory)
    kind, what, *rest = arguments
    if kind == "-m":
        sys.path.insert(0, directory)
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert kind == "-c", kind
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _show_environment() -> None:
    """Let /proc/self/environ show the current variables; in a fork it shows those with which the server began."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[index]) for index in _ENVIRONMENT_FIELDS)
    text = b"".join(b"%s=%s\0" % item for item in os.environb.items())
    assert len(text) <= end - start, f"the variables have {len(text)} bytes, the fork server has room for {end - start}"
    # No other data is there any more: each variable was copied to the heap when it was set.
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _take_streams(stdout: int, stderr: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, own in enumerate((nothing, stdout, stderr)):
        os.dup2(own, number)
    for own in {nothing, stdout, stderr} - {0, 1, 2}:
        os.close(own)
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
