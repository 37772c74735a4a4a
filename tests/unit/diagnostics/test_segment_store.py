"""The writer of segments: committed rows are complete on disk, despite kills, full disks and removed directories."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import LogLines, StepTotals, num_rows
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.segments import StoreError
from tests.helpers.small_disk import small_disk
from tests.helpers.source_tree import ROOT
from tests.helpers.stored_events import START_NS, committed, segment_paths, step_totals
from tests.helpers.table_rows import table_rows

WRITER = """
import json, sys
from pathlib import Path
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import StepTotals
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.stored_events import step_totals

with SegmentStore(Path(sys.argv[1])) as store:
    for step in range(10_000):
        store.append(StepTotals, to_arrow(step_totals(range(200), range(step, step + 1))))
        store.commit()
        print(json.dumps(step), flush=True)
"""


def line(text: str) -> LogLines:
    return table_rows(LogLines, {"sequence": len(text), "at_ns": START_NS, "line": text})


def test_commit_writes_what_was_appended(tmp_path: Path) -> None:
    with SegmentStore(tmp_path / "events") as store:
        first, second = step_totals(range(2), range(3)), step_totals(range(2, 4), range(3))
        store.append(StepTotals, to_arrow(first))
        store.append(StepTotals, to_arrow(second))
        store.append(LogLines, to_arrow(line("hello")))
        assert not segment_paths(tmp_path)

        store.commit()
        store.commit()

    assert len(segment_paths(tmp_path)) == 2
    events = StoredEvents(tmp_path / "events")
    np.testing.assert_array_equal(events.read(StepTotals).sum_ns, step_totals(range(4), range(3)).sum_ns)
    assert events.read(LogLines).line.tolist() == ["hello"]
    assert events.problems() == ()


def test_files_are_parquet_by_table_and_hour(tmp_path: Path) -> None:
    now = datetime(2026, 3, 1, 23, 59, 59, tzinfo=UTC)
    with SegmentStore(tmp_path, now_ns=lambda: int(now.timestamp()) * 10**9) as store:
        committed(store, step_totals(range(2), range(2)))
        now = datetime(2026, 3, 2, 0, 0, 0, tzinfo=UTC)
        committed(store, step_totals(range(2), range(2, 3)))

    first, second = segment_paths(tmp_path)
    crcs = [f"{zlib.crc32(path.read_bytes()):08x}" for path in (first, second)]
    assert str(first.relative_to(tmp_path)) == f"totals/2026-03-01/23/000000000001-000000000001.{crcs[0]}.parquet"
    assert str(second.relative_to(tmp_path)) == f"totals/2026-03-02/00/000000000002-000000000002.{crcs[1]}.parquet"
    rows = pq.read_table(first).to_pylist()
    assert next(row for row in rows if row["operation"] == "backward-compute") == {
        "round": 1,
        "rank": 0,
        "sequence": 1,
        "step": 0,
        "operation": "backward-compute",
        "start_ns": START_NS,
        "sum_ns": 1000 * 10**6 + 1,
        "max_ns": 1,
        "count": 4,
        "num_bytes": 0,
    }
    group = pq.ParquetFile(first).metadata.row_group(0)
    statistics = {group.column(number).path_in_schema: group.column(number).statistics for number in range(10)}
    assert (statistics["step"].min, statistics["step"].max) == (0, 1)
    assert (statistics["rank"].min, statistics["rank"].max) == (0, 1)
    assert group.column(0).compression == "ZSTD"


def test_query_of_one_operation_skips_other_sums(tmp_path: Path) -> None:
    with SegmentStore(tmp_path) as store:
        committed(store, step_totals(range(16_384), range(1)))

    (path,) = segment_paths(tmp_path)
    metadata = pq.ParquetFile(path).metadata
    place = metadata.schema.names.index("operation")
    found = [metadata.row_group(number).column(place).statistics for number in range(metadata.num_row_groups)]
    assert [(one.min, one.max) for one in found] == [
        (name, name) for name in ("forward-compute", "backward-compute", "grads-reduce-scatter")
    ]


def test_next_writer_continues_the_numbers(tmp_path: Path) -> None:
    for step in range(2):
        with SegmentStore(tmp_path) as store:
            committed(store, step_totals(range(2), range(step, step + 1)))
    first = segment_paths(tmp_path)[0]
    first.with_name("999999999999999999-999999999999999999.00000000.parquet").write_bytes(first.read_bytes())

    with SegmentStore(tmp_path) as store:
        committed(store, step_totals(range(2), range(2, 3)))

    *own, foreign = [path.name for path in segment_paths(tmp_path)]
    assert [name[:25] for name in own] == [f"{n:012d}-{n:012d}" for n in (1, 2, 3)]
    assert foreign.startswith("999999999999"), "a foreign number is not continued"


def test_segment_directory_has_one_writer(tmp_path: Path) -> None:
    with SegmentStore(tmp_path), pytest.raises(StoreError, match=r"process \d+ already writes events there"):
        SegmentStore(tmp_path)

    SegmentStore(tmp_path).close()


def test_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match="events cannot be written there"):
        SegmentStore(tmp_path / "file" / "events")


def test_batch_of_another_form_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    good = to_arrow(step_totals(range(1), range(1)))
    without_values = pa.RecordBatch.from_arrays(
        [pa.array([1, None], column.type) for column in good.columns], names=good.schema.names
    )
    text = to_arrow(line("text"))
    no_utf8 = pa.Array.from_buffers(
        pa.string(), 1, [None, *pa.array(["abcd"]).buffers()[1:2], pa.py_buffer(b"\xff\xfe\xfd\xfc")]
    )
    with SegmentStore(tmp_path) as store:
        store.append(StepTotals, good)
        with pytest.raises(DataError, match=r"columns round int32, rank int32, .* expected round int32"):
            store.append(StepTotals, to_arrow(line("x")))
        with pytest.raises(DataError, match="rows without a value"):
            store.append(StepTotals, without_values)
        with pytest.raises(DataError, match="UTF8"):
            store.append(LogLines, text.set_column(5, "line", no_utf8))
        store.commit()

    assert num_rows(StoredEvents(tmp_path).read(StepTotals)) == 3
    assert num_rows(StoredEvents(tmp_path).read(LogLines)) == 0


def test_unfinished_files_are_removed_at_the_start(tmp_path: Path) -> None:
    with SegmentStore(tmp_path) as store:
        committed(store, step_totals(range(1), range(1)))
    (written,) = segment_paths(tmp_path)
    orphan = written.with_name(f".{written.name}.0123abcd.tmp")
    orphan.write_bytes(written.read_bytes()[:100])
    assert num_rows(StoredEvents(tmp_path).read(StepTotals)) == 3

    SegmentStore(tmp_path).close()

    assert not orphan.exists()
    assert written.exists()


@pytest.mark.slow(kept=["1"])
@pytest.mark.parametrize("num_kills", [1, 3])
def test_kill_loses_nothing_that_was_committed(tmp_path: Path, num_kills: int) -> None:
    for life in range(num_kills):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        acknowledged = [json.loads(process.stdout.readline()) for _ in range(5 + 3 * life)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [
            json.loads(text) for text in process.stdout.read().splitlines(keepends=True) if text[-1] == "\n"
        ]
        process.wait()
        process.stdout.close()

        events = StoredEvents(tmp_path)
        found = events.read(StepTotals)
        expected = step_totals(range(200), range(int(found.step.max()) + 1))
        assert found.step.max() >= acknowledged[-1]
        np.testing.assert_array_equal(found.sum_ns, expected.sum_ns)
        assert events.problems() == ()


def test_full_disk_is_reported_and_waited_for(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256 << 10) as disk, SegmentStore(disk.seen / "events") as store:
        committed(store, step_totals(range(2), range(1)))
        disk.fill()
        late = step_totals(range(2), range(1, 2))
        store.append(StepTotals, to_arrow(late))
        for _ in range(2):
            with pytest.raises(StoreError, match="No space left on device"):
                store.commit()
        store.append(LogLines, to_arrow(line("after")))
        assert num_rows(StoredEvents(disk.seen / "events").read(StepTotals)) == 6
        assert not list((disk.seen / "events").rglob("*.tmp"))

        disk.resize(1 << 20)

        store.commit()
        events = StoredEvents(disk.seen / "events")
        assert events.read(StepTotals).step.tolist() == [0, 0, 0, 1, 1, 1] * 2
        assert events.read(LogLines, Where(ranks=(0,))).line.tolist() == ["after"]
        assert events.problems() == ()


def test_removed_directory_is_created_again(tmp_path: Path) -> None:
    directory = tmp_path / "events"
    with SegmentStore(directory) as store:
        store.append(LogLines, to_arrow(line("before")))
        store.commit()
        shutil.rmtree(directory)
        assert store.retake()
        assert not store.retake()
        with pytest.raises(StoreError, match="a job has a single daemon"):
            SegmentStore(directory)
        store.append(LogLines, to_arrow(line("after")))
        store.commit()
        assert StoredEvents(directory).read(LogLines).line.tolist() == ["after"]

        shutil.rmtree(directory)
        with SegmentStore(directory), pytest.raises(StoreError, match="a job has a single daemon"):
            store.retake()
        assert store.retake()
