"""The messages of a stream: batches up, acknowledgements down; each with a small header of JSON.

The content of a batch's frame is a whole Arrow IPC stream with one batch of one table. So all tables share a stream, a
damaged batch affects no other, and the spool's files are the same bytes. Batches of a session (one life of a sender)
are numbered upwards; the sender dropped the missing numbers.
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
"""Size of an IPC stream before and behind its batch: the tables' own take some 2,000."""


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The header of a batch."""

    table: str
    number: int
    made_unix_ns: int
    """By the host's clock."""
    dropped_rows: int = 0
    """Rows that this session has dropped so far, all tables together."""
    dropped_batches: int = 0


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The daemon has finished with all batches through this number. -1: with none."""

    through: int
    is_closing: bool = False
    """The daemon ends: finish the stream, and find the next daemon."""


@dataclass(frozen=True, slots=True)
class ClockQuestion:
    """Asks for the daemon's clock; the answer repeats its number."""

    number: int


@dataclass(frozen=True, slots=True)
class ClockAnswer:
    """The daemon's clock: when it received the question, and when it answered."""

    received_unix_ns: int
    sent_unix_ns: int
    question: int = 0


def batch_bytes(table: Table) -> pa.Buffer:
    """Return a table as an Arrow IPC stream, a copy of all its rows."""
    batch = to_arrow(table)
    # a growing sink would copy its content again and again
    buffer = pa.allocate_buffer(pa.ipc.get_record_batch_size(batch) + _MAX_SCHEMA_BYTES)
    with pa.FixedSizeBufferWriter(buffer) as sink:
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        end = sink.tell()
    return buffer.slice(0, end)


def read_batch(kind: type[TableType], content: pa.Buffer) -> tuple[pa.RecordBatch, TableType]:
    """Return the batch in untrusted bytes, in both forms, without a copy of the numbers.

    Its columns must have wire form and its buffers must not be compressed, so it takes no more memory than its bytes
    and a Python string for each text. Both are checked before anything is unpacked.
    Raises: DataError for anything else than one whole batch of this table, of at most MAX_FRAME_ROWS rows.
    """
    try:
        messages = pa.ipc.MessageReader.open_stream(content)
        schema = pa.ipc.read_schema(messages.read_next_message())
        check_columns(kind, schema)
        of_wire = arrow_schema(kind)
        if any(one.type != of_wire.field(one.name).type for one in schema):
            raise DataError(f"{kind.NAME}: columns have the types of files, not those of the wire")
        message = messages.read_next_message()
        shape = batch_shape(message.metadata)
        if shape.is_compressed or shape.num_rows > MAX_FRAME_ROWS:
            found = "compressed buffers" if shape.is_compressed else f"{shape.num_rows} rows"
            raise DataError(f"{kind.NAME}: {found}; expected at most {MAX_FRAME_ROWS} rows without compression")
        batch = pa.ipc.read_record_batch(message, schema)
        # invalid text offsets are found here, before anything follows them
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, StopIteration, OSError, EOFError, MemoryError) as error:
        raise DataError(f"{kind.NAME}: not an Arrow record batch: {error}") from error  # invalid Unicode in names too
    return pa.RecordBatch.from_arrays(batch.columns, schema=arrow_schema(kind)), from_arrow(kind, batch)
