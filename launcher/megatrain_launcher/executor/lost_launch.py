"""What a launch left behind that ended without saying so: its last sign of life, how far it was, and why it ended.

Black boxes outlive a launcher, to the last step, but not their machine; the run's metrics outlive both. What hosts
told etcd is gone with their leases.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.black_box import read_black_box
from megatrain.contracts.bounded_files import open_below
from megatrain.contracts.errors import DataError
from megatrain.contracts.rounds import JobRecord, LostLaunch
from megatrain.contracts.run_directory import RunDirectory, own_box_paths, safe_name
from megatrain.contracts.texts import time_text

MACHINE_RESTARTED, LAUNCHER_LOST = "machine-restarted", "launcher-lost"
_METRICS = "metrics.jsonl"
_TAIL_BYTES = 1 << 16
_MOST_BOXES = 64
"""One is enough to know when all ended; the slowest of a host's ranks says how far they were."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Sign:
    """Something that a launch did, and what it says of the steps that were done."""

    unix_s: float
    what: str
    step: int | None = None
    host: str = ""
    """Whose memory still holds it."""


def look_back(record: JobRecord, run: RunDirectory, boxes: Path | None, host: str) -> LostLaunch:
    """Return what is known of the launch of a record. `boxes`: telemetry.black_box_directory; `host`: who looks."""
    signs = [Sign(record.created_unix_s, f"it was launched by {record.first_host}"), *metric_signs(run)]
    signs += [] if boxes is None else box_signs(run, boxes, record.job)
    return lost_launch_of(record, signs, time.time(), _booted_unix_s(), host)


def lost_launch_of(record: JobRecord, signs: list[Sign], now: float, booted: float | None, host: str) -> LostLaunch:
    """Return what signs of life say. `booted`: when the machine of `host`, who looks, was started. Pure."""
    own = [one for one in signs if record.created_unix_s <= one.unix_s <= now] or signs[:1]
    last = max(own, key=lambda one: one.unix_s)
    # of the newest word on steps; several ranks of one moment say how far all were by the slowest
    steps = [one for one in own if one.step is not None]
    newest = max((one.unix_s for one in steps), default=0.0)
    reached = min((one.step for one in steps if one.step is not None and one.unix_s > newest - 60.0), default=None)
    evidence = [f"the last sign of life, {time_text(last.unix_s)}: {last.what}"]
    cause = ""
    if booted is not None and booted > last.unix_s:
        cause = MACHINE_RESTARTED
        evidence.append(f"the machine of {host} was started after that, at {time_text(booted)}")
    elif host in {record.first_host, *(one.host for one in own)}:
        cause = LAUNCHER_LOST
        evidence.append(
            f"the machine of {host} was not started since: the launcher was killed, by somebody or by the kernel for "
            "want of memory, or stopped while its etcd was away"
        )
    evidence.append(f"neither launcher nor driver of launch {record.launch_id} wrote its end")
    return LostLaunch(record.launch_id, record.first_host, last.unix_s, reached, cause, tuple(evidence))


def metric_signs(run: RunDirectory) -> Iterator[Sign]:
    """Yield the newest line of the run's metrics, which rank 0 appends."""
    with suppress(OSError), open(open_below(run.root, f"{run.metrics.name}/{_METRICS}"), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, KeyError, TypeError):  # half a line, or one of another kind
                told = json.loads(line)
                yield Sign(float(told["unix_time_s"]), f"metrics of step {int(told['step'])}", int(told["step"]))
                return


def box_signs(run: RunDirectory, boxes: Path, job: str) -> Iterator[Sign]:
    """Yield the newest record of each black box that the run's ranks left in this machine's memory."""
    prefix = f"megatrain.{safe_name(job)}.{run.key}."
    found = [path for path in own_box_paths(boxes) if path.name.startswith(prefix)]
    for path in found[-_MOST_BOXES:]:
        with suppress(DataError):
            box = read_black_box(path)
            done = box.progress.completed_step
            step = None if done is None else done + 1
            what = f"rank {box.identity.rank} on {box.identity.host} in its step {0 if step is None else step}"
            yield Sign(box.clock.unix_of(box.newest_ns) / _NS, what, step, box.identity.host)


def _booted_unix_s() -> float | None:
    """Return when this machine was started; None where the system does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    return None
