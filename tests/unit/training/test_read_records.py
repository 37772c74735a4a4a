"""What a rank records of its reads, as its black box has it: of the loader of its host, and of its own thread."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.black_box.values import Identity, Phase
from megatrain.contracts.layout import Layout
from megatrain.data.loader_report import LoaderRead, LoaderReport
from megatrain.data.producer_work import ProducerWork
from megatrain.data.reader import ReadSlots
from megatrain.data.step_batch import StepBatch
from megatrain.run_files.run_directory import black_box_path
from megatrain.telemetry.recorder import open_recorder
from megatrain.training.read_records import record_reads, recorded_reads, values_of_reads

NOT_ASKED = ProducerWork()
FIRST = ProducerWork(1100, 300, 16, 500, num_answered=1, answering_ns=300, num_waiting=2)
SECOND = ProducerWork(1050, 600, 32, 900, num_answered=2, num_failed=1, answering_ns=700, num_waiting=5)
PLAIN = StepBatch(0, 4, [])


@pytest.mark.parametrize(
    ("batch", "spans", "values"),
    [
        (PLAIN, [], []),
        (
            replace(PLAIN, loader=LoaderReport(2, (LoaderRead(1000, 700, 99),), 1)),
            [("data-read", 1000, 700, 99, -1)],
            [("steps-ready", 2), ("loader-starts", 1)],
        ),
        (
            replace(
                PLAIN,
                loader=LoaderReport(
                    0, (LoaderRead(1000, 700, 99, (FIRST, SECOND)), LoaderRead(1700, 10, 99, (NOT_ASKED,) * 2)), 1
                ),
            ),
            [
                ("data-read", 1000, 700, 99, -1),
                ("data-read", 1700, 10, 99, -1),
                ("picture-wait", 1050, 600, 0, -1),
                ("picture-requests", 1100, 300, 500, 0),
                ("picture-requests", 1050, 600, 900, 1),
            ],
            [
                *(("steps-ready", 0), ("loader-starts", 1)),
                *(("producer-pictures", 16), ("producer-answer-seconds", 300e-9)),
                *(("producer-waiting", 2), ("producer-failures", 0)),
                *(("producer-pictures", 32), ("producer-answer-seconds", 350e-9)),
                *(("producer-waiting", 5), ("producer-failures", 1)),
            ],
        ),
        (
            replace(PLAIN, producers=(NOT_ASKED, FIRST)),
            [("picture-wait", 1100, 300, 0, -1), ("picture-requests", 1100, 300, 500, 1)],
            [
                *(("producer-pictures", 0), ("producer-answer-seconds", 0.0)),
                *(("producer-waiting", 0), ("producer-failures", 0)),
                *(("producer-pictures", 16), ("producer-answer-seconds", 300e-9)),
                *(("producer-waiting", 2), ("producer-failures", 0)),
            ],
        ),
    ],
    ids=["no-loader", "no-pictures", "loader", "own-thread"],
)
def test_each_read_and_its_requests_are_recorded_once(
    batch: StepBatch,
    spans: list[tuple[str, int, int, int, int]],
    values: list[tuple[str, float]],
    tmp_path: Path,
) -> None:
    identity = Identity("demo", "main", 1, 0, Layout(), os.getpid(), "host")
    recorder = open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)
    recorder.set_step(3)
    record_reads(recorder, batch)
    for kind, value in values_of_reads(batch):
        recorder.record_value(kind, value)
    box = read_black_box(black_box_path(tmp_path, "demo", "key", "main", 1, 0))
    found = [
        (record.operation, record.start_ns, record.duration_ns, record.num_bytes, record.chunk)
        for record in box.records
        if record.is_span
    ]
    assert found == spans
    assert [(StepValue(one.kind_number).text, one.value) for one in box.values] == values
    recorder.close()


def test_each_read_of_held_out_samples_is_a_wait_for_data(tmp_path: Path) -> None:
    """It counts in no sum of a step."""
    identity = Identity("demo", "main", 1, 0, Layout(), os.getpid(), "host")
    recorder = open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)
    recorder.set_step(3)
    with recorder.span(Operation.STEP):
        pass
    recorder.set_phase(Phase.EVALUATION)
    reads = [ReadSlots([], np.zeros(0, np.int64), (), works) for works in ((), (NOT_ASKED, FIRST))]
    assert list(recorded_reads(recorder, iter(reads))) == reads
    assert set(recorder.complete_step().totals) == {Operation.STEP}
    box = read_black_box(black_box_path(tmp_path, "demo", "key", "main", 1, 0))
    found = [(record.operation, record.step) for record in box.records if record.is_span]
    names = ["step", "data-wait", "data-wait", "picture-wait", "picture-requests"]
    assert found == [(name, 3) for name in names]
    recorder.close()
