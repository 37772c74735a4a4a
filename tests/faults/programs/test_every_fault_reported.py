"""Every fault of the list is reported: `megatrain status`, the page, /metrics and a webhook agree.

Each row breaks a job of two hosts and a spare, with the default leases and silence limits; one job is used for several
faults, and the rows repair it. All places must report the same level and reasons; the delay after the job itself knows
is printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.diag_records import DaemonRecord, DashboardRecord
from megatrain.contracts.records.record import decode
from megatrain_launcher.commands.status import StatusCode
from tests.helpers.health_answers import INTERFACES, HealthViews, ask_status
from tests.helpers.http_receiver import HttpReceiver, Posted
from tests.helpers.job_under_launch import make_launched_job
from tests.helpers.paced_launch import paced_launch
from tests.helpers.paced_train import PaceDirectory, StepPace
from tests.helpers.processes import descendants, words_of
from tests.helpers.recovery_checks import ENDLESS, INTERVAL, RunningJob, running_job
from tests.helpers.shared_jobs import SharedJobs
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPARE = "host-2"
STEP_S = 3.0
DISK_BYTES = 256 << 20
SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"steps": ENDLESS},
    "dashboard": {"port": 0},
    "diagnostics": {"daemon_metrics_port": 0},
    "recovery": {
        "status_interval_s": 0.5,
        "restarts_per_hour": 100, "hangs_per_hour": 100, "host_failures_per_hour": 100,
    },
}  # fmt: skip


@dataclass
class Broken:
    """A job under test, the places that report on it, and the environment that a row needs."""

    running: RunningJob
    hook: HttpReceiver
    disk: SmallDisk | None
    views: HealthViews = field(init=False)
    since_unix_s: float = 0.0
    """The time at which the current fault struck; earlier reports do not count."""
    num_incidents: int = 0
    """The number of incidents of earlier faults."""
    frozen: list[int] = field(default_factory=list)
    kept: bytes = b""
    """The earlier content of a damaged file."""

    def begin_row(self) -> None:
        """Discard the reports of other faults, and wait until all places are green."""
        self.views = HealthViews(self.running.view, self.running.etcd.urls)
        self.views.wait_for(lambda: self.views.agreement("", 0.0) is not None, "all places to be green")
        self.since_unix_s = time.time()
        self.num_incidents = len(self.running.view.incidents())

    def posted(self) -> list[Posted]:
        """Return what the webhook received since the row began."""
        return [one for one in self.hook.posted if one.at_unix_s >= self.since_unix_s]

    def topics(self, beginning: str, stage: str) -> list[tuple[float, dict[str, Any]]]:
        """Return what the webhook received since the row began, and when."""
        reported = [(one.at_unix_s, topic) for one in self.posted() for topic in one.document["topics"]]
        return [(at, one) for at, one in reported if one["topic"].startswith(beginning) and one["stage"] == stage]

    def names(self, beginning: str, stage: str) -> set[str]:
        return {topic["topic"] for _, topic in self.topics(beginning, stage)}

    def newest_step(self) -> int:
        return max((record["step"] for record in self.running.launched.step_records()), default=0)

    def pid_of(self, module: str) -> int:
        """Return the process of the daemon or the page."""
        for pid in descendants(self.running.launched.executors[self.running.view.driver()].pid):
            if module.encode() in words_of(pid):
                return pid
        raise AssertionError(f"no process runs {module}")

    def freeze(self, pids: Sequence[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.frozen.extend(pids)

    def thaw(self) -> None:
        while self.frozen:
            with suppress(ProcessLookupError):
                os.kill(self.frozen.pop(), signal.SIGCONT)


Act = Callable[[Broken], object]


def kill_two_ranks(job: Broken) -> None:
    """The second rank is killed as the round begins that follows the end of the first."""
    job.running.faults.fail_at(0, job.running.view.rounds()[-1].number + 1, "kill", "load")
    job.running.faults.fail_at(1, job.newest_step() + 3, "kill")


def kill_program(module: str, key: str, kind: type[DaemonRecord] | type[DashboardRecord]) -> Act:
    """Kill a program of the job, and wait until it is running again."""

    def strike(job: Broken) -> None:
        def session() -> str:
            item = job.running.view.client.get(getattr(job.running.view.keys, key))
            return "" if item is None else decode(kind, item.value, key).session

        before = session()
        os.kill(job.pid_of(module), signal.SIGKILL)
        wait_until(lambda: session() not in ("", before), f"the next start of {module}", deadline_s=2 * DEADLINE_S)

    return strike


def freeze_host(job: Broken) -> None:
    """Suspend all processes of a host, including its writer, which is detached."""
    host = job.running.other_than_driver()
    executor = job.running.launched.executors[host].pid
    job.freeze([executor, *descendants(executor), *job.running.writers(host)])


def branch_file(job: Broken) -> Path:
    return job.running.job.files.checkpoints / "main" / "BRANCH"


def damage(job: Broken) -> None:
    job.kept = branch_file(job).read_bytes()
    branch_file(job).write_bytes(b"\0" * 64)


def repair_damage(job: Broken) -> None:
    branch_file(job).write_bytes(job.kept)


def terminate(job: Broken) -> None:
    """Stop the job as a scheduler does, on a training host."""
    host = job.running.view.rounds()[-1].hosts[0].host
    job.running.launched.executors[host].send_signal(signal.SIGTERM)


def disk_of(job: Broken) -> SmallDisk:
    assert job.disk is not None
    return job.disk


def start_etcd(job: Broken) -> None:
    job.running.etcd.members[0].start()
    job.running.etcd.wait_ready()


@dataclass(frozen=True, slots=True)
class ReportedFault:
    """A row. `code`: of a reason that all places must report; empty: they all stay green, because the fault is repaired
    automatically or was requested."""

    strike: Act
    code: str = ""
    topic: str = ""
    """The message that the webhook receives: the beginning of a topic's name; empty: none."""
    interfaces: Sequence[str] = INTERFACES
    """The places that report; the page and the daemon run and end with the driver's host."""
    repair: Act = lambda job: None
    pace_s: float = 0.4
    ends: bool = False
    """The fault ends the job, and the job is reported as ended."""
    is_reported_for_long: bool = False
    """Reported even after the repair: for ten minutes."""
    has_disk: bool = False
    is_alone: bool = False
    """No other fault is injected into its job."""

    @property
    def holds_loads(self) -> bool:
        """Return whether the recovery lasts until all places have reported it. With long steps it lasts long enough."""
        return self.code == "recovering" and self.pace_s < STEP_S

    @property
    def is_spent(self) -> bool:
        """Return whether the job cannot be used for another row afterwards."""
        return self.ends or self.is_reported_for_long or self.is_alone

    @property
    def kind(self) -> str:
        """Return the kind of job that this row needs."""
        return f"pace {self.pace_s}, disk of its own: {self.has_disk}, alone: {self.is_alone}"


def strike_rank(rank: int, kind: str) -> Act:
    return lambda job: job.running.faults.fail_at(rank, job.newest_step() + 3, kind)


DAEMON, PAGE = "megatrain_diagnostics.daemon", "megatrain_dashboard"
FAULTS = {
    "the page is killed": ReportedFault(kill_program(PAGE, "dashboard", DashboardRecord)),
    "the daemon is killed": ReportedFault(kill_program(DAEMON, "daemon", DaemonRecord)),
    "etcd is killed": ReportedFault(
        lambda job: job.running.etcd.members[0].kill(), "unreachable", repair=start_etcd
    ),
    "the daemon is frozen": ReportedFault(
        lambda job: job.freeze([job.pid_of(DAEMON)]), "daemon-silent", "health/daemon-silent",
        interfaces=("status", "page"), repair=Broken.thaw,
    ),
    "a file of the checkpoints is damaged": ReportedFault(
        damage, "saves-fail", "health/saves-fail", repair=repair_damage,
    ),
    "a rank is stopped": ReportedFault(strike_rank(1, "stop"), "recovering", "incident/"),
    "the checkpoints are removed": ReportedFault(
        # Renamed, because a removal file by file could overlap with a save that creates files.
        lambda job: job.running.job.files.checkpoints.rename(job.running.job.root / "removed"), "directory-removed",
        "health/directory-removed", is_reported_for_long=True,
    ),
    "the disk of the checkpoints is full": ReportedFault(
        lambda job: disk_of(job).fill(), "saves-fail", "health/saves-fail", has_disk=True,
        repair=lambda job: disk_of(job).free_space(),
    ),
    "a host is frozen": ReportedFault(freeze_host, "recovering", "incident/", repair=Broken.thaw, has_disk=True),
    "the driver's host is lost": ReportedFault(
        lambda job: job.running.kill_host(job.running.view.driver()), "recovering", "incident/", interfaces=("status",),
        is_alone=True,
    ),
    "two ranks within three seconds": ReportedFault(kill_two_ranks, "recovering", "incident/", pace_s=STEP_S),
    "an executor is killed": ReportedFault(
        lambda job: job.running.kill_host(job.running.other_than_driver()), "recovering", "incident/", is_alone=True,
    ),
    "SIGTERM during a long step": ReportedFault(terminate, "requested", pace_s=STEP_S, ends=True),
}  # fmt: skip
"""In an order in which each fault leaves the job as the next one needs it. A receiver gets at most three new topics of
a level within an hour at once, so no job has more."""


@contextmanager
def broken_job(root: Path, fault: ReportedFault) -> Iterator[Broken]:
    """Launch a job with daemon, page and a webhook, and wait until all of them report that it is healthy."""
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(root / "disk", DISK_BYTES)) if fault.has_disk else None
        hook = stack.enter_context(HttpReceiver())
        place = {} if disk is None else {"checkpoint": {"directory": str(disk.path / "checkpoints")}}
        running = stack.enter_context(
            running_job(
                root / "job", SETTINGS, place, {"webhook": {"url": f"{hook.url}/hook"}}, spare=SPARE,
                pace_s=fault.pace_s, has_daemon=True, enter=() if disk is None else disk.enter(),
            )
        )  # fmt: skip
        job = Broken(running, hook, disk)
        stack.callback(job.thaw)
        running.launched.wait_for_step(INTERVAL + 1 if fault.pace_s < 1.0 else 2)
        yield job


@pytest.mark.parametrize("name", FAULTS)
def test_every_place_reports_a_fault_alike(name: str, shared_jobs: SharedJobs) -> None:
    fault = FAULTS[name]
    with shared_jobs.borrowed(fault.kind, partial(broken_job, fault=fault), is_spent=fault.is_spent) as job:
        job.begin_row()
        struck = time.time()
        with job.running.faults.loads_held() if fault.holds_loads else nullcontext():
            fault.strike(job)
            agreed = agreement(job, fault, struck)
        after = reported_after(job, fault, struck, agreed)
        print(f"{name}: " + ", ".join(f"{place} {late_s:.2f} s" for place, late_s in after.items()))
        fault.repair(job)
        if fault.ends:
            check_end(job)
        elif not fault.is_reported_for_long:
            check_repaired(job, fault)
        if not fault.topic:
            assert job.posted() == [], "nothing to report"


def agreement(job: Broken, fault: ReportedFault, struck: float) -> dict[str, float]:
    """Return when each place reported a fault; all reports are equal."""
    views, since = job.views, struck if fault.code else time.time()
    views.wait_for(lambda: views.agreement(fault.code, since, fault.interfaces) is not None, "all places to agree")
    agreed = views.agreement(fault.code, since, fault.interfaces)
    assert agreed is not None
    return agreed


def reported_after(job: Broken, fault: ReportedFault, struck: float, agreed: dict[str, float]) -> dict[str, float]:
    """Return how many seconds after the job itself each place and the webhook reported a fault."""
    known = struck if fault.code == "unreachable" else agreed["status"]
    if fault.topic.startswith("incident/"):
        # when the driver noticed, by its own record
        known = job.running.view.incidents()[job.num_incidents].moments.detected
    if fault.topic:
        job.views.wait_for(lambda: bool(job.topics(fault.topic, "open")), "a message to the webhook")
        agreed["webhook"], topic = job.topics(fault.topic, "open")[0]
        check_topic(job, topic, fault)
    return {name: at - known for name, at in agreed.items()}


def check_end(job: Broken) -> None:
    """Check that all hosts have saved and stopped, and that all places report it."""
    launched, view = job.running.launched, job.running.view
    codes = {launched.finish(host) for host in launched.executors}
    assert codes - {-signal.SIGKILL} == {ExitCode.SAVED_AND_STOPPED}, "all but those that an earlier row killed"
    code, answer = ask_status(view.keys.job, "--rdzv-endpoint", ",".join(job.running.etcd.urls))
    assert code == StatusCode.ENDED
    assert (answer["state"], answer["health"]["level"]) == ("saved and stopped", "green")


def check_repaired(job: Broken, fault: ReportedFault) -> None:
    """Wait until all places report the end; the culprit in the webhook's last message is that of the incident."""
    repaired = time.time()
    job.views.wait_for(lambda: job.views.agreement("", repaired) is not None, "all places to be green")
    begun = job.names(fault.topic, "open")
    wait_until(
        lambda: job.names(fault.topic, "closed") >= begun,
        "the webhook's message about the end",
        deadline_s=2 * DEADLINE_S,
    )
    for _, topic in job.topics(fault.topic, "closed"):
        check_topic(job, topic, fault)


def check_topic(job: Broken, topic: dict[str, Any], fault: ReportedFault) -> None:
    """Check that the webhook received what the other places report: the same level, and the incident's culprit.

    A message that opens an incident names the culprits that were known at its time.
    """
    if not fault.topic.startswith("incident/"):
        assert topic["level"] in {
            reported.level for _, reported in job.views.answers["status"] if fault.code in reported.codes
        }
        return
    (incident,) = [one for one in job.running.view.incidents() if topic["topic"].endswith(one.incident_id)]
    assert topic["level"] == "amber"
    assert set(topic["hosts"]) <= set(incident.culprit_hosts)
    assert set(topic["ranks"]) <= set(incident.culprit_ranks)
    if topic["stage"] == "closed":
        assert (topic["hosts"], topic["ranks"]) == (list(incident.culprit_hosts), list(incident.culprit_ranks))
        assert topic["step"] == incident.last_step
        assert incident.reason[:100] in topic["what"]
        assert (f"{incident.steps_lost} step" in topic["lost"]) is (incident.steps_lost is not None)


def test_a_launch_that_is_killed_is_reported_from_its_directory(tmp_path: Path) -> None:
    """The launcher ends etcd, page and daemon too: only `megatrain status` remains, and always answers."""
    job = make_launched_job(tmp_path, 1_000_000, {"checkpoint": {"interval": 10}, "dashboard": {"port": 0}})
    pace = PaceDirectory(tmp_path / "pace", StepPace(forward_s=0.005, backward_s=0.01))
    run = job.files.root
    assert ask_status(str(run / "coordination" / "never"))[0] == StatusCode.NEVER_STARTED
    with paced_launch(job, pace, 1, tmp_path / "launch.log") as launch:
        wait_until(
            lambda: any((job.files.checkpoints / "main").glob("step-*/COMMIT")),
            "a checkpoint",
            deadline_s=2 * DEADLINE_S,
        )
        family = descendants(launch.pid)

        # An etcd that hangs must not delay the answer.
        (etcd,) = [pid for pid in family if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"]
        os.kill(etcd, signal.SIGSTOP)
        code, reported = ask_status(str(run))
        assert (code, reported["kind"]) == (StatusCode.UNREACHABLE, "unreachable"), reported
        assert reported["checkpoint_step"] >= 10

        for pid in (launch.pid, *family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launch.wait()
        code, reported = ask_status(str(run))
        assert (code, reported["kind"], reported["exit_code"]) == (StatusCode.KILLED, "killed", None)
        assert f"process {launch.pid} on" in reported["headline"]
    # as users call it
    done = subprocess.run(
        [sys.executable, "-m", "megatrain", "status", str(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, "killed" in done.stdout) == (StatusCode.KILLED, True)
