"""Read the black box of a rank that runs or has exited, and write its control page.

The file is read with pread and never mapped, so that a file that is truncated during the read causes an error and not a
SIGBUS. A record counts only if its sequence number, which the writer stores last, agrees with its check word and is
unchanged after the record was copied. Records that are incomplete, because their writer still writes them or died, are
left out and counted. The writer is telemetry/black_box_writer.py; the bytes are in encoding.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.contracts.black_box.encoding import (
    CONTROL,
    CONTROL_OFFSET,
    GROUPS_OFFSET,
    HEADER_OFFSET,
    PAGE_BYTES,
    RECORD,
    RECORD_BYTES,
    RECORD_WORDS,
    RING_OFFSET,
    Word,
    box_bytes,
    decode_control,
    decode_groups,
    decode_progress,
    decode_record,
    encode_control,
    header_words,
    recorded_value,
    step_total,
)
from megatrain.contracts.black_box.header_encoding import decode_header
from megatrain.contracts.black_box.values import (
    ClockBase,
    ControlPage,
    GroupRecord,
    Identity,
    Progress,
    Record,
    RecordedValue,
    RecordFlag,
    State,
    StepTotal,
)
from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.own_files import NotOwnError, check_own_directory, open_own_file

_LOOK_AHEAD = 16
"""Slots to read beyond the cursor: with several recording threads, the cursor may briefly lag by this many."""
_CONTROL_READ_ATTEMPTS = 100
_EMPTY_SLOT = bytes(RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class BlackBox:
    """The whole content of a black box, records by sequence number.

    Copying takes time: if the rank keeps running, several successive spans may all appear in flight. `control` is None
    when the executor died while it wrote the page. `num_torn` counts incomplete records. `ended_ns` is None unless the
    writer closed the file.
    """

    path: Path
    identity: Identity
    clock: ClockBase
    capacity: int
    cursor: int
    state: State
    ended_ns: int | None
    progress: Progress
    control: ControlPage | None
    groups: dict[int, GroupRecord]
    records: tuple[Record, ...]
    totals: tuple[StepTotal, ...]
    values: tuple[RecordedValue, ...]
    num_torn: int

    @property
    def in_flight(self) -> tuple[Record, ...]:
        """The spans that have begun but not ended, oldest first."""
        return tuple(record for record in self.records if record.is_in_flight)

    @property
    def newest_ns(self) -> int:
        """The latest monotonic time that the rank itself recorded: the rank was alive at least until then."""
        ends = (record.start_ns + (record.duration_ns or 0) for record in self.records)
        known = (self.progress.phase_since_ns, self.progress.step_started_ns, self.progress.completed_ns, self.ended_ns)
        return max(self.clock.monotonic_ns, *(time_ns or 0 for time_ns in known), max(ends, default=0))


@dataclass(frozen=True, slots=True)
class BoxStatus:
    """A rank's progress. `state` is RUNNING until the rank closes its box; `cursor` numbers its newest record."""

    progress: Progress
    state: State
    cursor: int


class BlackBoxReader(Closable):
    """An open black box, whose rank may be running: this user's file, in a directory that only this user can write to.

    Raises: DataError, from every method, for a file that is missing, unreadable, truncated, not a black box, of another
    user, or of another version. No content of a file causes any other exception.
    """

    def __init__(self, path: Path, *, is_kept: bool = False, access: int = os.O_RDONLY) -> None:
        """Open the file. `is_kept`: it is a copy, which may also belong to the owner of its directory."""
        self.path = path
        try:
            self._file = _opened(path, access, is_kept=is_kept)
        except NotOwnError as error:
            raise DataError(
                f"{error.filename}: {error.strerror}; its content may belong to another user and is not read"
            ) from error
        except OSError as error:
            raise DataError(f"{path}: cannot open the black box: {error.strerror}") from error
        try:
            self.identity, self.clock, self.capacity = self._checked_header()
        except BaseException:
            self.close()
            raise

    def _checked_header(self) -> tuple[Identity, ClockBase, int]:
        page = self._read(HEADER_OFFSET, PAGE_BYTES, is_exact=False)
        identity, clock, capacity = decode_header(page, str(self.path))
        found, expected = os.fstat(self._file).st_size, box_bytes(capacity)
        if found != expected:
            raise DataError(
                f"{self.path}: {found} bytes, expected {expected} for {capacity} records; the file is truncated or"
                " something was appended to it"
            )
        return identity, clock, capacity

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, offset: int, size: int, *, is_exact: bool = True) -> bytes:
        try:
            raw = os.pread(self._file, size, offset)
        except OSError as error:
            raise DataError(f"{self.path}: cannot read the black box: {error.strerror}") from error
        if is_exact and len(raw) != size:
            raise DataError(
                f"{self.path}: {len(raw)} bytes at offset {offset}, expected {size}; the file was truncated while open"
            )
        return raw

    def _words(self) -> tuple[int, ...]:
        return header_words(self._read(HEADER_OFFSET, PAGE_BYTES))

    def progress(self) -> Progress:
        """Return the rank's progress. Reads one page, so that a watcher can call it often."""
        return decode_progress(self._words(), str(self.path))

    def cursor(self) -> int:
        """Return the sequence number of the last record that has begun."""
        return self._words()[Word.CURSOR]

    def status(self) -> BoxStatus:
        """Return progress, state and cursor. Reads one page."""
        words = self._words()
        location = str(self.path)
        return BoxStatus(decode_progress(words, location), _decoded_state(words, location), words[Word.CURSOR])

    def groups(self) -> dict[int, GroupRecord]:
        """Return the process groups, each with the last collective that this rank entered and left."""
        return decode_groups(self._read(GROUPS_OFFSET, PAGE_BYTES))

    def control(self) -> ControlPage | None:
        """Return the control page, or None when it stays incomplete (its writer died while writing)."""
        for _ in range(_CONTROL_READ_ATTEMPTS):
            page = decode_control(self._read(CONTROL_OFFSET, CONTROL.size))
            if page is not None:
                return page
        return None

    def _write_control(self, page: ControlPage) -> None:
        # The sequence numbers are times, so that none is used twice: a second writer, or one that died, may leave any
        # number.
        written_ns = time.monotonic_ns()
        busy = written_ns | 1
        done = busy + 1
        raw = encode_control(replace(page, written_ns=written_ns), done)
        try:
            os.pwrite(self._file, busy.to_bytes(8, "little"), CONTROL_OFFSET)
            os.pwrite(self._file, raw[8:], CONTROL_OFFSET + 8)
            os.pwrite(self._file, done.to_bytes(8, "little"), CONTROL_OFFSET)
        except OSError as error:
            raise DataError(f"{self.path}: cannot write the control page: {error.strerror}") from error

    def snapshot(self) -> BlackBox:
        """Read the whole black box."""
        words = self._words()
        state = _decoded_state(words, str(self.path))
        records: list[Record] = []
        num_torn = 0
        for slot, (record, is_torn) in enumerate(self._slots(0, self.capacity)):
            num_torn += is_torn
            if record is not None and record.sequence % self.capacity == slot:
                records.append(record)
        records.sort(key=lambda record: record.sequence)
        return BlackBox(
            path=self.path,
            identity=self.identity,
            clock=self.clock,
            capacity=self.capacity,
            cursor=words[Word.CURSOR],
            state=state,
            ended_ns=words[Word.ENDED_NS] or None,
            progress=decode_progress(words, str(self.path)),
            control=self.control(),
            groups=self.groups(),
            records=tuple(record for record in records if record.is_span),
            totals=tuple(step_total(record) for record in records if record.flags & RecordFlag.STEP_TOTAL),
            values=tuple(recorded_value(record) for record in records if record.flags & RecordFlag.VALUE),
            num_torn=num_torn,
        )

    def records_since(self, sequence: int) -> tuple[Record, ...]:
        """Return the records begun after `sequence`, totals and values included. 0: all records that still exist."""
        cursor = self._words()[Word.CURSOR]
        first = max(sequence + 1, cursor - self.capacity + 1)
        count = min(self.capacity, max(0, cursor - first + 1) + _LOOK_AHEAD)
        return tuple(
            record
            for wanted, (record, _) in enumerate(self._slots(first % self.capacity, count), start=first)
            if record is not None and record.sequence == wanted
        )

    def _slots(self, first: int, count: int) -> Iterator[tuple[Record | None, bool]]:
        """Yield (record, whether it is torn) for `count` slots from `first` on, wrapping at the end of the ring."""
        copy, later = self.slot_copies(first, count)
        later_numbers = memoryview(later).cast("Q")[::RECORD_WORDS].tolist()
        for index, values in enumerate(RECORD.iter_unpack(copy)):
            if values[0] != later_numbers[index]:
                yield None, False
                continue
            record = decode_record(values)
            is_torn = record is None and copy[index * RECORD_BYTES : (index + 1) * RECORD_BYTES] != _EMPTY_SLOT
            yield record, is_torn

    def slot_copies(self, first: int, count: int) -> tuple[bytes, bytes]:
        """Return two copies of `count` slots from `first` on, wrapping at the end of the ring.

        The writer clears a slot's sequence number before it changes the rest. So an equal number in both copies proves
        that the slot is complete in the first copy.
        """
        return self._ring(first, count), self._ring(first, count)

    def _ring(self, first: int, count: int) -> bytes:
        before_end = min(count, self.capacity - first)
        raw = self._read(RING_OFFSET + first * RECORD_BYTES, before_end * RECORD_BYTES)
        if before_end < count:
            raw += self._read(RING_OFFSET, (count - before_end) * RECORD_BYTES)
        return raw


def _opened(path: Path, access: int, *, is_kept: bool) -> int:
    """Open a black box whose writer can be trusted. Raises: NotOwnError, OSError."""
    if is_kept:
        return open_own_file(path, access, (os.geteuid(), path.parent.stat().st_uid))
    check_own_directory(path.parent)
    return open_own_file(path, access)


def _decoded_state(words: tuple[int, ...], location: str) -> State:
    try:
        return State(words[Word.STATE])
    except ValueError as error:
        raise DataError(f"{location}: state {words[Word.STATE]}, expected 0 to {max(State)}") from error


def read_black_box(path: Path) -> BlackBox:
    """Read the black box of a rank that is running, has ended or was killed, or a kept copy of it.

    Raises: DataError, as BlackBoxReader.
    """
    with BlackBoxReader(path, is_kept=True) as reader:
        return reader.snapshot()


def write_control(path: Path, page: ControlPage) -> None:
    """Write the control page of a worker's black box, and set `written_ns`. Only the host's executor writes it.

    Raises: DataError when the file is not a black box of this user or cannot be written, or when a value does not fit.
    """
    with BlackBoxReader(path, access=os.O_RDWR) as box:
        box._write_control(page)
