"""Every place that names a culprit names that of the incident: for a recorded job with real faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from megatrain.cli import main
from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.named_culprits import asked_page, named_by_page, named_by_verbs

SAMPLE = Path(__file__).parents[2] / "golden" / "dashboard-sample"
FAULTS = {"killed": (2, 5, "host-2"), "stopped": (3, 3, "host-4")}
"""Fault -> round, rank, host."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(SAMPLE, tmp_path_factory.mktemp("sample") / "run")))


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> Iterator[TestClient]:
    with asked_page(run) as client:
        yield client


@pytest.mark.slow(kept=["killed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_place_names_the_culprit_of_the_incident(
    run: RunDirectory, page: TestClient, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    round_number, rank, host = FAULTS[fault]
    named = named_by_page(page, round_number) | named_by_verbs(run, round_number, capsys)
    assert ("hang" in named) is (fault == "stopped"), "no positions of ranks are kept for the killed rank"
    assert named == dict.fromkeys(named, ([rank], [host]))


@pytest.mark.parametrize("fault", FAULTS)
def test_lines_of_victims_are_listed_as_consequences(page: TestClient, fault: str) -> None:
    round_number, rank, _ = FAULTS[fault]
    causes = page.get(f"/api/v1/logs/causes?round={round_number}").json()["causes"]
    assert causes[0]["rank"] == rank
    victims = causes[1:]
    assert {victim["role"] for victim in victims} <= {"follows"}
    for victim in victims:
        found = page.get("/api/v1/logs", params={"round": round_number, "query": victim["line"][:60]}).json()
        assert victim["rank"] in [line["rank"] for line in found["lines"]]


def test_host_of_victims_lists_the_incident_as_suffered(page: TestClient) -> None:
    host = page.get("/api/v1/hosts/host-0").json()
    assert host["incident_ids"] == []
    assert len(host["victim_incident_ids"]) == 1


@pytest.mark.slow
def test_the_score_of_a_host_is_the_same_wherever_it_is_shown(
    run: RunDirectory, page: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, stragglers = (page.get(f"/api/v1/{view}").json() for view in ("hosts", "stragglers"))
    by_host = {straggler["host"]: straggler["score"] for straggler in stragglers["scores"]}
    assert {host["host"]: host["straggler_score"] for host in hosts["hosts"] if host["host"] in by_host} == by_host
    ranks: dict[str, float] = {}
    for number in range(8):
        rank = page.get(f"/api/v1/ranks/{number}").json()
        ranks[rank["host"]] = max(rank["score"], ranks.get(rank["host"], 0.0))
        assert rank["least_score"] == stragglers["thresholds"]["score"]
    assert ranks == pytest.approx(by_host)
    assert main(["diag", "stragglers", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_scores"] == by_host
    assert hosts["thresholds"] == stragglers["thresholds"]
    assert stragglers["findings"] == []
    assert max(by_host.values()) < stragglers["thresholds"]["score"], "no host is slow, so none has a high score"
