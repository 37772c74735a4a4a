"""What goes over a stream: batches up, acknowledgements down; each with a small header of JSON.

A stream is one Flight DoExchange whose only column is binary: a row is a whole Arrow IPC stream with one batch of one
table. So all tables share a stream, a batch that is damaged harms no other, and the spool's files are the same bytes.
Batches of a session (one life of a sender) are numbered upwards; numbers that are missing were dropped by the sender.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.schema import arrow_schema, check_columns, from_arrow, to_arrow
from megatrain_diagnostics.events.tables import Table, TableType

COMMAND = b"megatrain events 2"
"""Of the Flight descriptor: what is streamed, and the version of the tables that a sender makes."""
COMMANDS_SERVED = (b"megatrain events 1", COMMAND)
"""What a daemon serves: hosts may be a version behind. What it does not serve, they keep in their spools."""
CLOCK_ACTION = "clock"
FRAME_SCHEMA = pa.schema([pa.field("batch", pa.binary(), nullable=False)])
ANSWER_SCHEMA = pa.schema([])
MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_ROWS = 65_536
_MAX_SCHEMA_BYTES = 8192
"""Of an IPC stream before and behind its batch: the tables' own take some 2,000."""


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """What comes with a batch."""

    table: str
    number: int
    made_unix_ns: int
    """By the host's clock."""
    dropped_rows: int = 0
    """That this session had to give up so far, all tables together."""
    dropped_batches: int = 0


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What the daemon says: it is done with all batches through this number, for good. -1: with none."""

    through: int
    is_closing: bool = False
    """The daemon ends: finish the stream, and look for the next one."""


@dataclass(frozen=True, slots=True)
class ClockAnswer:
    """The daemon's clock: when it got the question, and when it answered."""

    received_unix_ns: int
    sent_unix_ns: int


def batch_bytes(table: Table) -> pa.Buffer:
    """Return a table as an Arrow IPC stream, a copy of all its rows."""
    batch = to_arrow(table)
    # a sink that grows would copy what it holds again and again
    buffer = pa.allocate_buffer(pa.ipc.get_record_batch_size(batch) + _MAX_SCHEMA_BYTES)
    with pa.FixedSizeBufferWriter(buffer) as sink:
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        end = sink.tell()
    return buffer.slice(0, end)


def read_batch(kind: type[TableType], content: pa.Buffer) -> tuple[pa.RecordBatch, TableType]:
    """Return the batch that bytes of anybody hold, in both forms, without a copy of the numbers.

    Raises: DataError for anything but one whole batch of this table.
    """
    try:
        with pa.ipc.open_stream(content) as reader:
            check_columns(kind, reader.schema)
            batch = reader.read_next_batch()
            # offsets of text that point elsewhere are found here, before anything follows them
            batch.validate(full=True)
    except (pa.ArrowException, ValueError, StopIteration, OSError, MemoryError) as error:  # names that are no text too
        raise DataError(f"{kind.NAME}: no batch of Arrow's: {error}") from error
    if batch.schema.types != arrow_schema(kind).types:
        raise DataError(f"{kind.NAME}: columns in the form of files, not in that of the wire")
    table = from_arrow(kind, batch)
    return pa.RecordBatch.from_arrays(batch.columns, schema=arrow_schema(kind)), table


def frame_of(content: pa.Buffer) -> pa.RecordBatch:
    """Return the row of a stream that carries these bytes, without a copy."""
    offsets = pa.py_buffer(np.array([0, content.size], dtype=np.int32).tobytes())
    return pa.record_batch([pa.Array.from_buffers(pa.binary(), 1, [None, offsets, content])], schema=FRAME_SCHEMA)


def content_of(frame: pa.RecordBatch | None) -> pa.Buffer:
    """Return the bytes that a row of a stream carries, without a copy. Raises: DataError."""
    if frame is None or frame.num_rows != 1 or frame.schema.types != FRAME_SCHEMA.types:
        raise DataError("a message without a batch in it")
    try:
        frame.validate(full=True)
    except pa.ArrowException as error:
        raise DataError(f"a damaged message: {error}") from error
    content = frame.column(0)[0].as_buffer()
    if content is None or not 0 < content.size <= MAX_FRAME_BYTES:
        raise DataError(f"a batch of {0 if content is None else content.size} bytes; expected 1 to {MAX_FRAME_BYTES}")
    return content
