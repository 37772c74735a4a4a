"""A rank of a launched job is killed: PagerDuty gets one alert, which is resolved at the end; no secret leaves its
file."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.records.incident import IncidentState
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.http_receiver import HttpReceiver
from tests.helpers.notification_topics import write_secret
from tests.helpers.recovery_checks import running_job
from tests.helpers.vendor_rules import check_pagerduty
from tests.helpers.waiting import wait_until

KEY = "0123456789abcdef0123456789abcdef"


def test_a_killed_rank_rings_a_pager_until_the_job_trains_again(tmp_path: Path) -> None:
    """test_every_fault_reported.py compares the webhook's messages with the reports of other places."""
    with HttpReceiver() as pager:
        key = write_secret(tmp_path / "key", KEY)
        sections = {"pagerduty": {"url": f"{pager.url}/v2/enqueue", "routing_key_file": key}}
        with running_job(tmp_path / "job", sections, orders=[(1, 14, "kill")]) as running:
            incident = running.view.wait_recovered(0)
            wait_until(lambda: "resolve" in _actions(pager), "the end of the page")
            assert running.finish() == 0
            written = running.view.client.read_all(KeyRange.prefix(running.view.keys.prefix)).items
            assert not any(KEY.encode() in item.value for item in written)
            logs = "".join(running.launched.log(host) for host in ("host-0", "host-1"))
        assert KEY not in logs
    assert incident.state is IncidentState.RECOVERED
    for event in pager.documents:
        check_pagerduty(event)
    assert [action for action in _actions(pager) if action != "acknowledge"] == ["trigger", "resolve"]
    assert {event["dedup_key"] for event in pager.documents} == {f"megatrain/job/incident/{incident.incident_id}"}


def _actions(pager: HttpReceiver) -> list[str]:
    return [event["event_action"] for event in pager.documents]
