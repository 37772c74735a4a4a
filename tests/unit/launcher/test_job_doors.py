"""Access to the etcd that a launch starts: only for its user, from the first moment, and for no page in a browser."""

from __future__ import annotations

import http.client
import os
from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain_job.coordination.client import EtcdClient
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.launch import host
from megatrain_launcher.launch.host import run_launch
from megatrain_launcher.launch.plan import LaunchPlan, make_plan
from tests.helpers.etcd_attackers import asked, racing, tcp_ports
from tests.helpers.etcd_server import etcd_program
from tests.helpers.launch_cases import small_flags
from tests.helpers.processes import descendants
from tests.helpers.waiting import wait_until

TOKEN = "/megatrain/small/daemon"
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "node0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


@pytest.fixture(autouse=True)
def needs_etcd() -> None:
    etcd_program()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchPlan:
    """The first host of two."""
    monkeypatch.setattr(host, "resolve", lambda name: "127.0.0.1")
    return make_plan(small_flags(tmp_path, min_hosts=2, max_hosts=2), SLURM)


def users(settings: ExecutorSettings) -> list[str]:
    with EtcdClient(settings.etcd) as client:
        answer = client.gateway.call("/v3/auth/user/list", {}, dict, what="users")
    return sorted(answer.get("users", []))


@pytest.mark.slow
def test_token_and_files_of_a_job_are_private(tmp_path: Path) -> None:
    """Neither another user, who may connect to every port here, nor a web page that finds one, has access."""
    before = set(descendants(os.getpid()))
    got: list[object] = []

    def execute(settings: ExecutorSettings) -> int:
        with EtcdClient(settings.etcd) as client:
            client.put(TOKEN, "secret")
        for pid in set(descendants(os.getpid())) - before:
            for port in tcp_ports(pid):
                try:
                    status, content, headers = asked(
                        port, "/v3/kv/range", {"key": "Lw==", "range_end": "AA=="}, Origin="http://evil.example"
                    )
                except (OSError, http.client.HTTPException):
                    continue
                got.append((status, content, headers.get("Access-Control-Allow-Origin")))
        return 0

    assert run_launch(make_plan(small_flags(tmp_path), {}), {}, execute, lambda _: None) == 0
    assert not got


@pytest.mark.slow
def test_a_racer_never_becomes_root_of_the_first_hosts_etcd(slurm: LaunchPlan) -> None:
    with racing() as racer:

        def execute(settings: ExecutorSettings) -> int:
            wait_until(lambda: racer.num_tries > 20, "the attacker to try")
            assert users(settings) == ["megatrain", "root"]
            return 1

        assert run_launch(slurm, SLURM, execute, lambda _: None) == 1
    assert racer.won == []


@pytest.mark.slow
def test_a_password_is_in_no_command_line_and_no_environment(slurm: LaunchPlan) -> None:
    before = set(descendants(os.getpid()))
    found: list[bytes] = []

    def execute(settings: ExecutorSettings) -> int:
        assert settings.etcd.credentials is not None
        secret = settings.etcd.credentials.password.encode()
        for pid in set(descendants(os.getpid())) - before:
            found.extend(Path(f"/proc/{pid}", name).read_bytes() for name in ("cmdline", "environ"))
        found.append(repr(settings).encode())
        found.append(slurm.files.endpoint.read_bytes())
        found.append((slurm.files.directory / "etcd.log").read_bytes())
        assert not any(secret in text for text in found)
        return 1

    assert run_launch(slurm, SLURM, execute, lambda _: None) == 1
    assert len(found) > 3


@pytest.mark.parametrize("put", ["writable", "link", "file"])
def test_untrusted_directory_is_refused(tmp_path: Path, put: str) -> None:
    plan = make_plan(small_flags(tmp_path), {})
    place = plan.files.directory
    place.parent.mkdir(parents=True)
    if put == "writable":
        place.mkdir()
        place.chmod(0o770)
    elif put == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch()
    with pytest.raises(
        ConfigError, match=r"coordination (has mode 770|is a symbolic link|is not a directory).*set job.run"
    ):
        run_launch(plan, {}, lambda _: 0, lambda _: None)
