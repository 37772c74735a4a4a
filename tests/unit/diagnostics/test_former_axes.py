"""Ranks that were written or sent before cp and ep were listed are read as ever, also beside new ones.

tests/golden/former-axes was written by the last program that had three axes, and is never written anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatrain.contracts.layout import Layout
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Ranks, axis_column
from megatrain_diagnostics.store.compaction import compact
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.rounds import roster_of, rounds_seen
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.wire.sender import Sender
from tests.helpers.event_collector import RunningCollector
from tests.helpers.fixed_daemon import FixedDaemon
from tests.helpers.source_tree import ROOT
from tests.helpers.stored_events import START_NS, segment_paths
from tests.helpers.synthetic_steps import SyntheticJob
from tests.helpers.waiting import DEADLINE_S

FORMER = ROOT / "tests" / "golden" / "former-axes"
LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=2)
NEW = Layout(tp_size=2, cp_size=2, dp_size=2, ep_size=4)
ROUND = 3


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Return events of round 3 from before, in a directory that may be written."""
    shutil.copytree(FORMER / "events", tmp_path / "events")
    return tmp_path / "events"


def test_former_ranks_have_their_layout(events: Path) -> None:
    stored = StoredEvents(events)
    assert roster_of(stored, ROUND).layout == LAYOUT
    (seen,) = rounds_seen(stored)
    assert (seen.number, seen.num_ranks, seen.world_size) == (ROUND, 8, 8)
    assert stored.problems() == ()


def test_former_and_new_ranks_are_read_as_one_and_merged(events: Path) -> None:
    with SegmentStore(events, now_ns=lambda: START_NS + 5 * 10**9) as store:
        store.append(Ranks, to_arrow(SyntheticJob(NEW, round=ROUND + 1).ranks()))
        store.commit()
    for _ in range(2):
        stored = StoredEvents(events)
        assert roster_of(stored, ROUND).layout == LAYOUT
        assert roster_of(stored, ROUND + 1).layout == NEW
        assert [one.world_size for one in rounds_seen(stored)] == [8, 8]
        ranks = stored.read(Ranks, Where(rounds=(ROUND + 1,)))
        for axis in ("cp", "ep"):
            places = [NEW.index(axis, rank) for rank in range(8)]
            assert axis_column(ranks, f"{axis}_rank").tolist() == places
        compact(events, START_NS + 10**14)
    (merged,) = [path for path in segment_paths(events / "ranks") if path.name[:12] != path.name[13:25]]
    assert "ep_size" in pq.read_schema(merged).names


def test_a_spool_of_before_the_upgrade_is_sent(tmp_path: Path) -> None:
    shutil.copytree(FORMER / "spool", tmp_path / "spool")
    with RunningCollector(tmp_path / "events") as collector:
        with Sender("host-0", FixedDaemon(collector.record), tmp_path / "spool") as sender:
            assert sender.flush(DEADLINE_S)
        found = collector.read(Ranks)
        assert collector.ledger.counters().refused_batches == {}
    assert found.rank.tolist() == list(range(8))
    assert set(axis_column(found, "cp_size").tolist()) == set(axis_column(found, "ep_size").tolist()) == {1}
