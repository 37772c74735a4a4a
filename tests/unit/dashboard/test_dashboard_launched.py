"""The command that a launch runs for the web page of a job, and when there is none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.records.record import decode
from megatrain_dashboard.launched import job_commands
from tests.helpers.single_rank import make_config

CONFIG = make_config(job={"name": "a job"})
ETCD = ["--rdzv-endpoint=http://127.0.0.1:1"]


def test_page_is_installed_as_a_program_of_jobs() -> None:
    assert job_commands in [point.load() for point in importlib.metadata.entry_points(group="megatrain.job_programs")]


def test_the_page_gets_the_run_and_its_etcd() -> None:
    found = job_commands(config=CONFIG, run=Path("/run"), etcd=ETCD)
    assert found.keys() == {"dashboard"}
    *arguments, section = found["dashboard"][1:]
    assert arguments == ["-m", "megatrain_dashboard", "--run", "/run", "--job", "a job", *ETCD, "--section"]
    assert decode(DashboardConfig, section, "--section") == CONFIG.dashboard


def test_disabled_page_is_not_served(tmp_path: Path) -> None:
    unserved = replace(CONFIG, dashboard=replace(CONFIG.dashboard, is_served=False))
    unstreamed = replace(CONFIG, diagnostics=replace(CONFIG.diagnostics, is_streamed=False))
    for config in (unserved, unstreamed):
        assert job_commands(config=config, run=tmp_path, etcd=ETCD) == {}


@pytest.mark.parametrize("package", ["duckdb", "fastapi"])
def test_a_page_that_cannot_run_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    assert job_commands(config=CONFIG, run=tmp_path, etcd=ETCD) == {}


@pytest.mark.slow
def test_executor_and_help_load_nothing_else_of_the_page() -> None:
    heavy = ("numpy", "pyarrow", "duckdb", "torch", "fastapi", "uvicorn")
    report = f"print([name for name in {heavy} if name in sys.modules])\n"
    source = (
        f"import argparse, sys, megatrain_dashboard.launched\n{report}"
        f"from megatrain_dashboard import command\ncommand.add_arguments(argparse.ArgumentParser())\n{report}"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
