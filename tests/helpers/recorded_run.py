"""A run directory as a job leaves it: two rounds, a failure, a slow host, logs, stacks, checkpoints.

Round 1 trains steps 0 to 59, round 2 continues from step 50 to 119; a step takes a second, with 30 seconds between the
rounds. Rank 2 (host-1) is slow from step 80 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.record import encode
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import (
    Clocks,
    Groups,
    LogLines,
    Ranks,
    Stacks,
    StepTotals,
    Values,
    from_columns,
    joined,
)
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_job.jobs.lost_time import MEDIAN_NOTE
from tests.helpers.checkpoint_tree import put_main
from tests.helpers.hung_spans import group_of_four
from tests.helpers.launched_job import make_failure, make_incident
from tests.helpers.source_tree import ROOT
from tests.helpers.synthetic_steps import START_NS, SyntheticJob, values_of_ranks
from tests.helpers.table_rows import table_rows

LAYOUT = Layout(dp_size=4)
START_S = START_NS / 1e9
TOKENS = 4096.0
GAP_S = 30.0
"""Between the last step of round 1 and the first of round 2."""
SECOND_BEGAN_S = START_S + 60 + GAP_S - 50
"""Step n of round 2 ends at this and n + 1 seconds."""
FAILED_S = START_S + 60.5
END_TOKENS = 120 * 4096
"""Repeated steps count once."""
NAN_STEP = 7
SPIKE_STEP = 93
SCRIPT = "<script>alert(1)</script>"
EVIL = "a" * 48 + "!"
"""A text on which (a+)+$ takes years to fail with a backtracking matcher."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The directory of the run, and the parameters of its job."""

    run: RunDirectory
    jobs: Mapping[int, SyntheticJob]


def write_recorded_run(root: Path) -> RecordedRun:
    """Write the run."""
    run = RunDirectory(root)
    run.create()
    (root / "config.toml").write_text((ROOT / "configs" / "demo.toml").read_text())
    jobs = {number: SyntheticJob(LAYOUT, round=number) for number in (1, 2)}
    with SegmentStore(run.events) as store:
        for number, job in jobs.items():
            ranks = job.ranks()
            began_ns = START_NS if number == 1 else int((SECOND_BEGAN_S + 50) * 1e9)
            store.append(Ranks, to_arrow(replace(ranks, at_ns=np.full_like(ranks.at_ns, began_ns))))
        store.append(Groups, to_arrow(joined(Groups, [group_of_four(number) for number in (1, 2)])))
        store.append(LogLines, to_arrow(_logs()))
        store.append(Stacks, to_arrow(_stacks()))
        store.append(Clocks, to_arrow(_clocks()))
        store.commit()
        for number, steps in ((1, range(60)), (2, range(50, 120))):
            for step in steps:
                if step == 80:
                    jobs[number].compute_factor[2] = 1.3
                totals, values = step_of(jobs[number], number, step)
                store.append(StepTotals, to_arrow(totals))
                store.append(Values, to_arrow(values))
            store.commit()
    incident = failure()
    (run.incidents / f"{incident.incident_id}.json").write_bytes(encode(incident))
    (run.incidents / "torn.json").write_bytes(b'{"schema_version": 1, "incident_id": ')
    put_main(LocalLocation(run.checkpoints), 50, 100)
    return RecordedRun(run, jobs)


def end_s(round_number: int, step: int) -> float:
    """Return when a step ended, unix seconds."""
    return (START_S if round_number == 1 else SECOND_BEGAN_S) + step + 1


def step_of(job: SyntheticJob, round_number: int, step: int) -> tuple[StepTotals, Values]:
    """Return the reports of all ranks about a step: each takes a second, whatever the job's ranks did in it."""
    totals, squares = job.step(step)
    reported = {
        StepValue.LOSS: float("nan") if step == NAN_STEP else 100.0 if step == SPIKE_STEP else 5.0 - step / 100,
        StepValue.GRAD_NORM: 1.0, StepValue.TOKENS: TOKENS, StepValue.MODEL_FLOPS: 4e14, StepValue.PEAK_FLOPS: 1e15,
    }  # fmt: skip
    values = joined(Values, [squares, values_of_ranks(range(LAYOUT.world_size), step, reported, round_number)])
    # Sequence numbers of one rank and step are different.
    values = replace(values, sequence=np.arange(len(values.rank)) + 10_000 * (step + 1))
    begin_ns = int((end_s(round_number, step) - 1) * 1e9)
    is_step = totals.operation == 1
    totals = replace(
        totals, start_ns=np.full_like(totals.start_ns, begin_ns), sum_ns=np.where(is_step, 10**9, totals.sum_ns)
    )
    return totals, replace(values, at_ns=np.full_like(values.at_ns, begin_ns + 10**9))


def failure() -> Incident:
    """Return the incident between the two rounds: ten steps were repeated."""
    moments = replace(
        make_incident().moments,
        began=FAILED_S, detected=FAILED_S + 1, decided=FAILED_S + 1.5, halted=FAILED_S + 3, round_written=FAILED_S + 4,
        joined=FAILED_S + 10, loaded=FAILED_S + 20, first_step=end_s(2, 50),
    )  # fmt: skip
    return make_incident(
        "0001", moments=moments, last_step=60, resumed_step=50, culprit_hosts=("host-1",), culprit_ranks=(3,),
        failures=(
            make_failure(1, 69, at_unix_s=FAILED_S - 0.2, label="network", is_cascade=True, line="connection lost"),
            make_failure(3, -9, at_unix_s=FAILED_S),
        ),
        notes={MEDIAN_NOTE: "1"},
    )  # fmt: skip


def _logs() -> LogLines:
    lines = [
        (1, 0, START_S + 1, "host-0", "step 1 loss 5.0"),
        (1, 3, START_S + 60.1, "host-1", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        (1, 1, START_S + 60.2, "host-0", "RuntimeError: Connection closed by peer [10.0.0.2]:1234"),
        (2, 0, SECOND_BEGAN_S + 55, "host-0", f"{SCRIPT} [INFO] resumed"),
        (2, 1, SECOND_BEGAN_S + 56, "host-0", EVIL),
        (2, 2, SECOND_BEGAN_S + 700, "host-1", "an Error of no weight"),
    ]
    number, rank, at_s, host, line = zip(*lines, strict=True)
    columns = {
        "round": number, "rank": rank, "sequence": [100 * (place + 1) for place in range(len(lines))],
        "at_ns": [int(moment_s * 1e9) for moment_s in at_s], "host": host, "line": line,
    }  # fmt: skip
    return table_rows(LogLines, columns)


def _stacks() -> Stacks:
    waits = "megatrain/training/step_loop.py:10 run\nmegatrain/comm/group.py:20 wait"
    works = "megatrain/training/step_loop.py:10 run\nmegatrain/data/loader.py:7 read"
    columns = {
        "round": 2, "rank": [0, 1, 2, 3, 3], "sequence": [1, 1, 1, 1, 2],
        "at_ns": [int((SECOND_BEGAN_S + 120) * 1e9)] * 4 + [int((SECOND_BEGAN_S + 121) * 1e9)],
        "pid": [1000, 1001, 1002, 1003, 1003], "host": ["host-0", "host-0", "host-1", "host-1", "host-1"],
        "thread": "MainThread", "stack": [waits, waits, waits, waits, works],
    }  # fmt: skip
    return table_rows(Stacks, columns)


def _clocks() -> Clocks:
    return from_columns(
        Clocks,
        {
            "at_ns": [START_NS, START_NS + 10**10, START_NS],
            "offset_ns": [5_000_000, 7_000_000, -2_000_000],
            "error_ns": [1000, 2000, 3000],
            "host": ["host-0", "host-0", "host-1"],
        },
    )
