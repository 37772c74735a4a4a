"""A kernel hangs on one GPU, and the hosts of all ranks run ahead: the driver names the rank whose GPU stopped.

Eight ranks (pp 2, dp 2, tp 2) launch two steps on simulated GPUs, through the communicator of NCCL. Then one piece of
work hangs. Each rank's own recorder writes the progress of its GPU, the executor's code reads it, and the driver's code
makes its decision. Some cases add errors of a GPU in a host's kernel log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_records import HangEvidence
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain_launcher.driver.hangs import CulpritFinding, find_culprit
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.executor.evidence import hang_evidence
from megatrain_launcher.executor.progress import RankWatch
from megatrain_launcher.health.kernel_log import gpu_error_records
from tests.helpers.driver_story import begin
from tests.helpers.simulated_device import NEVER, DeviceWork, Simulation
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_ranks import LAUNCH_NS, BoxedRank, SimulatedTraining

LAYOUT = Layout(pp_size=2, dp_size=2, tp_size=2)
HOSTS = ("a", "b", "c", "d")
UNRECORDED = "work between recorded operations"
PARTS = tuple(RoundHost(host, f"{host}-1", host, 2 * index, 2) for index, host in enumerate(HOSTS))
NO_ERRORS: Mapping[str, str] = {}
POLICY = Policy(min_hosts=4, max_hosts=4, num_workers=2, feasible_counts={4: 1}, join_timeout_s=60.0)
BUS = "79, GPU has fallen off the bus."
ROUND = Round(1, 8, PARTS, "a", 1, "", "", 0.0)


@dataclass
class Job:
    """All ranks of a simulation."""

    simulation: Simulation
    trainers: list[SimulatedTraining]
    seen: list[int] = field(default_factory=lambda: list(range(8)))
    """Ranks with a thread that polls the progress of the device."""

    def work(self, rank: int, name: str, number: int) -> DeviceWork:
        """Return the number-th work of this name on a rank's device."""
        return [one for one in self.trainers[rank].one.device.all_work() if one.name == name][number]

    def reports(self, silent: Iterable[str] = (), errors: Mapping[str, str] = NO_ERRORS) -> dict[str, HangEvidence]:
        """Run the devices until no work can continue; return the evidence of each host that is not silent.

        errors: a message in the kernel's log of a host, 5 s before the evidence.
        """
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
        logs = {host: [f"4,1,5000000,-;NVRM: Xid (PCI:0000:3b:00): {text}".encode()] for host, text in errors.items()}
        found = {
            host: hang_evidence(host, f"{host}-1", 1, one, 0.0, gpu_error_records(logs.get(host, ()), 10.0))
            for host, one in watches.items()
        }
        for one in watches.values():
            for watch in one.values():
                watch.close()
        return found

    def evidence(self, silent: Iterable[str] = ()) -> CulpritFinding:
        """Return the driver's conclusion from the hosts' evidence."""
        return find_culprit(ROUND, self.reports(silent))


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


@pytest.mark.parametrize(
    ("hangs", "errors", "ranks", "culprit", "confidence", "evicted"),
    [
        ("forward", {}, (3,), 1, "certain", False),
        ("forward", {"b": BUS}, (3,), 1, "certain", True),
        ("forward", {"c": BUS}, (3,), 1, "certain", False),
        ("tp all_gather", {}, (), None, "weak", False),
        ("tp all_gather", {"b": BUS}, (), 1, "likely", True),
        ("tp all_gather", {"d": BUS}, (), None, "weak", False),
    ],
)
def test_driver_evicts_the_host_whose_gpu_hangs_and_is_broken(
    job: Job, hangs: str, errors: dict[str, str], ranks: tuple[int, ...], culprit: int | None, confidence: str,
    evicted: bool,
) -> None:  # fmt: skip
    work = job.work(3, hangs, 1)
    for one in [work] if work.meeting is None else work.meeting.members:
        one.duration_ns = NEVER
    reports = job.reports(errors=errors)

    cluster = begin(POLICY, num_hosts=5)
    first = cluster.members(1)
    cluster.stall(*first)
    cluster.go_on(0.4)
    for part, found in zip(cluster.rounds()[1].hosts, reports.values(), strict=True):
        own = replace(found, host=part.host, session=part.session)
        cluster.etcd.put(KEYS.evidence(1, part.host), encode(own))
    cluster.go_on_until(cluster.goes_on(2), 60.0, step_s=0.5)

    (incident,) = cluster.incidents()
    named = () if culprit is None else (first[culprit],)
    assert (incident.culprit_ranks, incident.culprit_hosts, incident.confidence) == (ranks, named, confidence)
    assert [host for host in first if KEYS.cordon(host) in cluster.etcd.items] == (list(named) if evicted else [])
    # A host that must pass its checks is replaced, too, but not cordoned.
    assert set(first) - set(cluster.members(2)) == {first[HOSTS.index(host)] for host in errors}
    assert any("reported Xid" in text for text in incident.evidence) == bool(errors)
