"""Seconds from an outage of the network or of etcd to its effect: a host is replaced, or training continues.

There are two hosts of two gloo ranks each and a spare, with paced steps of 80 ms and the defaults of [recovery] (a
lease of 10 s). For outages of networks, each host is in its own network namespace, on one network for training and one
for etcd. These cases need root and the program `ip`, and are skipped without them. Each run is checked: repeated steps
have the same losses, bit by bit; every host that was not cut off keeps its session; nothing is left behind.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, at_most, must_hold
from benchmarks.result import Result
from benchmarks.tables import spread
from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.exit_codes import ExitCode
from tests.helpers.outage_job import HOSTS, MANAGEMENT, TRAIN, OutageJob, outage_job
from tests.helpers.waiting import wait_until

RUNS = 3
FROZEN_S = 15.0
STEPS_AFTER = 25
TTL_S = RecoveryConfig().lease_ttl_s
SKIPPED = "skipped: needs root and the program ip"


@dataclass(frozen=True, slots=True)
class FoundNetwork:
    """The result of one run. Times are seconds since the outage began; None: it did not happen."""

    detected_s: float | None
    next_step_s: float | None
    stopped_itself_s: float | None
    median_step_s: float
    longest_step_s: float
    back_s: float | None
    """Seconds from the end of the outage until all hosts are registered again."""
    num_evicted: int
    named: str
    is_as_before: bool
    """Whether the hosts that were not replaced kept their sessions, and the job ended normally."""
    has_same_losses: bool
    num_left_behind: int


@dataclass(frozen=True, slots=True)
class Outage:
    """`strike` causes the outage, waits for its effect and ends it. It returns when it began and when it was over."""

    title: str
    strike: Callable[[OutageJob], tuple[float, float]]
    has_network: bool = False
    num_members: int = 1
    is_partition: bool = False
    detected_within_s: float = math.inf
    next_step_within_s: float = math.inf


def _partition(job: OutageJob, *, is_driver: bool) -> tuple[float, float]:
    driver = job.view.driver()
    victim = driver if is_driver else next(host for host in HOSTS[:2] if host != driver)
    began = job.cut([victim], TRAIN, MANAGEMENT)
    job.wait_until_stopped(victim)
    job.wait_for_round(2)
    job.view.wait_recovered(0)
    return began, job.reconnect([victim], TRAIN, MANAGEMENT)


def _restart_etcd(job: OutageJob, away_s: float) -> tuple[float, float]:
    (member,) = job.etcd.members
    began = time.time()
    member.kill()
    job.wait_seconds(began, away_s)
    member.start()
    job.etcd.wait_ready()
    return began, time.time()


def _lose_leader(job: OutageJob, *, is_killed: bool) -> tuple[float, float]:
    leader = job.etcd.leader()
    began = time.time()
    (leader.kill if is_killed else leader.freeze)()
    job.wait_seconds(began, FROZEN_S)
    (leader.start if is_killed else leader.thaw)()
    job.etcd.wait_ready()
    return began, time.time()


def _lose_management(job: OutageJob, *, is_everyone: bool) -> tuple[float, float]:
    driver = job.view.driver()
    hosts: Sequence[str] = HOSTS if is_everyone else [next(host for host in HOSTS[:2] if host != driver)]
    began = job.cut(hosts, MANAGEMENT)
    job.wait_seconds(began, 2.0 * TTL_S)
    return began, job.reconnect(hosts, MANAGEMENT)


OUTAGES = (
    Outage(
        "host partitioned", lambda job: _partition(job, is_driver=False), has_network=True, is_partition=True,
        detected_within_s=TTL_S + 1.0, next_step_within_s=TTL_S + 12.0,
    ),
    Outage(
        "the driver's host partitioned", lambda job: _partition(job, is_driver=True), has_network=True,
        is_partition=True, detected_within_s=TTL_S + 2.0, next_step_within_s=25.0,
    ),
    Outage("etcd killed and restarted", lambda job: _restart_etcd(job, 0.0)),
    Outage("etcd away for two TTLs", lambda job: _restart_etcd(job, 2.0 * TTL_S)),
    Outage("etcd leader of 3 killed", lambda job: _lose_leader(job, is_killed=True), num_members=3),
    Outage("etcd leader of 3 frozen for 15 s", lambda job: _lose_leader(job, is_killed=False), num_members=3),
    Outage(
        "management network of a host down for two TTLs", lambda job: _lose_management(job, is_everyone=False),
        has_network=True,
    ),
    Outage(
        "management network of all hosts down for two TTLs", lambda job: _lose_management(job, is_everyone=True),
        has_network=True,
    ),
)  # fmt: skip


def run() -> Result:
    """Cause every outage, in turn."""
    can_cut = os.geteuid() == 0 and shutil.which("ip") is not None
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for outage in OUTAGES:
        is_possible = can_cut or not outage.has_network
        if not is_possible:
            print(f"{outage.title}: {SKIPPED}")
        found = [_measure(outage) for _ in range(RUNS if is_possible else 0)]
        rows.append(_row(outage, found))
        bars += _bars(outage, found) if found else []
    return Result(
        name="recovery-network",
        title="Outages of networks and of etcd: 2 hosts of 2 gloo ranks and a spare, paced steps of 80 ms",
        command="python -m benchmarks recovery_network --write",
        rows=rows,
        settings={"runs": RUNS, "paced": "80 ms a step", "recovery.lease_ttl_s": TTL_S},
        notes=[
            "Seconds since the outage began: median (least to most).",
            "stopped itself: no worker of the host that is cut off is alive; its link is restored only later.",
            "longest step: of those that ended after the outage began; a step after a save counts without the save.",
            "never stopped: no step took longer than 3 x the median + 1 s.",
            "back: seconds from the end of the outage until all hosts are registered.",
            "as before: each host that was not replaced kept its session, and the job saved and ended in order.",
            "same losses: the losses of all repeated steps are equal, bit by bit.",
            "left behind: processes and files in memory that still exist 2 min after the end.",
        ],
        bars=bars,
    )


def _measure(outage: Outage) -> FoundNetwork:
    root = Path(tempfile.mkdtemp(prefix="megatrain-outage-"))
    try:
        with outage_job(root, num_members=outage.num_members, has_network=outage.has_network) as job:
            before = job.sessions()
            began, over = outage.strike(job)
            wait_until(lambda: job.sessions().keys() == before.keys(), "all hosts")
            back_s = time.time() - over
            job.wait_for_more_steps(STEPS_AFTER)
            return _found(job, outage, before, began, back_s)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _found(job: OutageJob, outage: Outage, before: dict[str, str], began: float, back_s: float) -> FoundNetwork:
    median_s, longest_s = job.step_times(began)
    incidents = job.recoveries()
    evicted = {host for incident in incidents for host in incident.culprit_hosts}
    sessions = job.sessions()
    kept = all(sessions[host] == session for host, session in before.items() if host not in evicted)
    first_step = job.first_step_of_round(2) if outage.is_partition else None
    stopped = job.stopped_unix_s
    codes = job.stop()
    return FoundNetwork(
        detected_s=incidents[0].moments.detected - began if incidents else None,
        next_step_s=None if first_step is None else first_step - began,
        stopped_itself_s=None if stopped is None else stopped - began,
        median_step_s=median_s,
        longest_step_s=longest_s,
        back_s=back_s,
        num_evicted=len(evicted),
        named=", ".join(sorted(evicted)) or ("held" if job.holds() else "none"),
        is_as_before=kept and set(codes.values()) == {int(ExitCode.SAVED_AND_STOPPED)},
        has_same_losses=not job.repeated_losses_differ(),
        num_left_behind=len(job.left_behind()),
    )


def _row(outage: Outage, found: Sequence[FoundNetwork]) -> dict[str, Any]:
    is_partition = outage.is_partition
    never_stopped = sum(one.longest_step_s <= 3.0 * one.median_step_s + 1.0 for one in found)
    return {
        "outage": outage.title,
        "runs": len(found) or SKIPPED,
        "detected s": spread([one.detected_s for one in found]) if is_partition else "",
        "next step s": spread([one.next_step_s for one in found]) if is_partition else "",
        "stopped itself s": spread([one.stopped_itself_s for one in found]) if is_partition else "",
        "longest step s": "" if is_partition else spread([one.longest_step_s for one in found]),
        "never stopped": "" if is_partition or not found else f"{never_stopped} of {len(found)}",
        "evicted": "; ".join(str(one.num_evicted) for one in found),
        "named": "; ".join(sorted({one.named for one in found})),
        "back s": spread([one.back_s for one in found]),
        "as before": _all(one.is_as_before for one in found) if found else "",
        "same losses": _all(one.has_same_losses for one in found) if found else "",
        "left behind": sum(one.num_left_behind for one in found) if found else "",
    }


def _bars(outage: Outage, found: Sequence[FoundNetwork]) -> list[Bar]:
    """Return the bars of an outage, for the worst of its runs. A missing value counts as infinite."""

    def worst(seconds: Iterable[float | None]) -> float:
        return max(math.inf if second is None else second for second in seconds)

    title, bars = outage.title, []
    if outage.is_partition:
        bars = [
            at_most(f"{title}: seconds until it is detected", worst(one.detected_s for one in found),
                    outage.detected_within_s),
            at_most(f"{title}: seconds until the next step", worst(one.next_step_s for one in found),
                    outage.next_step_within_s),
        ]  # fmt: skip
    return [
        *bars,
        must_hold(f"{title}: no host but a partitioned one is evicted",
                  all(one.num_evicted == outage.is_partition for one in found)),
        must_hold(f"{title}: all others are as before", all(one.is_as_before for one in found)),
        must_hold(f"{title}: the same losses", all(one.has_same_losses for one in found)),
        must_hold(f"{title}: nothing is left behind", not any(one.num_left_behind for one in found)),
    ]  # fmt: skip


def _all(answers: Iterable[bool]) -> str:
    return "yes" if all(answers) else "no"
