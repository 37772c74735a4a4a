"""Whether the job is healthy, and if not: what is wrong, where, since when. Tables over invented jobs, and golden
texts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.records.host_records import HostPhase, HostStatus
from megatrain.contracts.records.incident import IncidentKind, IncidentState, Moments
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.rounds import JobEnd
from megatrain_job.jobs.assessment import Assessment, assess
from megatrain_job.jobs.documents import incident_document, status_document
from megatrain_job.jobs.health import HealthLevel
from megatrain_job.jobs.host_view import HostState
from megatrain_job.jobs.job_state import JobState
from megatrain_launcher.commands.incident_text import incident_lines, incidents_lines
from megatrain_launcher.commands.status_text import status_lines
from tests.helpers.launched_job import (
    NOW_S,
    make_cordon,
    make_failure,
    make_halt,
    make_host,
    make_incident,
    make_record,
    make_round,
    make_snapshot,
    make_stall,
    make_status,
)

OPEN = make_incident(
    "0002",
    state=IncidentState.OPEN,
    round=2,
    moments=Moments(NOW_S - 2.1, NOW_S - 2, NOW_S - 2),
    reason="rank 1 on host-1 was killed by SIGKILL (9)",
    culprit_hosts=("host-1",),
    culprit_ranks=(1,),
    next_round=None,
    resumed_step=None,
    effective_time_ratio=None,
)


def statuses(**changed: HostStatus) -> Mapping[str, HostStatus]:
    return {**make_snapshot().statuses, **{name.replace("_", "-"): status for name, status in changed.items()}}


def answer_of(**changes: Any) -> Assessment:
    return assess(make_snapshot(**changes), NOW_S)


def texts(answer: Assessment) -> list[str]:
    return [reason.text for reason in answer.health.reasons]


def level(answer: Assessment) -> str:
    return str(answer.health.level)


def states(answer: Assessment) -> dict[str, str]:
    return {view.host: str(view.state) for view in answer.hosts}


def test_a_job_that_trains_is_healthy() -> None:
    answer = answer_of()

    assert (answer.state, level(answer), texts(answer)) == (JobState.TRAINING, "green", [])
    assert states(answer) == {"host-1": "running", "host-2": "running", "host-3": "spare"}
    assert (answer.progress.step, answer.progress.median_step_s) == (1240, 0.08)


def test_ended_job_has_the_state_of_its_exit_code() -> None:
    for exit_code, state, reported in [
        (0, JobState.FINISHED, "green"),
        (75, JobState.SAVED, "green"),
        (66, JobState.FAILED, "red"),
    ]:
        answer = answer_of(end=JobEnd(exit_code, "it is over", NOW_S - 5), hosts={}, statuses={}, driver="")

        assert (answer.state, level(answer), answer.since_unix_s) == (state, reported, NOW_S - 5), exit_code
        assert answer.headline.endswith("it is over"), exit_code


def test_job_without_executors_is_red_without_driver_amber() -> None:
    gone = answer_of(hosts={}, statuses={}, driver="")
    assert (gone.state, level(gone)) == (JobState.NOT_RUNNING, "red")
    assert set(states(gone).values()) == {HostState.GONE}

    headless = answer_of(driver="")
    assert (headless.state, level(headless)) == (JobState.TRAINING, "amber")
    assert "no driver is elected" in texts(headless)[0]


def test_waiting_job_names_present_and_uncounted_hosts() -> None:
    hosts = {"host-1": make_host(1), "host-2": make_host(2, is_fit=False, unfit_reason="GPU 3 has ECC errors"),
             "host-3": make_host(3), "host-9": make_host(9, num_workers=0)}  # fmt: skip
    answer = answer_of(rounds={}, halts={}, hosts=hosts, statuses={}, incidents=(), cordons={"host-3": make_cordon(3)})

    assert answer.state is JobState.WAITING
    assert answer.headline == ("waiting for hosts: 1 of at least 2 can be used (host-1, host-2, host-3 and host-9)")
    assert states(answer) == {"host-1": "waiting", "host-2": "unfit", "host-3": "cordoned", "host-9": "drives"}
    assert "host-2 is unfit: GPU 3 has ECC errors" in texts(answer)
    assert level(answer) == "red"  # it has waited for longer than allowed

    enough = answer_of(rounds={}, halts={}, statuses={}, incidents=())
    assert enough.headline == "about to start: 3 hosts can be used, and the job needs 2"


def test_broken_round_names_the_hosts_it_waits_for() -> None:
    stopping = statuses(host_1=make_status(1, HostPhase.STOPPED), host_2=make_status(2, HostPhase.STOPPING))
    answer = answer_of(halts={2: make_halt()}, statuses=stopping, incidents=(OPEN,))

    assert (answer.state, level(answer), answer.since_unix_s) == (JobState.RECOVERING, "amber", NOW_S - 2)
    assert answer.headline == "recovering, waits until host-2 has stopped: rank 1 on host-1 was killed by SIGKILL (9)"

    stopped = statuses(host_1=make_status(1, HostPhase.STOPPED),
                       host_2=make_status(2, HostPhase.FAILED, alive_ranks=""))  # fmt: skip
    answer = answer_of(halts={2: make_halt()}, statuses=stopped, incidents=(OPEN,))
    assert "all have stopped, and the driver decides how to continue" in answer.headline

    few = answer_of(halts={2: make_halt()}, statuses=stopped, record=make_record(min_hosts=4), incidents=(OPEN,))
    assert "waits for hosts: 3 of at least 4 can be used" in few.headline

    saving = answer_of(halts={2: make_halt(is_saving=True, reason="ops@login asked for it")})
    assert (saving.state, level(saving)) == (JobState.STOPPING, "green")
    assert saving.headline == "saving and stopping on host-1 and host-2: ops@login asked for it"


def test_failures_name_the_first_that_follows_from_no_other() -> None:
    follows = make_failure(0, 69, at_unix_s=NOW_S - 3, is_cascade=True)
    root = make_failure(3, -9, at_unix_s=NOW_S - 2)
    failed = statuses(host_1=make_status(1, HostPhase.FAILED, failures=(follows,)),
                      host_2=make_status(2, HostPhase.FAILED, failures=(root,)))  # fmt: skip
    answer = answer_of(statuses=failed)

    assert (answer.state, answer.headline) == (
        JobState.RECOVERING,
        "broken: rank 3 was killed by SIGKILL (9) (on host-2)",
    )
    assert [(reason.level, reason.hosts) for reason in answer.health.reasons] == [
        (HealthLevel.RED, ("host-1",)), (HealthLevel.RED, ("host-2",)),
    ]  # fmt: skip


def test_a_stall_shows_where_and_since_when() -> None:
    answer = answer_of(statuses=statuses(host_2=make_status(2, stall=make_stall())))

    assert (answer.state, level(answer)) == (JobState.STUCK, "red")
    assert answer.headline == "stuck after step 1,240: no progress on host-2"
    assert answer.since_unix_s == NOW_S - 7
    assert texts(answer) == ["host-2: ranks 2-3 made no progress for 6.0 s after step 1,240, in step (limit 5.0 s)"]
    assert answer.health.reasons[0].ranks == (2, 3)


def test_a_first_start_is_green_and_a_restart_is_amber() -> None:
    started = statuses(host_1=make_status(1, HostPhase.STARTING, min_step=None, max_step=None),
                       host_2=make_status(2, HostPhase.STARTING, min_step=None, max_step=None))  # fmt: skip
    first = answer_of(statuses=started, incidents=())
    assert (first.state, level(first)) == (JobState.STARTING, "green")
    assert first.headline == "starting: 4 ranks on 2 hosts, workers start on all hosts"

    again = answer_of(statuses=started, incidents=(OPEN,))
    assert (again.state, level(again), again.since_unix_s) == (JobState.RECOVERING, "amber", NOW_S - 2.1)
    assert again.headline.startswith("recovering (stop), workers start on all hosts: rank 1")


def test_lost_lease_of_a_training_host_is_a_problem() -> None:
    hosts = {"host-1": make_host(1), "host-3": make_host(3)}
    answer = answer_of(hosts=hosts)
    assert (answer.state, level(answer)) == (JobState.TRAINING, "red")
    assert texts(answer) == ["host-2 (ranks 2-3) is lost: its lease is gone, or the driver found it dead"]

    back = answer_of(hosts={**make_snapshot().hosts, "host-2": make_host(2, session="another")})
    assert states(back)["host-2"] == HostState.RETURNED
    assert "came back as another executor" in texts(back)[0]


def test_problem_that_does_not_stop_training_is_amber() -> None:
    held = make_incident(
        "0003", kind=IncidentKind.CONTROL_PLANE, state=IncidentState.HELD, round=2, action="hold",
        reason="2 leases vanished while steps went on", culprit_hosts=(), culprit_ranks=(),
    )  # fmt: skip
    answer = answer_of(
        statuses=statuses(
            host_1=make_status(1, problem="logs cannot be written: disk full"),
            host_2=make_status(2, last_step_unix_s=NOW_S - 50, alive_ranks="1"),
        ),
        incidents=(held,),
        cordons={"host-2": make_cordon(2), "host-7": make_cordon(7)},
        unreadable=("/megatrain/demo/hosts/x: not JSON",),
    )

    assert (answer.state, level(answer)) == (JobState.TRAINING, "amber")
    assert texts(answer) == [
        "no step was completed for 50 s, and a step takes 80 ms",
        "hosts were held 12 min ago, and no host was evicted: 2 leases vanished while steps went on",
        "host-1: logs cannot be written: disk full",
        "host-2: rank 3 has no process",
        "left out of this answer: /megatrain/demo/hosts/x: not JSON",
    ]
    assert states(answer)["host-7"] == HostState.GONE
    assert texts(answer_of(incidents=(replace(held, round=1),))) == []


def test_the_drivers_report_shows_its_activity_and_what_to_fix() -> None:
    held = make_incident("0009", state=IncidentState.HELD, round=2, action="hold", reason="2 leases vanished")
    alarms = ("2 leases vanished", "etcd member 8e9 raises NOSPACE", "rounds/3 cannot be read")
    report = DriverReport("host-1", "round 2 trains on 2 hosts", NOW_S - 12, alarms)
    snapshot = make_snapshot(report=report, incidents=(held,), etcd_alarms=("NOSPACE",))
    answer = assess(snapshot, NOW_S)

    # no reason is listed twice
    assert texts(answer) == [
        "etcd raises NOSPACE: the driver can store no decision until the alarm is cleared",
        "hosts were held 12 min ago, and no host was evicted: 2 leases vanished",
        "the driver reports: rounds/3 cannot be read",
    ]
    lines = status_lines(snapshot, answer, NOW_S)
    assert "driver         host-1, for 12 s: round 2 trains on 2 hosts" in lines
    reported = status_document(snapshot, answer, NOW_S)["driver_report"]
    assert (reported["reason"], reported["alarms"]) == ("round 2 trains on 2 hosts", list(alarms))


HEALTHY = """\
demo: green, training: step 1,240, 80 ms a step, 4 ranks on 2 hosts (for 12 min)

round          2, began 12 min ago: rank 3 on host-2 was killed by SIGKILL (9)
driver         host-1
spares         host-3
last incident  20270115-0001, 12 min ago, recovered, restart (3.2 s, 4 steps lost): rank 3 on host-2 was killed \
by SIGKILL (9)
training time  99.1% of the job's time until its last incident
run            runs/demo

host    state    ranks   step  step time  last step
host-1  running  0-1    1,240      80 ms    1 s ago  driver
host-2  running  2-3    1,240      80 ms    1 s ago
host-3  spare    -          -          -          -"""

RECOVERING = """\
demo: amber, recovering, waits until host-2 has stopped: rank 1 on host-1 was killed by SIGKILL (9) (for 2 s)
  !  recovering: incident 20270115-0002 is open (restart, now: stop): rank 1 on host-1 was killed \
by SIGKILL (9) (for 2 s)

round          2, over, began 12 min ago: rank 3 on host-2 was killed by SIGKILL (9)
driver         host-1
incident       20270115-0002, 2 s ago, open, restart (now: stop): rank 1 on host-1 was killed by SIGKILL (9)
training time  99.1% of the job's time until its last incident
run            runs/demo

host    state     ranks   step  step time  last step
host-1  stopped   0-1    1,240      80 ms    1 s ago  driver; rank 1 was killed by SIGKILL (9)
host-2  stopping  2-3    1,240      80 ms    1 s ago
host-3  waiting   -          -          -          -"""


def test_page_reachable_from_one_host_names_it() -> None:
    for url, host, max_hosts, reported in [
        ("http://[::1]:87/", "n7", 2, "http://[::1]:87/, only on n7; from elsewhere: ssh -L 87:[::1]:87 n7"),
        ("http://127.0.0.1:8777/", "n7", 1, "http://127.0.0.1:8777/"),
        ("http://127.0.0.1:8777/", "", 2, "http://127.0.0.1:8777/"),
        ("https://n7.example:8777/", "n7", 2, "https://n7.example:8777/"),
    ]:  # fmt: skip
        snapshot = make_snapshot(dashboard_url=url, dashboard_host=host, record=make_record(max_hosts=max_hosts))
        answer = assess(snapshot, NOW_S)
        (line,) = [one for one in status_lines(snapshot, answer, NOW_S) if one.startswith("dashboard")]
        assert line.removeprefix("dashboard").strip() == reported, url
        assert status_document(snapshot, answer, NOW_S)["dashboard_host"] == (host or None), url


def test_status_text_of_healthy_and_recovering_jobs() -> None:
    healthy = make_snapshot()
    assert "\n".join(status_lines(healthy, assess(healthy, NOW_S), NOW_S)) == HEALTHY

    broken = make_snapshot(
        halts={2: make_halt()},
        statuses=statuses(
            host_1=make_status(1, HostPhase.STOPPED, failures=(make_failure(1),)),
            host_2=make_status(2, HostPhase.STOPPING),
        ),
        incidents=(make_incident(), OPEN),
    )
    assert "\n".join(status_lines(broken, assess(broken, NOW_S), NOW_S)) == RECOVERING


def test_large_job_shows_only_notable_hosts() -> None:
    part = make_round().hosts[0]
    names = range(1, 1251)
    parts = tuple(type(part)(f"host-{n}", f"s{n}", f"10.0.0.{n}", 2 * (n - 1), 2) for n in names)
    snapshot = make_snapshot(
        hosts={f"host-{n}": make_host(n) for n in names if n != 700},
        statuses={f"host-{n}": make_status(n) for n in names},
        rounds={2: make_round(hosts=parts, world_size=2500)},
        halts={},
    )
    lines = status_lines(snapshot, assess(snapshot, NOW_S), NOW_S)

    assert len(lines) < 15
    found = "is lost: its lease is gone, or the driver found it dead"
    assert lines[1] == f"  !! host-lost: host-700 (ranks 1398-1399) {found}"
    assert lines[-1] == "and 1,249 more hosts (--all shows all hosts)"
    assert len(status_lines(snapshot, assess(snapshot, NOW_S), NOW_S, is_all=True)) > 1250


INCIDENTS = """\
demo: 2 incidents: 1 open, 1 recovered; training time 99.1% of the job's time until the last one

id                ago  kind     state      where            did       down  steps lost  why
20270115-0002     2 s  failure  open       host-1 (rank 1)  restart      -           -  rank 1 ended
20270115-0001  12 min  failure  recovered  host-2 (rank 3)  restart  3.2 s           4  rank 3 ended"""

STORY = """\
20270115-0001 recovered: rank 3 on host-2 was killed by SIGKILL (9)

what           a worker ended (unknown)
when           2027-01-15 07:48:16 UTC, 12 min ago, in round 1
where          host-2 (rank 3), certain
did            restart, round 2 follows (driver host-1)
cost           3.2 s without a step, 4 steps lost (from 1,234 back to 1,230)
training time  99.1% of the job's time until then

timeline      seconds
  detect         0.10  #
  decide         0.05   #
  stop           0.25    ###
  rendezvous     1.50       ###################
  load           0.40                          #####
  first step     0.90                               ###########
  in all         3.20

evidence
  1. rank 3 ended first, by SIGKILL (9)
  2. ranks 0-2 lost their connection to it

workers that ended
  rank  ended                               after  label              action  log
     3  by SIGKILL (9)                     100 ms  -                  -
     1  with exit code 69 (communication)  300 ms  network (follows)  none    connection reset by peer"""


def test_incident_list_and_incident_text() -> None:
    short_reasons = [make_incident(reason="rank 3 ended"), replace(OPEN, reason="rank 1 ended")]
    assert "\n".join(incidents_lines("demo", short_reasons, NOW_S)) == INCIDENTS
    assert "\n".join(incident_lines(make_incident(), NOW_S)) == STORY
    assert incidents_lines("demo", [], NOW_S) == ["demo: no incident"]

    lines = incident_lines(OPEN, NOW_S)
    assert "cost   no step completed since, step 1,234 was the last" in lines
    assert [line.split() for line in lines if line.endswith("now")] == [["stop", "-", "now"]]


def test_text_of_a_held_incident_has_no_cost() -> None:
    held = make_incident(
        kind=IncidentKind.CONTROL_PLANE, state=IncidentState.HELD, action="hold", culprit_hosts=(), culprit_ranks=(),
        moments=Moments(NOW_S - 5, NOW_S - 5, NOW_S - 5), notes={"etcd": "3 of 3 leases", "median_step_s": "0.08"},
    )  # fmt: skip
    lines = incident_lines(held, NOW_S)
    assert "cost           nothing: training continued" in lines
    assert "where          no culprit is named" in lines[4]
    assert lines[-1] == "  etcd: 3 of 3 leases"


def test_status_document_has_the_facts_of_the_text() -> None:
    snapshot = make_snapshot(cordons={"host-3": make_cordon(3)})
    document = status_document(snapshot, assess(snapshot, NOW_S), NOW_S)

    assert (document["state"], document["health"], document["step"]) == (
        "training", {"level": "green", "reasons": []}, 1240,
    )  # fmt: skip
    assert [host["state"] for host in document["hosts"]] == ["running", "running", "cordoned"]
    assert document["hosts"][2]["cordon"]["reason"] == "ECC errors"
    assert document["round"]["number"] == 2
    assert document["round"]["halt"] is None
    (incident,) = document["incidents"]
    assert incident == incident_document(make_incident())
    assert incident["phase_seconds"]["rendezvous"] == pytest.approx(1.5, abs=1e-3)
    assert (incident["steps_lost"], round(incident["down_s"], 3)) == (4, 3.2)


@settings(max_examples=60)
@given(
    phases=st.lists(st.sampled_from(HostPhase), min_size=3, max_size=3),
    there=st.sets(st.integers(1, 3)),
    has_stall=st.booleans(),
    has_halt=st.booleans(),
    has_round=st.booleans(),
    bitmap=st.sampled_from(["", "3", "zz", "0"]),
)
def test_every_combination_of_states_has_an_answer(
    phases: list[HostPhase], there: set[int], has_stall: bool, has_halt: bool, has_round: bool, bitmap: str
) -> None:
    snapshot = make_snapshot(
        hosts={f"host-{n}": make_host(n) for n in there},
        statuses={
            f"host-{n}": make_status(n, phase, stall=make_stall() if has_stall else None, alive_ranks=bitmap)
            for n, phase in zip(itertools.count(1), phases, strict=False)
        },
        rounds={2: make_round()} if has_round else {},
        halts={2: make_halt()} if has_halt else {},
    )
    answer = assess(snapshot, NOW_S)
    lines = status_lines(snapshot, answer, NOW_S)

    assert lines[0].startswith("demo: ")
    assert answer.headline
    assert status_document(snapshot, answer, NOW_S)["state"] == answer.state
    lost = {view.host for view in answer.hosts if view.state == HostState.LOST}
    assert not (lost and has_round and not has_halt and answer.health.level is HealthLevel.GREEN)
