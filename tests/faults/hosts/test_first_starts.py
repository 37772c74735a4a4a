"""Repeated first starts of an etcd that other hosts can reach, beside an attacker who tries to become its root user."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_job.coordination.client import EtcdClient
from megatrain_launcher.etcd.process import EtcdProcess
from megatrain_launcher.launch.job_files import JobFiles
from tests.helpers.etcd_attackers import racing
from tests.helpers.etcd_server import etcd_program
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_STARTS = 20


def test_a_racer_loses_every_first_start(tmp_path: Path) -> None:
    program = Path(etcd_program())
    with racing() as racer:
        for number in range(NUM_STARTS):
            files = JobFiles(tmp_path / str(number))
            tries = racer.num_tries
            with (
                EtcdProcess(
                    files.directory, files.credentials(), address="127.0.0.1", tls=files.tls, program=program
                ) as etcd,
                EtcdClient(etcd.settings) as client,
            ):
                wait_until(lambda before=tries: racer.num_tries > before + 5, "the attacker to try")
                answer = client.gateway.call("/v3/auth/user/list", {}, dict, what="users")
                assert sorted(answer["users"]) == ["megatrain", "root"]
    assert racer.won == []
