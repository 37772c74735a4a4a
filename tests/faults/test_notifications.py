"""A rank of a launched job is killed: receivers are told as it happens and when it is over, with the same facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.contracts.incident import IncidentState
from megatrain.coordination.wire import KeyRange
from tests.helpers.http_receiver import HttpReceiver
from tests.helpers.recovery_checks import running_job
from tests.helpers.told_topics import write_secret
from tests.helpers.vendor_rules import check_pagerduty
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
KEY = "0123456789abcdef0123456789abcdef"


def test_a_killed_rank_is_told_as_the_incident_has_it(tmp_path: Path) -> None:
    with HttpReceiver() as hook, HttpReceiver() as pager:
        key = write_secret(tmp_path / "key", KEY)
        sections = {
            "webhook": {"url": f"{hook.url}/hook"},
            "pagerduty": {"url": f"{pager.url}/v2/enqueue", "routing_key_file": key},
        }
        with running_job(tmp_path / "job", sections, orders=[(3, 20, "kill")]) as running:
            incident = running.view.wait_recovered(0, 240.0)
            documents = hook.wait_for(2, 60.0)
            wait_until(lambda: "resolve" in _actions(pager), "the end of the page", 60.0)
            assert running.finish() == 0
            written = running.view.client.read_all(KeyRange.prefix(running.view.keys.prefix)).items
            assert not any(KEY.encode() in item.value for item in written)
            logs = "".join(running.launched.log(host) for host in ("host-0", "host-1"))
        assert KEY not in logs
        assert len(hook.posted) == 2, "the planned end is not told"
    assert incident.state is IncidentState.RECOVERED
    opened, closed = (document["topics"][0] for document in documents)
    for told in (opened, closed):
        assert told["topic"] == f"incident/{incident.incident_id}"
        assert told["hosts"] == list(incident.culprit_hosts) == ["host-1"]
        assert told["ranks"] == list(incident.culprit_ranks) == [3]
        assert told["step"] == incident.last_step
        assert incident.reason[:100] in told["what"]
    assert (opened["stage"], closed["stage"]) == ("open", "closed")
    assert f"{incident.steps_lost} step" in closed["lost"]
    for event in pager.documents:
        check_pagerduty(event)
    assert [action for action in _actions(pager) if action != "acknowledge"] == ["trigger", "resolve"]
    assert {event["dedup_key"] for event in pager.documents} == {f"megatrain/job/incident/{incident.incident_id}"}


def _actions(pager: HttpReceiver) -> list[str]:
    return [event["event_action"] for event in pager.documents]
