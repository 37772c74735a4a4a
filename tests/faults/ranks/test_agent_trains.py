"""The real trainer on standby workers: all imports are done in advance, and a killed rank costs seconds."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain.run_files.run_directory import rank_log_path
from megatrain_launcher.agent import AgentSettings, RoundAgent
from megatrain_launcher.interfaces import Assignment
from megatrain_launcher.logs.worker_logs import WorkerLogs
from megatrain_launcher.standby.client import StandbyClient
from megatrain_launcher.store import listen_for_store
from megatrain_launcher.worker_environment import server_environment
from tests.helpers.manual_orders import ManualOrders, ReportRecorder
from tests.helpers.source_tree import ROOT
from tests.helpers.standby_workers import Programs, wait_until_gone
from tests.helpers.tiny_data import write_corpus
from tests.helpers.train_process import TrainJob, make_job
from tests.helpers.training_case import on_layout
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store() -> Iterator[socket.socket]:
    with listen_for_store("127.0.0.1") as listener:
        yield listener


@pytest.fixture(scope="module")
def standby(store: socket.socket) -> Iterator[StandbyClient]:
    environment = server_environment({**os.environ, "OMP_NUM_THREADS": "1"}, 2)
    preload = ("megatrain.training.worker",)
    with StandbyClient(preload=preload, environment=environment, directory=ROOT, store=store) as client:
        assert client.wait_ready(DEADLINE_S)
        assert client.problem == ""
        yield client


def newest_step(job: TrainJob) -> int:
    return max((record["step"] for record in job.records("step")), default=0)


def test_worker_has_torch_and_one_thread(standby: StandbyClient, tmp_path: Path) -> None:
    text, found = Programs(standby, tmp_path).run(
        """
        import os, sys
        print("megatrain.training.worker" in sys.modules, len(os.listdir("/proc/self/task")))
        import torch
        print(torch.ones(3).sum().item(), torch.get_num_threads())
        """
    )
    assert text.splitlines() == ["True 1", "3.0 1"]
    assert found.exit_code == 0


def test_killed_rank_is_replaced_and_a_saving_halt_exits_with_75(
    store: socket.socket, standby: StandbyClient, tmp_path: Path
) -> None:
    prefix = write_corpus(tmp_path / "tokens" / "train", 4000, 90, seed=1)
    endless = {
        "train": {"steps": 10**6},
        "checkpoint": {"interval": 10},
        "log": {"interval": 1},
        "data": {"train": str(prefix)},
    }
    job = make_job(tmp_path / "job", on_layout(1, 1, 2), endless)
    port = store.getsockname()[1]
    orders, recorder = ManualOrders(), ReportRecorder()
    part = RoundHost("host-1", "s1", "127.0.0.1", 0, 2)

    def order(number: int) -> None:
        orders.give(Assignment(Round(number, 2, (part,), "127.0.0.1", port, "a test", "host-1", 0.0), part))

    with WorkerLogs(tmp_path / "logs", tee="none") as logs:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        settings = AgentSettings("job", "megatrain.train", (str(job.config_file),), environment, ROOT, 20.0)
        agent = RoundAgent(settings, orders, recorder, standby, logs)
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            order(1)
            wait_until(lambda: newest_step(job) >= 12, "steps of round 1")
            os.kill(recorder.pids[1], signal.SIGKILL)
            recorder.wait_for("stopped")
            step = newest_step(job)
            order(2)
            num_records = len(job.records("step"))
            wait_until(lambda: len(job.records("step")) > num_records, "a step of round 2")
            assert recorder.ends[0].exit_code == -signal.SIGKILL
            wait_until(lambda: newest_step(job) > step, "progress in round 2")
            orders.halt(2, is_saving=True)
            recorder.wait_for("stopped", 2)
            log = rank_log_path(tmp_path / "logs", 2, 0).read_text()
            assert [end.exit_code for end in recorder.ends[-2:]] == [75, 75], log
        finally:
            orders.leave()
            agent.wake()
            thread.join(DEADLINE_S)
        wait_until_gone(*recorder.pids)
    assert not thread.is_alive()
