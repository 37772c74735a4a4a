"""Refused configurations of a dashboard, the token that a page with actions requires, and the command of a launch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.launched import job_commands
from megatrain_dashboard.security.made_token import TOKEN_NAME, with_token
from megatrain_dashboard.settings import DashboardSettings, settings_of
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.dashboard_process import dashboard_process
from tests.helpers.dashboard_server import VIEWER_TOKEN, PageClient, bearer
from tests.helpers.etcd_server import EtcdServers, etcd_program
from tests.helpers.other_user import OTHER_USER, as_other_user, everybodys_place
from tests.helpers.refusals import refusal
from tests.helpers.single_rank import make_config
from tests.helpers.waiting import wait_until

NOT_STARTED = {
    "from elsewhere without tokens": (
        {"address": "0.0.0.0"},
        "can be reached from other machines, so users must be authenticated",
    ),
    "a name without tokens": ({"address": "node-7"}, "viewer_token_file or operator_token_file"),
    "proxies without a user header": ({"trusted_proxies": "10.0.0.1"}, "needs dashboard.user_header"),
    "every address is a proxy": ({"trusted_proxies": "0.0.0.0/0", "user_header": "X-User"}, "contains every address"),
    "no network": ({"trusted_proxies": "10.0.0.300", "user_header": "X-User"}, "is not an address or network"),
    "a header from any client": ({"user_header": "X-User"}, "does nothing without dashboard.trusted_proxies"),
    "one header for both": (
        {"trusted_proxies": "10.0.0.1", "user_header": "X-User", "role_header": "x-user"},
        "name two headers",
    ),
    "a header that is none": ({"trusted_proxies": "10.0.0.1", "user_header": "X User"}, "text of the form"),
    "a path that is none": ({"base_path": "/a/../b c"}, "text of the form"),
    "a script as an address": ({"perfetto_url": "javascript:alert(1)"}, "text of the form"),
}


def settings_with(section: Mapping[str, object]) -> DashboardSettings:
    return settings_of(replace(DashboardConfig(), **section))  # type: ignore[arg-type]


def test_an_unsafe_configuration_is_not_started() -> None:
    for name, (section, message) in NOT_STARTED.items():
        assert message in refusal(ConfigError, settings_with, section), name


def make_token(path: Path, token: str, mode: int = 0o600) -> str:
    path.write_text(f"{token}\n")
    path.chmod(mode)
    return str(path)


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    good = make_token(tmp_path / "good", VIEWER_TOKEN)
    assert settings_of(DashboardConfig(viewer_token_file=good)).viewer_token == VIEWER_TOKEN
    assert VIEWER_TOKEN not in repr(settings_of(DashboardConfig(viewer_token_file=good)))
    for mode in (0o644, 0o640, 0o604):
        reported = make_token(tmp_path / "open", VIEWER_TOKEN, mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}: others may read it"):
            settings_of(DashboardConfig(operator_token_file=reported))
    short, spaced = make_token(tmp_path / "short", "secret"), make_token(tmp_path / "words", "two words are too many")
    both = make_token(tmp_path / "both", VIEWER_TOKEN)
    for section, message in (
        ({"viewer_token_file": short}, "could be guessed"),
        ({"viewer_token_file": spaced}, "not allowed in a header"),
        ({"viewer_token_file": str(tmp_path / "nowhere")}, "cannot be read"),
        ({"viewer_token_file": good, "operator_token_file": both}, "contain the same token"),
        ({"viewer_token_file": good, "operator_token_file": good}, "name two files"),
        ({"viewer_token_file": good, "enable_actions": True}, "no operator can sign in"),
    ):
        assert message in refusal(ConfigError, settings_with, section), message


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as wrong:
        settings_of(DashboardConfig(address="0.0.0.0", user_header="X-User", base_path="x"))
    assert len(wrong.value.problems) == 3


OPEN = DashboardSettings(port=0, enable_actions=True)
REQUEST = b'{"kind":"stop","target":"","reason":"mine now","confirmation":"demo","idempotency_key":"0123456789abcdef"}'


def test_token_is_made_once_where_actions_are_open(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for settled in (
        DashboardSettings(port=0),
        DashboardSettings(port=0, enable_actions=True, operator_token="a configured token"),
    ):
        assert with_token(settled, run) == (settled, None)
    settings, path = with_token(OPEN, run)
    assert path == run.diagnosis / TOKEN_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() == settings.operator_token
    assert len(settings.operator_token) == 64
    assert not settings.is_open
    assert with_token(OPEN, run)[0].operator_token == settings.operator_token, "a logged-in user stays logged in"


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (lambda path: path.chmod(0o644), "has mode 0644, and others may have read it"),
        (lambda path: path.write_text("short\n"), "it does not contain a token"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "is a symbolic link"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory|is not a regular file"),
    ],
)
def test_a_token_file_readable_by_others_is_refused(
    tmp_path: Path, corrupt: Callable[[Path], object], reason: str
) -> None:
    run = RunDirectory(tmp_path)
    path = with_token(OPEN, run)[1]
    assert path is not None
    corrupt(path)
    with pytest.raises(ConfigError, match=f"operator-token cannot be used: .*({reason}).*operator_token_file"):
        with_token(OPEN, run)


def test_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(everybodys_place(tmp_path))
    run.diagnosis.mkdir()
    run.diagnosis.chmod(0o777)
    as_other_user(lambda: (run.diagnosis / TOKEN_NAME).write_text("0" * 64) and None)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER_USER}"):
        with_token(OPEN, run)


@pytest.mark.slow
def test_local_visitor_needs_a_token_for_actions(tmp_path: Path) -> None:
    etcd_program()
    run = RunDirectory(tmp_path / "run")
    run.create()
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServers(tmp_path))
        store = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        log = tmp_path / "dashboard.log"
        page = stack.enter_context(dashboard_process(run.root, "demo", etcd.urls, log, "--enable-actions"))
        client = PageClient(page.port)
        headers = {"Content-Type": "application/json", "Origin": page.url.rstrip("/"), "X-Megatrain-Request": "1"}
        client.ask("/api/v1/actions", headers, method="POST", body=REQUEST).assert_refused(401, "not logged in")
        client.ask("/api/v1/job").assert_refused(401, "not logged in")
        path = run.diagnosis / TOKEN_NAME
        token = path.read_text().strip()
        assert client.ask("/api/v1/job", bearer(token)).json["role"] == "operator"
        assert f"(sign in with the token in {path})" in log.read_text()
        assert token not in log.read_text()
        keys = JobKeys("demo")
        wait_until(lambda: store.get(keys.dashboard) is not None, "the announcement")
        item = store.get(keys.dashboard)
        assert item is not None
        assert str(path).encode() in item.value
        assert token.encode() not in item.value

        # and its log is restored after its removal
        log.unlink()
        wait_until(lambda: log.exists() and "removed from outside" in log.read_text(), "another log")


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
def test_page_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
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
