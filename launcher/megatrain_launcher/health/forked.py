"""Runs functions in forked children of a probe. Each line of JSON that a child prints is one measurement.

A crash or hang of a child does not affect the others, and torch is imported only once. Forking is safe because the
probe has one thread and has not used the device yet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.contracts.exit_codes import end_text
from megatrain.programs.processes import install_parent_death_guard

_POLL_S = 0.01
_GRACE_S = 1.0
"""The time for which the other children may run after one has failed."""
_MAX_SHOWN = 300
_STAT = Path("/proc/stat")


def print_measurement(**fields: Any) -> None:
    """Print one measurement as a line. Lines are shorter than PIPE_BUF, so those of several children do not mix."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def measurements(output: str) -> list[dict[str, Any]]:
    """Return the measurements that a probe printed; other lines, such as those of libraries, are ignored."""
    found = []
    for line in output.splitlines():
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and isinstance(value.get("part"), str):
                found.append(value)
    return found


def run_part(part: str, functions: Sequence[Callable[[], Mapping[str, Any]]], timeout_s: float) -> None:
    """Run each function in a child, which prints the result or its error; print an error for each child that a signal
    or the timeout ended. Last, print which fraction of the cores other processes used meanwhile.
    """
    before = _Load.now()
    sys.stdout.flush()
    sys.stderr.flush()
    children = {_fork(part, number, function): number for number, function in enumerate(functions)}
    for number, how in sorted(_wait(children, timeout_s).items()):
        if how:
            print_measurement(part=part, number=number, error=how)
    print_measurement(part=f"{part}-load", others_busy=_Load.now().others_since(before))


def _fork(part: str, number: int, function: Callable[[], Mapping[str, Any]]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    exit_code = 1
    try:
        install_parent_death_guard(parent)
        print_measurement(part=part, number=number, **function())
        exit_code = 0
    except (RuntimeError, OSError, ValueError) as error:  # torch's own errors are RuntimeErrors
        print_measurement(part=part, number=number, error=f"{type(error).__name__}: {_first_line(error)}")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(exit_code)  # never return into the probe's code
    raise AssertionError("unreachable: the child has exited")


def _wait(children: dict[int, int], timeout_s: float) -> dict[int, str]:
    """Wait for all children for at most `timeout_s`; return by number how each ended, empty if it printed its result or
    its error.
    """
    ends: dict[int, str] = {}
    left = dict(children)
    deadline = time.monotonic() + timeout_s
    has_failed = False
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            code = os.waitstatus_to_exitcode(status)
            ends[left.pop(pid)] = end_text(code) if code < 0 else ""
            if code and not has_failed:
                has_failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if left and time.monotonic() > deadline:
            for pid, number in left.items():
                os.kill(pid, signal.SIGKILL)
                # after a failure, the others may only wait for the failed child, so they get no error
                ends[number] = "" if has_failed else f"it did not end within {timeout_s:g} s"
            _reap(left)
            break
        if left:
            time.sleep(_POLL_S)
    return ends


def _reap(children: Mapping[int, int]) -> None:
    """Reap killed children; abandon those that are stuck in the kernel."""
    deadline = time.monotonic() + _GRACE_S
    left = set(children)
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(_POLL_S if left else 0)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:_MAX_SHOWN] if lines else "no message"


@dataclass(frozen=True, slots=True)
class _Load:
    """The CPU seconds that the whole host, and this process with its children, have used so far."""

    at_s: float
    host_s: float | None
    own_s: float

    @classmethod
    def now(cls) -> _Load:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        host: float | None = None
        with suppress(OSError, ValueError, IndexError):
            # fields: user nice system idle iowait irq softirq steal; stolen time counts as used by others
            ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
            host = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), host, own)

    def others_since(self, before: _Load) -> float | None:
        """Return the fraction of all cores that other processes used since `before`; None if it is not known."""
        span = (self.at_s - before.at_s) * (os.cpu_count() or 1)
        if self.host_s is None or before.host_s is None or span <= 0:
            return None
        others = (self.host_s - before.host_s) - (self.own_s - before.own_s)
        return min(1.0, max(0.0, others / span))
