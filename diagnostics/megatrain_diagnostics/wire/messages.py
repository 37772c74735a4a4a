"""The messages of a stream: batches and clock questions to the daemon, answers back; each has a small JSON header.

The content of a batch's frame is a complete Arrow IPC stream with one batch of one table. So all tables share a stream,
a damaged batch does not affect others, and the files of the spool have the same bytes. The batches of a session (one
sender process) have ascending numbers; missing numbers are batches that the sender dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.ipc_message import batch_shape
from megatrain_diagnostics.columns.schema import (
    arrow_schema,
    check_columns,
    from_arrow,
    to_arrow,
)
from megatrain_diagnostics.events.tables import Table, TableType

MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_ROWS = 65_536
_MAX_SCHEMA_BYTES = 8192
"""Limit of the size of an IPC stream without its batch. The schemas of the tables take about 2,000 bytes."""


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The header of a batch."""

    table: str
    number: int
    made_unix_ns: int
    """By the host's clock."""
    dropped_rows: int = 0
    """Rows of all tables that this session has dropped so far."""


@dataclass(frozen=True, slots=True)
class Acknowledgment:
    """The daemon has stored or rejected all batches up to `through`; -1: none."""

    through: int
    is_closing: bool = False
    """The daemon is about to exit: the sender must end the stream and find the next daemon."""


@dataclass(frozen=True, slots=True)
class ClockQuestion:
    """Asks for the daemon's clock; the answer has the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class ClockAnswer:
    """The times by the daemon's clock at which it received the question and sent the answer."""

    received_unix_ns: int
    sent_unix_ns: int
    question: int = 0


def batch_bytes(table: Table) -> pa.Buffer:
    """Return a table as an Arrow IPC stream, a copy of all its rows."""
    batch = to_arrow(table)
    # the size is known, so no growing buffer is needed, which would copy its content repeatedly
    buffer = pa.allocate_buffer(pa.ipc.get_record_batch_size(batch) + _MAX_SCHEMA_BYTES)
    with pa.FixedSizeBufferWriter(buffer) as sink:
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        end = sink.tell()
    return buffer.slice(0, end)


def read_batch(kind: type[TableType], content: pa.Buffer) -> tuple[pa.RecordBatch, TableType]:
    """Read a batch from untrusted bytes; return it as Arrow batch and as table, without copying numbers.

    Columns in wire form and uncompressed buffers are required and checked before anything is unpacked, so that the
    result takes no more memory than `content`, plus a Python string for each text.
    Raises: DataError for anything other than one complete batch of this table with at most MAX_FRAME_ROWS rows.
    """
    try:
        messages = pa.ipc.MessageReader.open_stream(content)
        schema = pa.ipc.read_schema(messages.read_next_message())
        check_columns(kind, schema)
        of_wire = arrow_schema(kind)
        if any(field.type != of_wire.field(field.name).type for field in schema):
            raise DataError(f"{kind.NAME}: columns have the types of files, not those of the wire")
        message = messages.read_next_message()
        shape = batch_shape(message.metadata)
        if shape.is_compressed or shape.num_rows > MAX_FRAME_ROWS:
            found = "compressed buffers" if shape.is_compressed else f"{shape.num_rows} rows"
            raise DataError(f"{kind.NAME}: {found}; expected at most {MAX_FRAME_ROWS} rows without compression")
        batch = pa.ipc.read_record_batch(message, schema)
        # finds invalid offsets of texts before they are used
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, StopIteration, OSError, EOFError, MemoryError) as error:
        # invalid Unicode in names is a ValueError too
        raise DataError(f"{kind.NAME}: not an Arrow record batch: {error}") from error
    return pa.RecordBatch.from_arrays(batch.columns, schema=arrow_schema(kind)), from_arrow(kind, batch)
