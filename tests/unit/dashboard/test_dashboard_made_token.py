"""A page with actions requires a token of every user, also on the same machine, and creates one if none is
configured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.security.made_token import TOKEN_NAME, with_token
from megatrain_dashboard.settings import DashboardSettings
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.dashboard_process import dashboard_process
from tests.helpers.dashboard_server import ask, bearer
from tests.helpers.etcd_server import EtcdServers, etcd_program
from tests.helpers.other_user import OTHER_USER, as_other_user, everybodys_place
from tests.helpers.waiting import wait_until

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


def test_a_token_that_another_user_laid_out_is_refused(tmp_path: Path) -> None:
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
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        log = tmp_path / "dashboard.log"
        page = stack.enter_context(dashboard_process(run.root, "demo", etcd.urls, log, "--enable-actions"))
        headers = {
            "Content-Type": "application/json",
            "Origin": page.url.rstrip("/"),
            "X-Megatrain-Request": "1",
        }
        ask(page.port, "/api/v1/actions", headers, method="POST", body=REQUEST).assert_refused(401, "not logged in")
        ask(page.port, "/api/v1/job").assert_refused(401, "not logged in")
        path = run.diagnosis / TOKEN_NAME
        token = path.read_text().strip()
        assert ask(page.port, "/api/v1/job", bearer(token)).json["role"] == "operator"
        assert f"(sign in with the token in {path})" in log.read_text()
        assert token not in log.read_text()
        keys = JobKeys("demo")
        wait_until(lambda: client.get(keys.dashboard) is not None, "the announcement")
        item = client.get(keys.dashboard)
        assert item is not None
        assert str(path).encode() in item.value
        assert token.encode() not in item.value

        # and its log is restored after its removal
        log.unlink()
        wait_until(lambda: log.exists() and "removed from outside" in log.read_text(), "another log")
