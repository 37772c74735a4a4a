"""What goes over a stream: batches up, acknowledgements down; each with a small header of JSON.

The content of a batch's frame is a whole Arrow IPC stream with one batch of one table. So all tables share a stream, a
batch that is damaged harms no other, and the spool's files are the same bytes. Batches of a session (one life of a
sender) are numbered upwards; numbers that are missing were dropped by the sender.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.ipc_message import batch_shape
from megatrain_diagnostics.columns.schema import (
    arrow_schema,
    check_columns,
    completed,
    from_arrow,
    schema_of_now,
    to_arrow,
)
from megatrain_diagnostics.events.tables import Table, TableType

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
class ClockQuestion:
    """Asks for the daemon's clock; its number is in the answer."""

    number: int


@dataclass(frozen=True, slots=True)
class ClockAnswer:
    """The daemon's clock: when it got the question, and when it answered."""

    received_unix_ns: int
    sent_unix_ns: int
    question: int = 0


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

    Its columns have the form of the wire and its buffers are not compressed, so it takes no more memory than its bytes
    and a Python string for each text. Both are looked at before anything is unpacked.
    Raises: DataError for anything but one whole batch of this table, of at most MAX_FRAME_ROWS rows.
    """
    try:
        messages = pa.ipc.MessageReader.open_stream(content)
        schema = pa.ipc.read_schema(messages.read_next_message())
        check_columns(kind, schema)
        of_wire = arrow_schema(kind)
        if any(one.type != of_wire.field(one.name).type for one in schema_of_now(schema)):
            raise DataError(f"{kind.NAME}: columns in the form of files, not in that of the wire")
        message = messages.read_next_message()
        shape = batch_shape(message.metadata)
        if shape.is_compressed or shape.num_rows > MAX_FRAME_ROWS:
            found = "compressed buffers" if shape.is_compressed else f"{shape.num_rows} rows"
            raise DataError(f"{kind.NAME}: {found}; expected at most {MAX_FRAME_ROWS} rows, as they are")
        batch = pa.ipc.read_record_batch(message, schema)
        # offsets of text that point elsewhere are found here, before anything follows them
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, StopIteration, OSError, EOFError, MemoryError) as error:
        raise DataError(f"{kind.NAME}: no batch of Arrow's: {error}") from error  # names that are no text too
    batch = completed(kind, batch)
    return pa.RecordBatch.from_arrays(batch.columns, schema=arrow_schema(kind)), from_arrow(kind, batch)
