"""An executor that follows the black boxes of a round: what it publishes, and in which order."""

from __future__ import annotations

import itertools
import os
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.host_records import HangEvidence, Stall
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain.fencing.fence import FenceRule, LeaseView
from megatrain.fencing.phase_timeouts import PhaseTimeouts
from megatrain.run_files.run_directory import RunDirectory
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain_launcher.executor.crash_evidence import BoxPaths
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.membership import Membership
from megatrain_launcher.executor.order_state import OrderState, OrdersView
from megatrain_launcher.executor.round_follower import FollowerParts, RoundFollower
from megatrain_launcher.interfaces import Assignment
from tests.helpers.waiting import DEADLINE_S, wait_until

HOST = RoundHost("host-1", "1", "127.0.0.1", 2, 2)
ASSIGNMENT = Assignment(Round(3, 4, (HOST,), "127.0.0.1", 1, "a test", "d", 0.0), HOST)


def test_evidence_of_a_stall_is_published_once_before_it(tmp_path: Path) -> None:
    """The driver waits for the evidence of a host whose status shows a stall."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    published: queue.Queue[tuple[HangEvidence, Stall | None]] = queue.Queue()
    state, polls = HostStatusBuilder("host-1"), itertools.count()
    newest_poll = 0

    def lease() -> LeaseView:
        nonlocal newest_poll
        newest_poll = next(polls)
        return LeaseView(-60.0)

    def shown() -> Stall | None:
        return state.status("1", OrdersView(3, ASSIGNMENT.round, 3, 3, None), "").stall

    parts = FollowerParts(
        host="host-1",
        state=state,
        orders=OrderState(JobKeys("demo"), "host-1", "1"),
        membership=cast(Membership, SimpleNamespace(session="1", lease=lease)),
        box_paths=BoxPaths(tmp_path, "demo", run),
        phase_timeouts=PhaseTimeouts(init_s=0, first_step_s=0, checkpoint_s=0, evaluation_s=0, floor_s=0, factor=0),
        fence_rule=FenceRule(lease_ttl_s=10.0, floor_s=5.0, join_timeout_s=600.0, save_grace_s=60.0),
        recording=DiagSettings(),
        publish=lambda evidence: published.put((evidence, shown())),
        gpu_errors=tuple,
        check=lambda command, report: None,
    )
    recorders: list[Recorder] = []
    stalls: list[Stall | None] = [None]
    state.workers_started(ASSIGNMENT, {0: os.getpid(), 1: os.getpid()})
    follower = RoundFollower(parts, seen_command=0)
    for rank in (2, 3):
        identity = Identity("demo", "main", 3, rank, Layout(dp_size=4), os.getpid(), "host-1")
        recorders.append(open_recorder(identity, directory=str(tmp_path), run_key=run.key, num_records=256))
        evidence, before = published.get(timeout=DEADLINE_S)
        assert ([found.rank for found in evidence.ranks], before) == (list(range(2, rank + 1)), stalls[-1])
        wait_until(lambda: shown() is not stalls[-1], "the stall in the status")
        stalls.append(shown())
    seen = newest_poll
    wait_until(lambda: newest_poll > seen + 4, "more polls, which find the same stall")
    follower.close()
    for recorder in recorders:
        recorder.close()
    assert [stall.ranks for stall in stalls if stall is not None] == [(2,), (2, 3)]
    assert published.empty()
