"""The culprit of a round in each place that names one: the page's views and the commands, for one run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.responses.binary import unpack
from megatrain_diagnostics.store.hang_evidence import kept_rounds
from tests.helpers.served_run import RecordedPage

Named = tuple[list[int], list[str]]
"""Ranks and hosts."""


def named_by_page(page: RecordedPage, round_number: int) -> dict[str, Named]:
    """Return each view's culprit for the failure of a round, by the view's name."""
    (incident,) = [one for one in page.ask("incidents")["incidents"] if one["round"] == round_number]
    hang, logs = page.ask(f"hang?round={round_number}"), page.ask(f"logs/causes?round={round_number}")
    roots = [log for log in logs["causes"] if log["role"] == "root"]
    blamed = [
        one["host"]
        for one in page.ask("hosts")["hosts"]
        if incident["incident_id"] in page.ask(f"hosts/{one['host']}")["incident_ids"]
    ]
    found = {
        "incidents": (incident["ranks"], incident["hosts"]),
        "logs": ([root["rank"] for root in roots], sorted({root["host"] for root in roots})),
        "logs, as text": ([logs["root_rank"]], incident["hosts"]),
        "hosts": (incident["ranks"], sorted(blamed)),
    }
    if hang["source"]:  # some evidence of the ranks' positions is kept
        hosts = sorted({one["host"] for one in hang["suspects"]})
        found["hang"] = ([one["rank"] for one in hang["suspects"]], hosts)
        found["ranks"] = (_suspects(page, round_number), incident["hosts"])
        assert (hang["incident_id"], hang["reason"]) == (incident["incident_id"], incident["reason"])
    causes = [one for one in incident["failures"] if not one["is_cascade"]]
    if causes:  # A hung rank does not end by itself; the ranks that wait for it may, as a consequence.
        found["workers that ended"] = ([cause["rank"] for cause in causes], sorted({cause["host"] for cause in causes}))
    assert (logs["incident_id"], logs["reason"]) == (incident["incident_id"], incident["reason"])
    return found


def named_by_commands(run: RunDirectory, round_number: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Named]:
    """Return each command's culprit for the failure of a round."""

    def answer_of(*arguments: str) -> Any:
        capsys.readouterr()
        assert main([*arguments, str(run.root), "--round", str(round_number), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    logs = answer_of("logs", "classify")
    roots = [log for log in logs["failures"] if log["role"] == "root"]
    found = {
        "logs classify": ([logs["root_rank"]], logs["root_hosts"]),
        "logs classify, its table": ([root["rank"] for root in roots], [root["host"] for root in roots]),
    }
    if round_number in kept_rounds(run):
        hang = answer_of("diag", "hang")
        found["diag hang"] = ([one["rank"] for one in hang["suspects"]], hang["hosts"])
    return found


def _suspects(page: RecordedPage, round_number: int) -> list[int]:
    answer = page.client.get(f"/api/v1/grid?round={round_number}")
    assert answer.status_code == 200, answer.text
    fields, arrays = unpack(answer.content)
    names = [field["name"] for field in fields["states"]]
    return np.flatnonzero(arrays["state"] == names.index("suspect")).tolist()
