"""A launched job with its streamer and daemon: every step of every rank arrives, and the live switch takes effect."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Groups, LogLines, Ranks, Spans, StepTotals, Values
from megatrain_diagnostics.store.reader import StoredEvents
from tests.helpers.forked_program import ForkedProgram
from tests.helpers.job_under_launch import make_launched_job
from tests.helpers.paced_launch import paced_launch
from tests.helpers.paced_train import PaceDirectory, StepPace
from tests.helpers.train_process import TrainJob
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

STEPS = 220
RANKS = 2


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    changes = {
        "log": {"interval": 5}, "checkpoint": {"interval": 50}, "diagnostics": {"sample_period": 10},
        "dashboard": {"is_served": False},
    }  # fmt: skip
    # of more seconds than a streamer is absent
    return make_launched_job(tmp_path, STEPS, changes, {"telemetry": {"black_box_records": 16_384}})


@pytest.fixture
def launched(job: TrainJob, tmp_path: Path) -> Iterator[ForkedProgram]:
    """The job, with steps of about 30 ms."""
    pace = PaceDirectory(tmp_path / "pace", StepPace(forward_s=0.005, backward_s=0.01))
    with paced_launch(job, pace, RANKS, tmp_path / "launch.log") as process:
        yield process


def streamers(job: TrainJob) -> list[int]:
    """Return the processes of the job's streamers."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = place.read_bytes().split(b"\0")
            if b"megatrain_diagnostics.streamer" in words and str(job.root).encode() in b" ".join(words):
                found.append(int(place.parent.name))
    return found


@pytest.mark.timeout(900)
def test_every_step_arrives_despite_killed_streamers(job: TrainJob, launched: ForkedProgram, tmp_path: Path) -> None:
    def step() -> int:
        return max((record["step"] for record in job.records("step")), default=0)

    def reach(number: int) -> None:
        wait_until(lambda: step() >= number or launched.poll() is not None, f"step {number}", deadline_s=2 * DEADLINE_S)
        assert launched.poll() is None, (tmp_path / "launch.log").read_text()[-2000:]

    def diag(*words: str) -> None:
        assert main(["diag", *words, str(job.files.root)]) == 0

    reach(30)
    for pid in streamers(job):
        os.kill(pid, signal.SIGKILL)
    reach(60)
    diag("off")
    reach(90)
    diag("on")
    reach(110)
    diag("set", "--full-for=3600")
    reach(150)
    diag("set", "--full-for=0")
    reach(170)
    diag("set", "--without=forward-compute")
    assert launched.wait(DEADLINE_S) == 0, (tmp_path / "launch.log").read_text()[-2000:]
    assert streamers(job) == []

    events = StoredEvents(job.files.events)
    ranks = events.read(Ranks)
    assert sorted(set(ranks.rank.tolist())) == list(range(RANKS))
    assert len(set(ranks.host.tolist())) == 1
    assert {str(name) for name in events.read(Groups).name} >= {"dp", "tp", "pp"}
    _check_steps(events)
    _check_spans(events)
    lines = events.read(LogLines)
    assert any("step 220/220" in str(line) for line in lines.line)
    assert events.problems() == ()


def _check_steps(events: StoredEvents) -> None:
    """Totals and values of all steps of all ranks exist, except for a period in which recording was off."""
    values, totals = events.read(Values), events.read(StepTotals)
    losses: dict[int, set[float]] = {}
    for rank in range(RANKS):
        own = (values.rank == rank) & (values.kind == StepValue.LOSS)
        reported = np.unique(values.step[own])
        missing = sorted(set(range(STEPS)) - set(reported.tolist()))
        assert missing, "the switch never took effect"
        assert missing == list(range(missing[0], missing[-1] + 1)), "one period, and nothing else"
        assert 59 <= missing[0] < 90
        assert missing[-1] < 110
        assert set(totals.step[totals.rank == rank].tolist()) == set(reported.tolist())
        for step, value in zip(values.step[own].tolist(), values.value[own].tolist(), strict=True):
            losses.setdefault(step, set()).add(value)
    assert all(len(reported) == 1 for reported in losses.values()), "all ranks report the same loss"


def _check_spans(events: StoredEvents) -> None:
    rank_0 = events.read(Spans, Where(ranks=(0,)))

    def steps_of(operation: Operation) -> list[int]:
        chosen: Any = rank_0.step[rank_0.operation == operation.number]
        return sorted(set(chosen.tolist()))

    full = steps_of(Operation.STEP)
    assert set(full) >= {0, 10, 20, 30, 40, 50}, "one step in ten; the daemon may have requested more"
    assert set(full) >= set(range(130, 140)), "every step for a while"
    assert len(full) < STEPS - 60, "and not for long"
    assert max(steps_of(Operation.BACKWARD_COMPUTE)) >= 210
    assert max(steps_of(Operation.FORWARD_COMPUTE)) < 210
    assert not (rank_0.duration_ns == -1).any()
