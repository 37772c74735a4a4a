"""The network of a host is cut during overlapped communication: every rank ends, and names the exchange it waited
for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from megatrain.contracts.errors import CommunicationError
from tests.dist.training_jobs import Tables
from tests.helpers.namespaces import HostNetwork
from tests.helpers.ports import free_ports
from tests.helpers.source_tree import ROOT
from tests.helpers.tiny_data import write_corpus
from tests.helpers.train_process import TrainJob, make_job
from tests.helpers.training_case import TINY, on_layout
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

NETWORK = "train"
TIMEOUT_S = 3.0
LEAST_STEPS = 20
MESSAGE = re.compile(
    r"(?P<operation>[a-z]+(-[a-z]+)+) (number \d+|of chunk \d+, micro-batch \d+ (to|from) rank \d+) "
    r"on group (?P<group>[a-z-]+) \(ranks 0-1\) failed on rank (?P<rank>\d): "
)
LAYOUTS: dict[str, list[Tables]] = {
    "dp2-chunks2": [on_layout(1, 1, 2, 2)],
    "pp2-chunks2": [on_layout(1, 2, 1, 2)],
    "tp2-sequence-chunks": [on_layout(2, 1, 1), {"parallel": {"num_sequence_chunks": 4}}],
}


@contextmanager
def workers(network: HostNetwork, job: TrainJob) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One rank on each host, as torchrun would start it; at the end all of them are gone."""
    address, port = network.address(NETWORK, 0), str(free_ports(1)[0])
    with ExitStack() as stack:
        found = []
        for rank in range(network.num_hosts):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            output = stack.enter_context((job.root / f"rank-{rank}.txt").open("wb"))
            process = subprocess.Popen(
                [*network.enter(rank), sys.executable, "-m", "megatrain", "train", str(job.config_file)],
                cwd=ROOT,
                env={**os.environ, **place, "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append(process)
        yield found


@pytest.mark.parametrize("case", LAYOUTS)
def test_both_ends_of_a_cut_link_name_the_exchange(case: str, tmp_path: Path) -> None:
    data: Tables = {
        "data": {"train": str(write_corpus(tmp_path / "data" / "train", 4000, TINY["model"]["vocab_size"]))}
    }
    runtime: Tables = {
        "train": {"steps": 100_000},
        # failed ranks leave their arena to the next start of the job
        "checkpoint": {"arena_directory": str(tmp_path)},
        "runtime": {"step_timeout_s": TIMEOUT_S, "network_interface": NETWORK},
    }
    job = make_job(tmp_path / "job", data, runtime, *LAYOUTS[case])
    assert job.config.parallel.overlap
    with HostNetwork(2, (NETWORK,)) as network, workers(network, job) as ranks:
        wait_until(lambda: len(job.records("step")) >= LEAST_STEPS, "the first steps")
        network.cut(1, NETWORK)
        codes = [process.wait(timeout=DEADLINE_S) for process in ranks]

    for rank, code in enumerate(codes):
        text = Path(job.root, f"rank-{rank}.txt").read_text()
        found = MESSAGE.search(text)
        assert found, text
        assert int(found["rank"]) == rank
        assert code == CommunicationError.exit_code, text
