"""Where a command line finds a job, and what it believes of a file that says so."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from megatrain.commands.job_place import PlaceError, add_job, job_place
from megatrain.coordination.settings import Credentials


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory whose etcd asks for a password that lies elsewhere."""
    (tmp_path / "secret").write_text("not for others\n")
    place = tmp_path / "run" / "coordination"
    place.mkdir(parents=True)
    told = {"endpoints": ["http://127.0.0.1:1"], "job": "demo", "user": "u", "password_file": str(tmp_path / "secret")}
    (place / "endpoint").write_text(json.dumps(told))
    return tmp_path / "run"


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_job(parser)
    return parser.parse_args(words)


def test_ones_own_run_says_the_password(run: Path) -> None:
    place = job_place(parsed(str(run)))
    assert place.job == "demo"
    assert place.settings.credentials == Credentials("u", "not for others")


def test_another_users_run_chooses_no_file_and_no_user(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner chooses the server too: what is sent there would be theirs."""
    monkeypatch.setattr(os, "geteuid", lambda: (run / "coordination" / "endpoint").stat().st_uid + 1)
    monkeypatch.setenv("MEGATRAIN_ETCD_PASSWORD", "mine")
    place = job_place(parsed(str(run)))
    assert place.job == "demo"
    assert place.settings.credentials is None


def test_a_job_is_said_in_either_way_but_only_one(run: Path) -> None:
    assert job_place(parsed("--job", str(run))).job == "demo"
    assert job_place(parsed(str(run), "--job", str(run))).job == "demo"
    with pytest.raises(PlaceError, match=r"JOB is '.*/run' and --job=other: two jobs; give one of them"):
        job_place(parsed(str(run), "--job=other"))
