"""A kernel hangs on one GPU, and the hosts of all ranks run ahead: the driver names the rank whose GPU stopped.

Eight ranks (pp 2, dp 2, tp 2) launch two steps on simulated GPUs, through the communicator of NCCL. Then one piece of
work hangs. Each rank's own recorder writes what its GPU has reached, the executor's code reads it, the driver's judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain_launcher.driver.hangs import CulpritFinding, find_culprit
from megatrain_launcher.executor.evidence import hang_evidence
from megatrain_launcher.executor.progress import RankWatch
from tests.helpers.simulated_device import NEVER, Simulation, Work
from tests.helpers.simulated_ranks import LAUNCH_NS, BoxedRank, SimulatedTraining

LAYOUT = Layout(pp_size=2, dp_size=2, tp_size=2)
HOSTS = ("a", "b", "c", "d")
UNRECORDED = "work between recorded operations"
PARTS = tuple(RoundHost(host, f"{host}-1", host, 2 * index, 2) for index, host in enumerate(HOSTS))
ROUND = Round(1, 8, PARTS, "a", 1, "", "", 0.0)


@dataclass
class Job:
    """All ranks of a simulation."""

    simulation: Simulation
    trainers: list[SimulatedTraining]
    seen: list[int] = field(default_factory=lambda: list(range(8)))
    """Ranks with a thread that polls how far the device is."""

    def work(self, rank: int, name: str, number: int) -> Work:
        """Return the number-th work of this name on a rank's device."""
        return [one for one in self.trainers[rank].one.device.all_work() if one.name == name][number]

    def evidence(self, silent: Iterable[str] = ()) -> CulpritFinding:
        """Let the devices work until nothing moves; return what the driver makes of it."""
        self.simulation.run(LAUNCH_NS)
        watches: dict[str, dict[int, RankWatch]] = {host: {} for host in HOSTS if host not in silent}
        for trainer in self.trainers:
            rank, device = trainer.one.rank, trainer.one.recorder._device
            assert device is not None
            device.resolve()
            if rank in self.seen:
                device.follow()
            if HOSTS[rank // 2] in watches:
                watches[HOSTS[rank // 2]][rank] = watch = RankWatch(trainer.one.path, rank, 1)
                watch.poll()
        found = {host: hang_evidence(host, f"{host}-1", 1, one, 0.0) for host, one in watches.items()}
        for one in watches.values():
            for watch in one.values():
                watch.close()
        return find_culprit(ROUND, found)


@pytest.fixture
def idle_job(tmp_path: Path) -> Iterator[Job]:
    """All ranks before their first step. Their recorders, which have threads, are closed at the end."""
    simulation = Simulation(8)
    trainers = [SimulatedTraining(BoxedRank(simulation, rank, LAYOUT, tmp_path)) for rank in range(8)]
    yield Job(simulation, trainers)
    for trainer in trainers:
        trainer.one.recorder.close()


@pytest.fixture
def job(idle_job: Job) -> Job:
    for _ in range(2):
        for trainer in idle_job.trainers:
            trainer.step()
    return idle_job


@pytest.mark.slow(
    kept=[
        "0-forward before-0-forward-compute",
        "3-forward-1-forward-compute",
        "5-backward-1-backward-compute",
        "7-clip-0-clip",
        "6-optimizer-0-optimizer",
        "4-norms-0-work between recorded operations",
        "3-forward after-3-forward-compute",
    ]
)
@pytest.mark.parametrize(
    ("rank", "name", "number", "operation"),
    [
        (0, "forward before", 0, "forward-compute"),
        (0, "forward", 0, "forward-compute"),
        (3, "forward", 1, "forward-compute"),
        (5, "forward", 0, "forward-compute"),
        (6, "forward after", 1, "forward-compute"),
        (7, "forward", 2, "forward-compute"),
        (4, "backward before", 0, "backward-compute"),
        (5, "backward", 1, "backward-compute"),
        (1, "backward", 1, "backward-compute"),
        (2, "backward after", 0, "backward-compute"),
        (0, "backward after", 1, "backward-compute"),
        (7, "clip", 0, "clip"),
        (2, "clip", 1, "clip"),
        (6, "optimizer", 0, "optimizer"),
        (1, "optimizer", 0, "optimizer"),
        (4, "norms", 0, UNRECORDED),
        (3, "norms", 1, UNRECORDED),
        (0, "forward", 3, "forward-compute"),
        (6, "backward", 3, "backward-compute"),
        (3, "forward after", 3, "forward-compute"),
    ],
)
def test_the_rank_whose_kernel_hangs_is_named(job: Job, rank: int, name: str, number: int, operation: str) -> None:
    job.work(rank, name, number).duration_ns = NEVER
    found = job.evidence()

    assert (found.ranks, found.hosts, found.confidence) == ((rank,), (HOSTS[rank // 2],), "certain"), found.sentences
    assert f"rank {rank} never entered collective" in found.sentences[0]
    assert found.sentences[1] == f"rank {rank} is at step 1 in {operation} on its GPU"


def test_two_hanging_ranks_are_both_named(job: Job) -> None:
    for rank in (1, 6):
        job.work(rank, "forward", 1).duration_ns = NEVER

    assert job.evidence().ranks == (1, 6)


@pytest.mark.parametrize(("name", "number"), [("tp all_gather", 2), ("dp reduce_scatter", 0), ("pp allreduce", 1)])
def test_complete_collective_blames_network_or_gpu(job: Job, name: str, number: int) -> None:
    meeting = job.work(2, name, number).meeting
    assert meeting is not None
    for work in meeting.members:
        work.duration_ns = NEVER
    found = job.evidence()

    assert (found.ranks, found.confidence) == ((), "weak")
    assert "the network between them, or a GPU that runs it, is broken" in found.sentences[0]


def test_hosts_show_no_suspect_without_device_polls(job: Job) -> None:
    job.work(3, "forward", 1).duration_ns = NEVER
    job.seen = []

    assert (job.evidence().ranks, job.evidence().confidence) == ((), "weak")


def test_host_without_evidence_is_a_suspect(job: Job) -> None:
    job.work(4, "forward", 1).duration_ns = NEVER
    found = job.evidence(silent=["c"])

    assert (found.hosts, found.confidence) == (("c",), "likely")


def test_host_that_launches_nothing_is_named(idle_job: Job) -> None:
    for trainer in idle_job.trainers:
        if trainer.one.rank != 5:
            trainer.step()
    idle_job.trainers[5].one.recorder.begin(Operation.DATA_WAIT)
    found = idle_job.evidence()

    assert (found.ranks, found.confidence) == ((5,), "certain")
    assert found.sentences[1] == "rank 5 is at step 1 in data-wait"
