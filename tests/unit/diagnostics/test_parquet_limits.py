"""Untrusted Parquet files: small files that would unpack to gigabytes are refused before they are read."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.schema import stored_schema
from megatrain_diagnostics.events.tables import LogLines, Spans, Table, num_rows
from megatrain_diagnostics.store import parquet_limits
from megatrain_diagnostics.store.parquet_pages import unpacked_bytes
from megatrain_diagnostics.store.public_trace import read_trace
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segments import SegmentName
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

ROWS = 1 << 20


def same_rows(kind: type[Table], count: int) -> pa.Table:
    """Return equal rows, which take almost no space in a file."""

    def column(field: pa.Field) -> pa.Array:
        if pa.types.is_dictionary(field.type):
            return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.uint8)), pa.array(["forward-compute"]))
        if pa.types.is_string(field.type):
            zeros = pa.array(np.zeros(count, np.int32))
            return pa.DictionaryArray.from_arrays(zeros, pa.array(["x" * 1000 if field.name == "line" else "host-1"]))
        return pa.array(np.ones(count), field.type)

    schema = stored_schema(kind)
    return pa.table([column(field) for field in schema], names=schema.names)


def write_bomb(events: Path, kind: type[Table], num_groups: int) -> Path:
    """Write `num_groups` million rows, which take kilobytes."""
    path = events / kind.NAME / "2026-11-23" / "10" / "foreign.parquet"
    path.parent.mkdir(parents=True)
    rows = same_rows(kind, ROWS)
    with pq.ParquetWriter(path, rows.schema, compression="zstd", store_schema=False) as file:
        for _ in range(num_groups):
            file.write_table(rows, row_group_size=ROWS)
        file.add_key_value_metadata(stored_schema(kind).metadata)
    assert path.stat().st_size < 2 << 20
    return path


READ = """
import resource, sys
from pathlib import Path
from megatrain_diagnostics.events.tables import LogLines, Spans
from megatrain_diagnostics.store.reader import StoredEvents
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
events = StoredEvents(Path(sys.argv[1]))
found = events.read({"spans": Spans, "logs": LogLines}[sys.argv[2]])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, len(found.rank), *events.problems())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_groups"), [(Spans, 8), (LogLines, 1)])
def test_compressed_bomb_takes_no_memory(tmp_path: Path, kind: type[Table], num_groups: int) -> None:
    write_bomb(tmp_path / "events", kind, num_groups)
    command = [sys.executable, "-c", READ, str(tmp_path / "events"), kind.NAME]
    reported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    growth_mb, num_rows_read, problem = reported.split(maxsplit=2)
    assert int(growth_mb) < 128
    assert num_rows_read == "0"
    assert "MiB or more; at most 512 MiB are read; it was set aside" in problem


@pytest.mark.slow(kept=["LogLines-False", "LogLines-True"])
@pytest.mark.parametrize("is_named_by_a_store", [False, True])
@pytest.mark.parametrize("kind", [Spans, LogLines])
def test_limit_counts_rows_and_texts_that_rows_share(
    tmp_path: Path, kind: type[Table], is_named_by_a_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixed columns of LogLines are far below the limit: the text of 1,000 bytes in each row exceeds it."""
    events = tmp_path / "events"
    monkeypatch.setattr(parquet_limits, "MAX_PLAIN_BYTES", 64 << 20)
    path = write_bomb(events, kind, 1)
    if is_named_by_a_store:
        path.rename(path.with_name(SegmentName(1, 1, zlib.crc32(path.read_bytes())).text))
    stored = StoredEvents(events)
    assert num_rows(stored.read(kind)) == 0
    (problem,) = stored.problems()
    assert "its rows unpack to" in problem
    if kind is Spans:  # a million log lines would be too large for an answer
        monkeypatch.setattr(parquet_limits, "MAX_PLAIN_BYTES", 2 << 30)
        assert num_rows(StoredEvents(events).read(kind)) == 1, "all equal, so one row: it can be read"


def test_answer_is_limited_whatever_its_files_state(tmp_path: Path) -> None:
    write_bomb(tmp_path / "events", Spans, 1)
    stored = StoredEvents(tmp_path / "events", memory_limit_bytes=100_000_000)
    with pytest.raises(DataError, match="the answer has more than 50 MB; ask for fewer steps or ranks"):
        stored.read(Spans)


def test_long_footer_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events" / "logs" / "foreign.parquet"
    path.parent.mkdir(parents=True)
    footer = 17 << 20
    path.write_bytes(b"PAR1" + bytes(footer) + footer.to_bytes(4, "little") + b"PAR1")
    stored = StoredEvents(tmp_path / "events")
    assert num_rows(stored.read(LogLines)) == 0
    assert f"a footer of {footer} bytes; at most {16 << 20} are read; it was set aside" in stored.problems()[0]


def lying_page(path: Path) -> None:
    """Overwrite the header of the first page: it now states an unpacked size of 2 GB, unlike the footer."""
    content = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    # field 1 (type 0), then field 2 as a zigzag varint: overwrite both lengths and the rest of the header
    head = bytes([0x15, 0x00, 0x15, 0xFE, 0xFF, 0xFF, 0xFF, 0x0F, 0x15, 0x20, 0x00])
    content[place : place + len(head)] = head
    path.write_bytes(content)


@pytest.mark.parametrize("is_trace", [False, True])
def test_page_with_a_larger_size_than_the_footer_is_refused(tmp_path: Path, is_trace: bool) -> None:
    message = "its rows unpack to 2048 MiB or more; at most 512 MiB are read"
    if is_trace:
        path = tmp_path / "trace.parquet"
        write_trace_of(path, 1000)
        lying_page(path)
        with pytest.raises(DataError, match=message):
            read_trace(path)
        return
    path = write_bomb(tmp_path / "events", Spans, 1)
    lying_page(path)
    stored = StoredEvents(tmp_path / "events")
    assert num_rows(stored.read(Spans)) == 0
    assert message in stored.problems()[0]


def test_heads_of_pages_agree_with_footers(tmp_path: Path) -> None:
    path = write_bomb(tmp_path / "events", LogLines, 2)
    metadata = pq.read_metadata(path)
    reported = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    with path.open("rb") as file:
        assert 0 < sum(unpacked_bytes(file, metadata)) <= reported, "footers with head counts, too"
    plain = pa.table([np.arange(10_000)], schema=pa.schema([pa.field("a", pa.int64(), nullable=False)]))
    pq.write_table(plain, tmp_path / "plain.parquet", use_dictionary=False, data_page_size=8192)
    with (tmp_path / "plain.parquet").open("rb") as file:
        pages = list(unpacked_bytes(file, pq.read_metadata(tmp_path / "plain.parquet")))
    assert (sum(pages), len(pages) > 1) == (8 * 10_000, True)


def write_trace_of(path: Path, count: int) -> None:
    names = ["dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc", "mb_id"]
    columns = {name: pa.array(np.zeros(count, np.int64)) for name in names}
    columns |= {name: pa.array(np.zeros(count)) for name in ("start_ts", "duration")}
    columns["optype"] = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(count, np.int8)), pa.array(["forward-compute"])
    )
    pq.write_table(pa.table(columns), path, compression="zstd")


def write_trace_of_long_names(path: Path, count: int) -> None:
    write_trace_of(path, count)
    table = pq.read_table(path)
    zeros = pa.array(np.zeros(table.num_rows, np.int32))
    kinds = pa.DictionaryArray.from_arrays(zeros, pa.array(["x" * 100_000]))
    pq.write_table(table.set_column(table.schema.get_field_index("optype"), "optype", kinds), path, compression="zstd")


def test_a_public_trace_has_the_same_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_limits, "MAX_PLAIN_BYTES", 64 << 20)
    write_trace_of(tmp_path / "trace.parquet", ROWS)
    with pytest.raises(DataError, match="its rows unpack to 81 MiB or more; at most 64 MiB are read"):
        read_trace(tmp_path / "trace.parquet")


def test_operation_name_that_rows_share_is_held_once(tmp_path: Path) -> None:
    """A hundred thousand rows with one name of 100,000 bytes: 10 GB if each had its own."""
    write_trace_of_long_names(tmp_path / "trace.parquet", 100_000)
    before = pa.total_allocated_bytes()
    table = read_trace(tmp_path / "trace.parquet")
    assert len(table.kind) == 100_000
    assert table.kinds == ("x" * 100_000,)
    assert pa.total_allocated_bytes() - before < 64 << 20
