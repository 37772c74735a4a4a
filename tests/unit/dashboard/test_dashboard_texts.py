"""Texts of the API have no raw Python representations, and a page has one name in API, view and address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.canned_analyses import analysis_responses
from tests.helpers.canned_job import job_responses
from tests.helpers.canned_records import record_responses
from tests.helpers.raw_python import raw_python, raw_texts
from tests.helpers.served_run import RecordedPage
from tests.helpers.source_tree import ROOT

SAMPLE = ROOT / "tests" / "golden" / "dashboard-sample"
RECORDED = tuple(path.stem for path in sorted((SAMPLE / "incidents").glob("*.json")))
STORIES = tuple(f"incidents/{name}/{part}" for name in RECORDED for part in ("story", "logs"))
ALWAYS = ("job", "overview", "series", "incidents", "audit", "hosts", "checkpoints")
OF_A_ROUND = ("stragglers", "whatif", "hang", "logs/causes", "timeline/steps", "heat/outliers", "ranks/0", "ranks/3")


@pytest.fixture(scope="module")
def page() -> Iterator[RecordedPage]:
    with closing(RecordedPage(RunDirectory(SAMPLE))) as found:
        yield found


def ask(page: RecordedPage, path: str) -> Any:
    response = page.client.get(f"/api/v1/{path}")
    assert response.status_code in (200, 404), response.text
    return response.json()


def test_raw_names_in_texts_are_found() -> None:
    raw = {
        "round 3 stands still: Stall(phase='step', step=210)": ["Stall(phase="],
        "gain_s_per_step=0 of step_s=None": ["gain_s_per_step=", "step_s="],
        "a restart costs 10 s (diagnostics.restart_cost_s=10)": [],
        "start it with --recovery.join_timeout_s=20 (all_hosts)": [],
        "rank 5 ended with -9": ["with -9"],
        "S = 1.08: it is slower than ideal": [],
    }
    assert {text: raw_python(text) for text in raw} == raw


@pytest.mark.slow(
    kept=[
        "checkpoints",
        "incidents/20261122-015207-064-r3/story",
        "overview",
        "series",
        "audit",
        "incidents/20261122-015129-087-r2/story",
    ]
)
@pytest.mark.parametrize("path", [*ALWAYS, *STORIES])
def test_sample_has_no_raw_texts(page: RecordedPage, path: str) -> None:
    assert list(raw_texts(ask(page, path))) == []


@pytest.mark.slow(kept=["timeline/steps", "heat/outliers", "ranks/3"])
@pytest.mark.parametrize("path", OF_A_ROUND)
def test_each_round_of_the_sample_has_no_raw_texts(page: RecordedPage, path: str) -> None:
    rounds = [one["number"] for one in ask(page, "job")["rounds"]]
    assert len(rounds) > 1
    for number in rounds:
        assert list(raw_texts(ask(page, f"{path}?round={number}"))) == []


def test_texts_of_the_sample_have_no_raw_names(page: RecordedPage) -> None:
    reported = ask(page, "incidents")
    paths = [f"incidents/{one['incident_id']}" for one in reported["incidents"]]
    paths += [f"verdicts/{one['verdict_id']}" for one in reported["verdicts"]]
    paths += [f"hosts/{one['host']}" for one in ask(page, "hosts")["hosts"]]
    assert len(paths) > 8
    for path in paths:
        assert list(raw_texts(ask(page, path))) == []


@pytest.mark.slow
def test_canned_job_has_no_raw_texts() -> None:
    for health in ("good", "warning", "bad"):
        for path, document in {**job_responses(health=health), **record_responses(), **analysis_responses()}.items():
            assert list(raw_texts(document.model_dump(mode="json"), path)) == []


API = ROOT / "diagnostics" / "megatrain_dashboard" / "api"
WEB = ROOT / "diagnostics" / "web" / "src"


def folders(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_dir() and path.name != "__pycache__"}


def modules(directory: Path) -> set[str]:
    return {path.stem for path in directory.glob("*.py") if path.stem != "__init__"}


def test_each_view_is_named_after_its_subject() -> None:
    assert folders(WEB / "views") <= folders(API) | modules(API)
    assert [name for name in sorted(folders(API)) if not (API / name / "route.py").is_file()] == []


def test_each_view_of_a_job_is_addressed_by_its_name() -> None:
    source = (WEB / "app" / "views.tsx").read_text()
    rows = re.findall(r'\{ name: "(\w+)", .*component: (\w+) \}', source)
    folder_of = dict(re.findall(r'import \{ (\w+) \} from "\.\./views/(\w+)";', source))
    assert len(rows) == len(folder_of)
    for name, component in rows:
        assert (component, folder_of[component]) == (f"{name.capitalize()}View", name)
