"""The end of a launch of several hosts on one machine: as the driver recorded it in this launch, or as the hosts know
it."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobEnd
from megatrain_job.commands.etcd_flags import add_etcd_arguments, etcd_flags
from megatrain_job.coordination.client import EtcdClient
from megatrain_launcher.hosts.local import LocalHosts
from megatrain_launcher.launch.host import run_launch
from megatrain_launcher.launch.plan import LaunchPlan, make_plan
from tests.helpers.etcd_server import etcd_program
from tests.helpers.launch_cases import small_flags
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

SAVES = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
host = next(word.partition("=")[2] for word in sys.argv if word.startswith("--host-id="))
Path(sys.argv[1], f"{host}.started").touch()
signal.pause()
"""
"""A host that saves and stops on request."""


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    etcd_program()
    return make_plan(small_flags(tmp_path, is_standalone=True, min_hosts=2, max_hosts=2), {})


def end_with(monkeypatch: pytest.MonkeyPatch, *program: str, end: JobEnd | None = None) -> None:
    """Let hosts run a program in place of `megatrain`, and let the driver record the end of the job."""

    class Hosts(LocalHosts):
        def __init__(self, arguments: Sequence[str], count: int, environment: Any, tell: Any) -> None:
            parser = argparse.ArgumentParser()
            add_etcd_arguments(parser)
            self._etcd = etcd_flags(parser.parse_known_args(arguments)[0]).settings({})
            super().__init__(arguments, count, environment, tell, [sys.executable, "-S", "-c", *program])

        def wait(self) -> list[int]:
            codes = super().wait()
            if end is not None:
                with EtcdClient(self._etcd) as client:
                    client.put(JobKeys("small").end, encode(end))
            return codes

    monkeypatch.setattr("megatrain_launcher.launch.standalone.LocalHosts", Hosts)


def test_only_the_recorded_end_of_this_launch_counts(plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(monkeypatch, "raise SystemExit(68)", end=JobEnd(75, "asked to", 0.0))
    assert run_launch(plan, {}, lambda _: 1, lambda _: None) == 75

    end_with(monkeypatch, "raise SystemExit(78)")
    assert run_launch(plan, {}, lambda _: 1, lambda _: None) == 78


def test_exit_code_survives_the_loss_of_etcd(plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(monkeypatch, "")
    assert run_launch(plan, {}, lambda _: 1, lambda _: None) == 0


def test_lost_terminal_does_not_prevent_a_save(
    plan: LaunchPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP arrives when the terminal closes, and writing to it is an error."""
    asked: list[str] = []
    stop = LocalHosts.stop

    def note_stop(hosts: LocalHosts) -> None:
        wait_until(lambda: len(list(tmp_path.glob("*.started"))) == 2, "the hosts")
        asked.append("hosts")
        stop(hosts)

    def tell(text: str) -> None:
        asked.append(text.partition(":")[0])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    end_with(monkeypatch, SAVES, str(tmp_path))
    monkeypatch.setattr(LocalHosts, "stop", note_stop)
    wait = LocalHosts.wait

    def signal_and_wait(hosts: LocalHosts) -> list[int]:
        os.kill(os.getpid(), signal.SIGHUP)
        return wait(hosts)

    monkeypatch.setattr(LocalHosts, "wait", signal_and_wait)
    assert run_launch(plan, {}, lambda _: 1, tell) == 75
    assert asked == ["hosts", "SIGHUP"]
