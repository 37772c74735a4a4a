"""The commands that a launch runs for the diagnosis, and when it runs none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.records.record import decode
from megatrain.run_files.run_directory import RunDirectory, black_box_path, previous_black_box
from megatrain_diagnostics.launched import job_commands, streamer_command
from megatrain_diagnostics.streamer.settings import StreamerSettings
from tests.helpers.single_rank import make_config

CONFIG = make_config(
    job={"name": "a job"}, telemetry={"black_box_directory": "/boxes"}, diagnostics={"spool_mb": 3, "metrics_port": 9}
)
ETCD = ["--rdzv-endpoint=http://127.0.0.1:1"]


def test_commands_are_entry_points() -> None:
    for group, function in (("megatrain.job_programs", job_commands), ("megatrain.host_program", streamer_command)):
        assert function in [point.load() for point in importlib.metadata.entry_points(group=group)]


def test_the_daemon_gets_the_run_and_its_etcd() -> None:
    place = ["--run", "/run", "--job", "a job", *ETCD]
    found = job_commands(config=CONFIG, run=Path("/run"), etcd=ETCD)
    assert found["diagnostics"][1:-1] == ["-m", "megatrain_diagnostics.daemon", *place, "--section"]
    assert decode(DiagnosticsConfig, found["diagnostics"][-1], "--section") == CONFIG.diagnostics
    assert found.keys() == {"diagnostics"}
    config = replace(CONFIG, checkpoint=replace(CONFIG.checkpoint, directory="/elsewhere"))
    found = job_commands(config=config, run=Path("/run"), etcd=ETCD)
    assert found["diagnostics"][-2:] == ["--checkpoints", "/elsewhere"]


def test_the_streamer_gets_the_files_of_its_ranks(tmp_path: Path) -> None:
    arguments = streamer_command(config=CONFIG, run=tmp_path, host="h 1", logs=tmp_path / "logs" / "h", etcd=ETCD)
    assert arguments[1:4] == ["-m", "megatrain_diagnostics.streamer", "--settings"]
    assert arguments[5:] == ETCD
    settings = decode(StreamerSettings, arguments[4], "--settings")
    assert settings == StreamerSettings(
        job="a job", host="h 1", run=str(tmp_path), host_logs=str(tmp_path / "logs" / "h"),
        black_box_directory="/boxes", spool_bytes=3_000_000, phase_timeouts=CONFIG.phase_timeouts, metrics_port=9,
        telemetry_interval_s=10.0,
    )  # fmt: skip
    box = black_box_path(Path("/boxes"), "a job", RunDirectory(tmp_path).key, "main", 7, 3)
    assert box.name.startswith(settings.box_prefix)
    assert previous_black_box(box).name.startswith(settings.box_prefix)
    assert settings.own_directory.is_relative_to(tmp_path / "hosts")


def test_no_program_runs_where_none_is_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    off = replace(CONFIG, diagnostics=replace(CONFIG.diagnostics, is_streamed=False))
    assert streamer_command(config=off, run=tmp_path, host="h", logs=tmp_path, etcd=ETCD) == []
    assert job_commands(config=off, run=tmp_path, etcd=ETCD) == {}
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else real(name))
    assert streamer_command(config=CONFIG, run=tmp_path, host="h", logs=tmp_path, etcd=ETCD) == []
    assert job_commands(config=CONFIG, run=tmp_path, etcd=ETCD) == {}


def test_commands_import_no_heavy_package() -> None:
    source = (
        "import sys, megatrain_diagnostics.launched\n"
        "print([name for name in ('numpy', 'pyarrow', 'duckdb', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_streamer_with_invalid_settings_names_the_error() -> None:
    arguments = [sys.executable, "-m", "megatrain_diagnostics.streamer", "--settings", "{}", *ETCD]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "streamer: --settings: schema_version=None" in done.stderr
