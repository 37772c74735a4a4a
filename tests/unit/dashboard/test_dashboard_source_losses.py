"""The losses by source of the data: how metrics.jsonl records them, and which part of a large file is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.reporting.report import SourceReport
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.overview.document import SourcesDocument
from megatrain_dashboard.api.overview.sources_view import sources_document
from megatrain_dashboard.sources.runs.metrics_history import read_metrics_history
from megatrain_dashboard.sources.runs.metrics_records import MetricsRecords, read_metrics_records
from megatrain_dashboard.sources.window import Window
from tests.helpers.many_runs import BEGAN_S, STEP_S, report_steps, write_run
from tests.helpers.served_run import RecordedPage

NUM_STEPS = 100


def of_step(step: int) -> tuple[SourceReport, ...]:
    """Return the sources of a step that is counted from one: "web" falls, "code" rises and is in even steps only."""
    web = SourceReport(name="web", loss=5.0 - step / 50, num_tokens=300)
    code = SourceReport(name="code", loss=2.0 + step / 100, num_tokens=step)
    return (web, code) if step % 2 == 0 else (web,)


def new_run(root: Path) -> RunDirectory:
    run = RunDirectory(root)
    run.create()
    return run


def document_of(run: RunDirectory, *, window: Window = Window(), name: str = "", points: int = 10) -> SourcesDocument:  # noqa: B008
    return sources_document(read_metrics_records(run, 1 << 20), window=window, name=name, points=points)


def test_document_has_the_means_by_tokens(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    report_steps(run, range(1, NUM_STEPS + 1), loss=2.0, step_s=STEP_S, began_s=BEGAN_S, sources=of_step)
    found = document_of(run, name="code")
    web, code = found.sources
    assert (web.name, web.num_tokens, code.name, code.num_tokens) == ("web", 30_000, "code", 2550)
    assert (web.token_share, code.token_share) == pytest.approx((30_000 / 32_550, 2550 / 32_550))
    last, first = np.arange(92, 101, 2), np.arange(2, 11, 2)
    newest = np.average(2 + last / 100, weights=last)
    assert (code.loss, code.change) == pytest.approx((newest, newest - np.average(2 + first / 100, weights=first)))
    assert web.change == pytest.approx(-1.8)
    assert (len(web.line), web.num_bad_steps, web.last_bad_step) == (25, 0, None)
    # ten entries of ten steps, which the charts count from zero
    assert (found.stride, found.step, found.is_sampled) == (10, tuple(range(9, 100, 10)), False)
    assert found.at_unix_s[0] == BEGAN_S + 10 * STEP_S
    assert found.series is not None
    assert (found.series.name, found.series.loss[-1]) == ("code", pytest.approx(newest))
    assert found.series.loss_high == pytest.approx(np.arange(10, 101, 10) / 100 + 2)
    risen = document_of(run, name="no such source").series
    assert risen is not None
    assert risen.name == "code"


def test_document_holds_the_steps_of_the_window_only(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    report_steps(run, range(1, NUM_STEPS + 1), loss=2.0, step_s=STEP_S, began_s=BEGAN_S, sources=of_step)
    found = document_of(run, window=Window(first_step=20, last_step=24))
    assert (found.stride, found.step) == (1, (20, 21, 22, 23, 24))
    assert found.series is not None
    assert found.series.name == "web"  # fewer than ten steps have no change
    assert found.series.loss == pytest.approx(5.0 - np.arange(21, 26) / 50)
    assert document_of(run, window=Window(first_step=500)).sources == ()


def test_repeated_steps_count_as_reported_last(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    report_steps(run, range(1, 21), loss=2.0, step_s=STEP_S, began_s=BEGAN_S, sources=of_step)

    def again(step: int) -> Sequence[SourceReport]:
        return (SourceReport(name="web", loss=1.0, num_tokens=10),)

    report_steps(run, range(11, 16), loss=2.0, step_s=STEP_S, began_s=BEGAN_S + 100, sources=again)
    found = document_of(run, name="web", points=100)
    assert found.step == tuple(range(15))
    assert found.series is not None
    assert found.series.loss == pytest.approx([*(5.0 - np.arange(1, 11) / 50), *[1.0] * 5])


def test_bad_steps_of_a_source_are_counted(tmp_path: Path) -> None:
    run = new_run(tmp_path)

    def sources(step: int) -> Sequence[SourceReport]:
        web, *others = of_step(step)
        return (
            web,
            *[SourceReport(name=one.name, loss=float("nan"), num_tokens=5) for one in others if step > 6],
            *others[: step <= 6],
        )

    report_steps(run, range(1, 11), loss=2.0, step_s=STEP_S, began_s=BEGAN_S, sources=sources)
    code = document_of(run).sources[1]
    assert (code.name, code.num_bad_steps, code.last_bad_step, code.loss) == ("code", 2, 9, None)


@pytest.mark.parametrize("sources", [None, {}, 7, ["web"], [{"name": 3, "num_tokens": "x"}], [{"loss": 1.0}], [{}]])
def test_records_without_valid_sources_are_harmless(sources: object) -> None:
    records: tuple[dict[str, Any], ...] = (
        {"kind": "step", "step": 1, "sources": sources},
        {"kind": "step", "step": 2, "sources": [{"name": "web", "loss": 2.0, "num_tokens": 4}]},
    )
    found = sources_document(MetricsRecords(records), window=Window(), points=10)
    assert [(one.name, one.loss) for one in found.sources if one.num_tokens] == [("web", 2.0)]
    assert found.at_unix_s[-1] is None


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    sizes: list[int] = []
    pread = os.pread
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", lambda file, num, at: sizes.append(num) or pread(file, num, at))
        yield sizes


@pytest.mark.slow
def test_file_of_many_sources_is_read_in_larger_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    many = [SourceReport(name=f"source-{number}", loss=2.0, num_tokens=100) for number in range(200)]
    report_steps(run, range(1, 401), loss=2.0, step_s=STEP_S, began_s=BEGAN_S, sources=lambda step: many)
    with counted_reads(monkeypatch) as sizes:
        history = read_metrics_history(run, 1 << 20)
    assert sum(sizes) <= 1 << 20 < run.metrics_file.stat().st_size
    steps = history.column("step")
    assert len(steps) > 40
    assert (steps[0], steps[-1]) == (1, 400)


def test_times_choose_the_part_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    report_steps(run, range(1, 2001), loss=2.0, step_s=STEP_S, began_s=BEGAN_S, sources=of_step)
    begin_s, end_s = BEGAN_S + 1000 * STEP_S, BEGAN_S + 1050 * STEP_S
    with counted_reads(monkeypatch) as sizes:
        read = read_metrics_records(run, 128 * 1024, begin_s, end_s)
    assert sum(sizes) < 256 * 1024 < run.metrics_file.stat().st_size
    assert not read.is_sampled
    steps = [record["step"] for record in read.records if record.get("kind") == "step"]
    assert set(range(1000, 1051)) <= set(steps)
    assert len(steps) < 150
    sampled = read_metrics_records(run, 128 * 1024, begin_s - 2000, end_s + 2000)
    assert sampled.is_sampled
    assert len(read_metrics_records(run, 128 * 1024, BEGAN_S + 1e6).records) < 40


def test_sources_are_answered_of_a_recorded_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, num_steps=0)
    report_steps(run, range(1, 21), loss=2.0, step_s=STEP_S, began_s=BEGAN_S, sources=of_step)
    with closing(RecordedPage(run)) as page:
        found = page.ask("sources", source="web", points=4)
        assert [one["name"] for one in found["sources"]] == ["web", "code"]
        assert (found["series"]["name"], found["step"]) == ("web", [4, 9, 14, 19])
        # records that are added later are included
        report_steps(run, range(21, 23), loss=2.0, step_s=STEP_S, began_s=BEGAN_S + 40, sources=of_step)
        assert page.ask("sources", source="web", points=4)["step"][-1] == 21
        run.metrics_file.unlink()
        assert page.ask("sources")["sources"] == []
        run.metrics_file.mkdir()
        refused = page.ask("sources", 503)
        assert refused["text"] == "metrics/metrics.jsonl cannot be read: is not a regular file"
