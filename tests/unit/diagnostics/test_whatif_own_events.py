"""What-if analysis of recorded spans: the same figures as of the job that they record; export as a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.whatif import OperationTable, WhatIf, make_model, what_if
from megatrain_diagnostics.analysis.whatif.from_spans import operations_of
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.roster import make_roster
from megatrain_diagnostics.events.tables import Ranks, Spans, joined, select
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.pipeline_job import PipelineJob
from tests.helpers.recorded_spans import ROUND, later, recorded_spans, who_ran
from tests.helpers.synthetic_steps import empty_groups
from tests.helpers.whatif_figures import differences, figures_printed

JOBS = {
    "1f1b": PipelineJob(pp_size=3, dp_size=2, num_microbatches=5, slow_cells={(1, 1): 1.5}),
    "interleaved": PipelineJob(
        pp_size=4, dp_size=3, tp_size=2, num_chunks=2, num_microbatches=8, slow_cells={(1, 2): 1.5}
    ),
    "gaps": PipelineJob(pp_size=2, dp_size=3, num_chunks=3, num_microbatches=6, gaps=0.4, slow_stages={1: 1.3}),
    "no pipeline": PipelineJob(pp_size=1, dp_size=6, slow_dp_ranks={4: 1.4}),
    "chunks on one stage": PipelineJob(pp_size=1, dp_size=4, num_chunks=3, slow_dp_ranks={2: 1.4}),
    "zero bubble": PipelineJob(
        pp_size=4, dp_size=2, num_microbatches=6, schedule="zero_bubble", slow_cells={(1, 2): 1.5}
    ),
    "no data parallel": PipelineJob(pp_size=3, dp_size=1, num_microbatches=6, slow_stages={2: 1.4}),
}


def recorded(job: PipelineJob) -> tuple[OperationTable, PipelineJob]:
    """Return the operations of a job, without features that recorded spans cannot represent."""
    exact = replace(job, is_overlapped=True, separate_s=0.0, noise=0.1)
    return exact.run(), exact


def of_spans(spans: Spans, job: PipelineJob) -> WhatIf:
    roster = make_roster(who_ran(job.shape), empty_groups(), ROUND)
    return what_if(make_model(*operations_of(spans, roster, "job")))


def test_queue_time_of_early_collectives_does_not_count() -> None:
    """All reduce-scatters of a step begin with the first one, and end as before: time in the queue does not count."""
    table, job = recorded(JOBS["interleaved"])
    spans = recorded_spans(table, job.shape)
    expected = of_spans(spans, job)
    start, end = spans.start_ns.copy(), spans.start_ns + spans.duration_ns
    scatters = np.flatnonzero(spans.operation == Operation.GRADS_REDUCE_SCATTER.number)
    cells = list(zip(spans.rank[scatters].tolist(), spans.step[scatters].tolist(), strict=True))
    by_cell = [scatters[[each == cell for each in cells]] for cell in sorted(set(cells))]
    for rows in by_cell:
        in_turn = rows[np.argsort(end[rows])]
        assert len(in_turn) > 1
        # without pauses, as exchanges that wait in a queue
        start[in_turn[1:]] = end[in_turn[:-1]]
    back_to_back = replace(spans, start_ns=start.copy(), duration_ns=end - start)
    for rows in by_cell:
        in_turn = rows[np.argsort(end[rows])]
        start[in_turn] = start[in_turn[0]] + np.arange(len(in_turn))
    ahead = replace(spans, start_ns=start, duration_ns=end - start)

    found, reported = of_spans(ahead, job), of_spans(back_to_back, job)

    assert found.slowdown == pytest.approx(reported.slowdown, rel=1e-9)
    assert found.launch_slowdown == pytest.approx(reported.launch_slowdown, rel=1e-9)
    assert found.parts.by_optype.overall == pytest.approx(reported.parts.by_optype.overall, rel=1e-9)
    assert found.worst_ranks == expected.worst_ranks


@pytest.mark.slow(kept=["1f1b", "interleaved", "no pipeline", "zero bubble"])
@pytest.mark.parametrize("name", list(JOBS))
def test_spans_give_the_figures_of_what_they_record(name: str) -> None:
    table, job = recorded(JOBS[name])
    expected = what_if(make_model(table, job.shape))
    found = of_spans(recorded_spans(table, job.shape), job)

    assert found.slowdown == pytest.approx(expected.slowdown, rel=2e-3)
    assert found.launch_slowdown == pytest.approx(expected.launch_slowdown, rel=0.02)
    assert found.worst_ranks == expected.worst_ranks
    assert found.workers.rem == pytest.approx(expected.workers.rem, abs=0.02)
    assert found.last_stage.rem == pytest.approx(expected.last_stage.rem, abs=0.02)
    for way in ("by_dp_rank", "by_stage"):
        parts, reported = getattr(found.parts, way).overall, getattr(expected.parts, way).overall
        assert parts == pytest.approx(reported, rel=2e-3)
    computes = ("forward-compute", "backward-compute", "backward-weight-compute")
    for kind in (*computes, "forward-pp-comm", "optimizer", "params-all-gather"):
        reported = expected.parts.by_optype.overall.get(kind)
        assert found.parts.by_optype.overall.get(kind) == (
            reported if reported is None else pytest.approx(reported, rel=2e-3)
        )
    assert list(found.measured_s) == list(job.steps)
    assert found.notes == ()


def test_the_halves_of_a_backward_are_distinguished() -> None:
    table, job = recorded(replace(JOBS["zero bubble"], slow_cells={}))
    spans = recorded_spans(table, job.shape)
    # all other ranks are made faster, because a longer span would overlap with the next one
    is_fast = (spans.rank != 1) & (spans.operation == Operation.BACKWARD_WEIGHT_COMPUTE.number)
    one_slow = replace(spans, duration_ns=np.where(is_fast, spans.duration_ns // 4, spans.duration_ns))
    even, uneven = (of_spans(each, job).parts.by_optype.overall for each in (spans, one_slow))

    assert uneven["backward-weight-compute"] > even["backward-weight-compute"] + 0.05
    assert uneven["backward-compute"] == pytest.approx(even["backward-compute"], abs=0.03)


def test_slowest_tensor_parallel_rank_counts() -> None:
    table, job = recorded(PipelineJob(pp_size=1, dp_size=3, tp_size=2))
    spans = recorded_spans(table, job.shape)
    is_slow = (spans.rank == 3) & (spans.operation == Operation.FORWARD_COMPUTE.number)
    slowed = replace(spans, duration_ns=np.where(is_slow, spans.duration_ns * 2, spans.duration_ns))
    assert of_spans(slowed, job).worst_ranks == (2,)
    assert (
        of_spans(slowed, job).parts.by_dp_rank.overall["1"] > of_spans(spans, job).parts.by_dp_rank.overall["1"] + 0.1
    )


@pytest.mark.slow(kept=["interleaved-0.003", "zero bubble-0.2"])
@pytest.mark.parametrize("behind_s", [0.003, 0.2])
@pytest.mark.parametrize("name", ["interleaved", "zero bubble"])
def test_tensor_parallel_ranks_may_be_apart(name: str, behind_s: float) -> None:
    """One rank already reduces its gradients, or receives, while another is still in its last backward."""
    table, job = recorded(replace(JOBS[name], tp_size=2))
    spans = recorded_spans(table, job.shape)
    behind = spans
    for rank in range(1, job.shape.world_size, 2):
        behind = later(behind, rank, behind_s)
    found, reported = of_spans(behind, job), of_spans(spans, job)

    assert found.notes == ()
    assert found.measured_s == pytest.approx(reported.measured_s, abs=1.01 * behind_s)
    assert found.worst_ranks == reported.worst_ranks


def test_v_shaped_schedule_is_refused() -> None:
    """Of two chunks, the last stage passes the output of the first one to its second one without a message."""
    table, job = recorded(PipelineJob(pp_size=2, dp_size=2, num_chunks=2))
    spans = recorded_spans(table, job.shape)
    of_turn = (spans.rank >= 2) & (spans.chunk == 0) & (spans.operation == Operation.FORWARD_SEND.number)
    assert of_turn.any()
    roster = make_roster(who_ran(job.shape), empty_groups(), ROUND)
    with pytest.raises(DataError, match=r"the last stage sends no result of its first chunk, so .* V-shaped"):
        operations_of(select(spans, ~of_turn), roster, "job")


def test_step_with_a_silent_rank_is_left_out() -> None:
    table, job = recorded(JOBS["interleaved"])
    spans = recorded_spans(table, job.shape)
    silent = select(spans, ~((spans.rank == 11) & (spans.step == 20)))
    found = of_spans(silent, job)
    assert list(found.measured_s) == [10, 30]
    assert "step 20 is left out" in found.notes[0]
    assert "dp rank 2" in found.notes[0]


def test_evaluation_after_a_step_is_no_part_of_it() -> None:
    table, job = recorded(JOBS["1f1b"])
    spans = recorded_spans(table, job.shape)
    forward = select(spans, spans.operation == Operation.FORWARD_COMPUTE.number)
    evaluation = replace(forward, start_ns=forward.start_ns + 30_000_000_000, sequence=forward.sequence + 100_000)
    both = of_spans(joined(Spans, [spans, evaluation]), job)
    assert both.measured_s == of_spans(spans, job).measured_s
    assert both.notes == ()


def test_garbage_spans_cost_no_more_than_themselves() -> None:
    table, job = recorded(JOBS["1f1b"])
    spans = recorded_spans(table, job.shape)
    few = select(spans, np.arange(6))
    garbage = [
        replace(few, rank=few.rank + 10_000),
        replace(few, duration_ns=np.full_like(few.duration_ns, -5)),
        replace(few, step=np.full_like(few.step, -1)),
        replace(few, operation=np.full_like(few.operation, 200)),
        replace(few, round=few.round + 1),
        replace(few, chunk=np.full_like(few.chunk, -1), microbatch=np.full_like(few.microbatch, -1)),
    ]
    only_computes = np.isin(few.operation, list(range(3, 9)))
    garbage[-1] = select(garbage[-1], only_computes)
    assert of_spans(joined(Spans, [spans, *garbage]), job) == of_spans(spans, job)


def test_without_a_full_step_the_way_to_one_is_reported() -> None:
    table, job = recorded(JOBS["1f1b"])
    spans = recorded_spans(table, job.shape)
    optimizers = select(spans, spans.operation == Operation.OPTIMIZER.number)
    with pytest.raises(DataError, match=r"no step was recorded in full; .*megatrain diag set"):
        of_spans(optimizers, job)


def stored(name: str, run: Path) -> Path:
    """Write the events of a job to a run directory, and return it."""
    table, job = recorded(JOBS[name])
    (run / "events").mkdir(parents=True)
    with SegmentStore(run / "events") as store:
        store.append(Spans, to_arrow(recorded_spans(table, job.shape)))
        store.append(Ranks, to_arrow(who_ran(job.shape)))
        store.commit()
    return run


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored("interleaved", tmp_path_factory.mktemp("run"))


def test_exported_trace_has_the_same_figures(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported.parquet"
    own = figures_printed(capsys, str(run_directory), "--export-trace", str(exported))
    again = figures_printed(capsys, "--trace", str(exported))

    assert own["blocking_slowdown"] > 1.1
    assert own["job_meta"]["world_size"] == 24
    assert not list(differences(own, again, 1e-9))


def test_summary_names_the_worst_ranks_and_stages(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", "whatif", str(run_directory), "--steps", "10:20"]) == 0
    printed = capsys.readouterr().out
    assert "24 ranks (dp 3, pp 4)" in printed
    assert "2, from 10 to 20" in printed
    assert "(rank 14): check their hosts" in printed
    assert "backward-compute" in printed
    assert "M_S" in printed
    assert "\nstage" in printed


def test_a_job_of_one_stage_has_no_last_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", "whatif", str(stored("no pipeline", tmp_path / "run"))]) == 0
    printed = capsys.readouterr().out
    assert "M_W" in printed
    assert "dp rank  slowdown" in printed
    assert "M_S" not in printed
    assert "\nstage" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name either RUN ("),
        (["--trace", "a.parquet", "RUN"], "name either RUN ("),
        (["RUN", "--meta", "a.yaml"], "--meta is for --trace only"),
        (["--trace", "a.parquet", "--round", "3"], "a trace contains a single round"),
        (["RUN", "--round", "9"], "--round=9"),
        (["RUN", "--steps", "500:600"], "no step was recorded in full"),
    ],
)
def test_contradictory_arguments_are_refused(
    arguments: list[str], message: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["diag", "whatif", *(str(run_directory) if word == "RUN" else word for word in arguments)])
    assert code != 0
    assert message in capsys.readouterr().err


def test_export_never_overwrites_its_source(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.parquet"
    figures_printed(capsys, str(run_directory), "--export-trace", str(trace))
    before = trace.read_bytes(), trace.with_suffix(".yaml").read_bytes()

    for name, message in (("made.yaml", "would have the same name"), ("trace.parquet", "overwrite the trace")):
        assert main(["diag", "whatif", "--trace", str(trace), "--export-trace", str(tmp_path / name)]) != 0

        assert message in capsys.readouterr().err
        assert (trace.read_bytes(), trace.with_suffix(".yaml").read_bytes()) == before, name
