"""Every figure of the public tool, on traces that ByteDance published and on traces of simulated jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain_diagnostics.store.public_trace import write_meta, write_trace
from tests.helpers.outside_data import outside_data
from tests.helpers.pipeline_job import PipelineJob
from tests.helpers.source_tree import ROOT
from tests.helpers.whatif_figures import count_figures, differences, figures_printed

COMMITTED = {"ST": ROOT / "tests/golden/public_trace_st"}
GOLDEN = json.loads((ROOT / "tests/golden/whatif_made_jobs.json").read_text())["jobs"]
TOLERANCE = 1e-5
"""The public tool computes with 32 bits; the required tolerance is 1e-3."""


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_every_figure_of_a_public_trace(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = (
        COMMITTED.get(name)
        or outside_data(
            "MEGATRAIN_STRAGGLER_TRACES", "shared/data/straggler_traces", "ByteDance's other public trace, SE"
        )
        / name
    )
    expected = json.loads((directory / "expected.json").read_text())
    workers = json.loads((directory / "expected_mw.json").read_text())
    last_stage = json.loads((directory / "expected_ms.json").read_text())

    found = figures_printed(capsys, "--trace", str(directory / "trace.parquet"), "--meta", str(directory / "meta.yaml"))

    assert count_figures(expected) > 700
    assert not list(differences(expected, {key: found[key] for key in expected}, TOLERANCE))
    assert not list(differences(workers, found["mw"], TOLERANCE))
    assert not list(differences(last_stage, found["ms"], TOLERANCE))
    assert (found["Mw"], found["Ms"]) == (found["mw"]["Mw"], found["ms"]["Ms"])
    for name in ("tori", "tideal"):
        assert found[name] == found["mw"][name] == found["ms"][name]
    assert found["notes"] == []


@pytest.mark.parametrize("title", list(GOLDEN))
def test_every_figure_of_a_made_trace(title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = GOLDEN[title]["expected"]
    job = made_job(GOLDEN[title]["job"])
    write_trace(tmp_path / "trace.parquet", job.run())
    write_meta(tmp_path / "trace.yaml", job.shape)

    found = figures_printed(capsys, "--trace", str(tmp_path / "trace.parquet"))

    assert not list(differences(expected, {key: found[key] for key in expected}, TOLERANCE))


def test_made_traces_have_what_public_ones_lack() -> None:
    jobs = [entry["job"] for entry in GOLDEN.values()]
    assert {job.get("num_chunks", 1) for job in jobs} >= {1, 2, 3, 4}
    assert any(job.get("tp_size", 1) > 1 for job in jobs)
    assert any(entry["expected"]["launch_decompose_by_optype"] for entry in GOLDEN.values())
    assert any(
        "separate-grads-all-reduce" in entry["expected"]["blocking_decompose_by_optype"] for entry in GOLDEN.values()
    )


def made_job(reported: dict[str, Any]) -> PipelineJob:
    """Return the job of the golden file, which has slow cells as lists, because keys in JSON are strings."""
    slow_cells = {(dp, stage): factor for dp, stage, factor in reported.get("slow_cells", [])}
    others = {name: dict(reported[name]) for name in ("slow_stages", "slow_dp_ranks") if name in reported}
    return PipelineJob(**{**reported, **others, "slow_cells": slow_cells})
