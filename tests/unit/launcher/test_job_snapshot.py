"""The snapshot of a job in a real etcd: records are read at one revision, and decoded once."""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.problem_reports import DriverReport, JobProblem
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.snapshot import DecodedRecords, read_job
from tests.helpers.launched_job import make_incident, make_round, make_snapshot
from tests.helpers.written_job import fill, make_driver


def test_job_is_read_at_one_revision(client: EtcdClient, keys: JobKeys) -> None:
    fill(client, keys, incidents=tuple(make_incident(f"{number:04d}") for number in range(105)))
    found = read_job(client, keys)

    wanted = make_snapshot()
    assert (found.record, found.hosts, found.statuses) == (wanted.record, wanted.hosts, wanted.statuses)
    assert (found.rounds, found.halts, found.driver) == (wanted.rounds, wanted.halts, "host-1")
    assert [incident.incident_id for incident in found.incidents][::99] == ["20270115-0005", "20270115-0104"]
    assert len(read_job(client, keys, num_incidents=0).incidents) == 105
    for number in range(3, 9):
        client.put(keys.round(number), encode(make_round(number)))
    make_driver(client, keys, "host-2", "0")  # a later candidate
    report = DriverReport("host-1", "round 8 trains on 2 hosts", 7.0, ("etcd is out of space",))
    client.put(keys.report, encode(report))
    later = read_job(client, keys)
    assert later.report == report
    client.put(keys.report, encode(replace(report, driver="host-2")))
    assert read_job(client, keys).report is None  # of a driver that is gone
    client.put(keys.report, encode(report))
    later = read_job(client, keys)
    assert (max(later.rounds), len(later.rounds), later.driver) == (8, 4, "host-1")
    assert later.revision == client.put(keys.command(1), b"{}") - 1


def test_repeated_reads_decode_only_changes(client: EtcdClient, keys: JobKeys) -> None:
    fill(client, keys)
    known = DecodedRecords()
    first = read_job(client, keys, decoded=known)
    changed = replace(first.hosts["host-1"], hardware="another one")
    client.put(keys.host("host-1"), encode(changed))
    client.delete(keys.host("host-3"))
    second = read_job(client, keys, decoded=known)
    assert second.hosts["host-2"] is first.hosts["host-2"]
    assert (second.hosts["host-1"], "host-3" in second.hosts) == (changed, False)
    client.put(keys.host("host-3"), encode(first.hosts["host-3"]))
    assert read_job(client, keys, decoded=known).hosts == second.hosts | {"host-3": first.hosts["host-3"]}


def test_problems_of_other_parts_are_read(client: EtcdClient, keys: JobKeys) -> None:
    fill(client, keys)
    problem = JobProblem("etcd", "its data were removed", 7.0)
    client.put(keys.problem(problem.source), encode(problem))
    assert read_job(client, keys).problems == (problem,)


def test_election_key_without_a_lease_is_no_driver(client: EtcdClient, keys: JobKeys) -> None:
    fill(client, keys, has_driver=False)
    client.put(f"{keys.election}/stray", "host-9")
    assert read_job(client, keys).driver == ""
    make_driver(client, keys, "host-1")
    assert read_job(client, keys).driver == "host-1"
