"""Finds the traces of a launch that left no end record: its last sign of life, its progress, and why it ended.

Black boxes with the last step survive the launcher but not a restart of the machine; the run's metrics survive both.
The records of hosts in etcd expired with their leases.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.bounded_files import open_below
from megatrain.contracts.records.rounds import JobRecord, LostLaunch
from megatrain.formatting import time_text
from megatrain.run_files.run_directory import RunDirectory, own_box_paths, safe_name

MACHINE_RESTARTED, LAUNCHER_LOST = "machine-restarted", "launcher-lost"
_METRICS = "metrics.jsonl"
_TAIL_BYTES = 1 << 16
_MAX_BOXES = 64
"""The most black boxes to read."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ActivitySign:
    """A sign of life of a launch, and the number of completed steps that it reports."""

    unix_s: float
    what: str
    step: int | None = None
    host: str = ""
    """The host whose memory has this sign; empty if it is not from a black box."""


def find_lost_launch(record: JobRecord, run: RunDirectory, boxes: Path | None, host: str) -> LostLaunch:
    """Return the traces of the launch that wrote `record`.

    `boxes`: telemetry.black_box_directory; `host`: this host's name.
    """
    signs = [ActivitySign(record.created_unix_s, f"it was launched by {record.first_host}"), *signs_of_metrics(run)]
    signs += [] if boxes is None else signs_of_boxes(run, boxes, record.job)
    return lost_launch_of(record, signs, time.time(), _booted_unix_s(), host)


def lost_launch_of(
    record: JobRecord, signs: list[ActivitySign], now: float, booted: float | None, host: str
) -> LostLaunch:
    """Return the traces that follow from signs of life. `booted`: when this machine, which is `host`, was started."""
    own = [sign for sign in signs if record.created_unix_s <= sign.unix_s <= now] or signs[:1]
    last = max(own, key=lambda sign: sign.unix_s)
    # the progress: the slowest rank among the signs within a minute of the newest one
    steps = [sign for sign in own if sign.step is not None]
    newest = max((sign.unix_s for sign in steps), default=0.0)
    reached = min((sign.step for sign in steps if sign.step is not None and sign.unix_s > newest - 60.0), default=None)
    evidence = [f"the last sign of life, {time_text(last.unix_s)}: {last.what}"]
    cause = ""
    if booted is not None and booted > last.unix_s:
        cause = MACHINE_RESTARTED
        evidence.append(f"the machine of {host} was restarted after that, at {time_text(booted)}")
    elif host in {record.first_host, *(sign.host for sign in own)}:
        cause = LAUNCHER_LOST
        evidence.append(
            f"the machine of {host} has not been restarted since: the launcher was killed, by a person or by the "
            "kernel when memory ran out, or stopped while its etcd could not be reached"
        )
    evidence.append(f"no launcher and no driver of launch {record.launch_id} recorded the launch's end")
    return LostLaunch(record.launch_id, record.first_host, last.unix_s, reached, cause, tuple(evidence))


def signs_of_metrics(run: RunDirectory) -> Iterator[ActivitySign]:
    """Yield the newest line of the run's metrics, which rank 0 writes."""
    with suppress(OSError), open(open_below(run.root, f"{run.metrics.name}/{_METRICS}"), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, KeyError, TypeError):  # an incomplete line, or one of another kind
                entry = json.loads(line)
                yield ActivitySign(
                    float(entry["unix_time_s"]), f"metrics of step {int(entry['step'])}", int(entry["step"])
                )
                return


def signs_of_boxes(run: RunDirectory, boxes: Path, job: str) -> Iterator[ActivitySign]:
    """Yield the time and step of the newest record in each black box of the run in this machine's memory."""
    prefix = f"megatrain.{safe_name(job)}.{run.key}."
    found = [path for path in own_box_paths(boxes) if path.name.startswith(prefix)]
    for path in found[-_MAX_BOXES:]:
        with suppress(DataError):
            box = read_black_box(path)
            done = box.progress.completed_step
            step = None if done is None else done + 1
            what = f"rank {box.identity.rank} on {box.identity.host} in its step {0 if step is None else step}"
            yield ActivitySign(box.clock.unix_of(box.newest_ns) / _NS, what, step, box.identity.host)


def _booted_unix_s() -> float | None:
    """Return when this machine was started; None if the system does not report it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    return None
