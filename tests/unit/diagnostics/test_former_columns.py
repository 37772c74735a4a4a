"""Events that were written or sent when a round was called an incarnation are read as ever, also beside new ones.

tests/golden/former-names was written by the last program that called it so, and is never written anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

from megatrain.cli import main
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import LogLines, Ranks, Spans, StepTotals, Table, num_rows
from megatrain_diagnostics.store.compaction import compact
from megatrain_diagnostics.store.daemon_state import read_state
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.wire.sender import Sender
from tests.helpers.event_collector import RunningCollector
from tests.helpers.fixed_daemon import FixedDaemon
from tests.helpers.source_tree import ROOT
from tests.helpers.stored_events import START_NS, committed, segment_paths, step_totals
from tests.helpers.waiting import DEADLINE_S

FORMER = ROOT / "tests" / "golden" / "former-names"
ROUND = 3


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Return events of round 3 from before, in a directory that may be written."""
    shutil.copytree(FORMER / "events", tmp_path / "events")
    return tmp_path / "events"


@pytest.mark.parametrize(("kind", "count"), [(Ranks, 4), (StepTotals, 36), (LogLines, 1)])
def test_former_segments_are_read(events: Path, kind: type[Table], count: int) -> None:
    stored = StoredEvents(events)
    found: Any = stored.read(kind, Where(rounds=(ROUND,)))
    assert (num_rows(found), set(found.round.tolist())) == (count, {ROUND})
    assert num_rows(stored.read(kind, Where(rounds=(ROUND + 1,)))) == 0
    assert stored.problems() == ()


def test_former_and_new_segments_are_read_as_one_and_merged(events: Path) -> None:
    with SegmentStore(events, now_ns=lambda: START_NS + 5 * 10**9) as store:
        committed(store, step_totals(range(4), range(3, 5), round_number=ROUND + 1))
    stored = StoredEvents(events)
    where = Where(first_step=2, last_step=3, operations=(3,))
    before = stored.read(StepTotals)
    assert sorted(set(before.round.tolist())) == [ROUND, ROUND + 1]
    assert stored.read(StepTotals, where).round.tolist() == [ROUND] * 4 + [ROUND + 1] * 4
    assert stored.bounds(StepTotals, Where(rounds=(ROUND,)), "round") == (ROUND, ROUND)

    assert compact(events, START_NS + 10**14).num_merged == 2
    (merged,) = [path for path in segment_paths(events / "totals") if path.name.startswith("000000000001-000000000002")]
    assert pq.read_schema(merged).names[0] == "round"
    assert StoredEvents(events).read(StepTotals).sum_ns.tolist() == before.sum_ns.tolist()


def test_verbs_take_the_former_option(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for words in (["--incarnation", "3"], ["--round", "3"], []):
        assert main(["logs", str(events), *words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]
    assert (found[0]["round"], found[0]["num_matching"]) == (ROUND, 1)


def test_the_former_option_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--round N" in told
    assert "incarnation" not in told


def test_a_former_state_has_the_round_that_was_judged() -> None:
    state, problem = read_state(FORMER / "diagnosis")
    assert problem == ""
    assert state is not None
    assert (state.round, state.step) == (ROUND, 89)


def test_a_former_streamer_is_turned_away_at_once_and_keeps_its_spool(tmp_path: Path) -> None:
    class Greeting(flight.ClientAuthHandler):
        def authenticate(self, outgoing, incoming) -> None:
            outgoing.write(b'{"schema_version":1,"host":"host-1","session":"s","nonce":"00"}')
            incoming.read()

        def get_token(self) -> bytes:
            return b""

    with RunningCollector(tmp_path / "events") as collector:
        client = flight.FlightClient(f"grpc://127.0.0.1:{collector.server.port}")
        with pytest.raises(flight.FlightUnavailableError):
            client.authenticate(Greeting(), flight.FlightCallOptions(timeout=DEADLINE_S))
        client.close()
        assert collector.ledger.counters().streams == 0


def test_a_spool_of_before_the_upgrade_is_sent(tmp_path: Path) -> None:
    shutil.copytree(FORMER / "spool", tmp_path / "spool")
    with RunningCollector(tmp_path / "events") as collector:
        with Sender("host-1", FixedDaemon(collector.record), tmp_path / "spool") as sender:
            assert sender.flush(DEADLINE_S)
        check_spans(collector)


def check_spans(collector: RunningCollector) -> None:
    found = collector.read(Spans)
    assert (found.round.tolist(), found.sequence.tolist()) == ([ROUND] * 5, list(range(10, 15)))
    assert collector.ledger.counters().refused_batches == {}
