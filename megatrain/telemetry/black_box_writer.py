"""The memory of a recorder: a black box file on tmpfs, or plain memory without a file.

The file is filled under a temporary name and then renamed, so no reader ever sees an incomplete header. Its pages are
allocated at once, because a store into a hole of a full tmpfs would kill the process with SIGBUS. Words that readers
watch are stored through a memoryview of 64-bit words, which takes one machine store each; struct.pack_into would first
write zeros. Telemetry must not stop training: without a usable directory there is one warning and no file.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from megatrain.contracts.black_box.encoding import (
    CONTROL,
    CONTROL_OFFSET,
    GROUP_BYTES,
    GROUPS_OFFSET,
    MAX_GROUPS,
    NO_VALUE,
    Word,
    box_bytes,
    decode_control,
    encode_control,
    encode_group,
)
from megatrain.contracts.black_box.header_encoding import encode_header
from megatrain.contracts.black_box.values import (
    ControlPage,
    GroupRecord,
    Identity,
    State,
    read_clock_base,
)
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.own_files import check_own_directory, make_own_directory
from megatrain.run_files.run_directory import black_box_path, previous_black_box

logger = logging.getLogger(__name__)

_SPARE_BYTES = 8 * 2**20
"""Left free on the tmpfs, because NCCL and data loaders need some of /dev/shm, which has 64 MiB in a default
container."""
_ANONYMOUS_RECORDS = 4096
"""The number of open spans that can be distinguished without a file."""
_CONTROL_SEQLOCK_WORD = CONTROL_OFFSET // 8
_WORDS_WITHOUT_VALUE = (
    *(Word.CURRENT_STEP, Word.STEP_STARTED_NS, Word.COMPLETED_STEP, Word.COMPLETED_NS),
    *(Word.LAST_STEP_NS, Word.MEDIAN_STEP_NS),
)


class BlackBoxWriter:
    """The mapped bytes of one black box, and its words that change.

    `buffer` and `words` are the same memory, as bytes for struct and as 64-bit words.
    """

    def __init__(self, buffer: mmap.mmap, capacity: int, path: Path | None) -> None:
        self.path = path
        self.inode = 0
        self.capacity = capacity
        self.buffer = buffer
        self.words: memoryview[int] = memoryview(buffer).cast("Q")
        self._groups: dict[tuple[str, int, int, int], int] = {}
        for word in _WORDS_WITHOUT_VALUE:
            self.words[word] = NO_VALUE
        self.words[Word.PHASE_SINCE_NS] = time.monotonic_ns()
        control = encode_control(ControlPage(), seqlock=0)
        buffer[CONTROL_OFFSET : CONTROL_OFFSET + CONTROL.size] = control
        self._seen_control = 0

    @classmethod
    def anonymous(cls) -> Self:
        """Return a writer on private memory, with which spans can still be timed and summed."""
        return cls(mmap.mmap(-1, box_bytes(_ANONYMOUS_RECORDS)), _ANONYMOUS_RECORDS, path=None)

    @classmethod
    def create(cls, path: Path, identity: Identity, capacity: int) -> Self:
        """Create the file. A file of an earlier process of the same rank and round is kept under another name, as
        evidence.

        Raises: OSError when the directory is missing, read-only, full or not private to this user; DataError when a
        name is too long, or this machine is big-endian.
        """
        if sys.byteorder != "little":
            raise DataError("the format of a black box is little-endian, and this machine is big-endian")
        header = encode_header(identity, read_clock_base(), capacity)
        check_own_directory(path.parent)
        size = box_bytes(capacity)
        space = os.statvfs(path.parent)
        free = space.f_bavail * space.f_frsize
        if free < size + _SPARE_BYTES:
            raise OSError(f"{free} bytes are free, {size} are needed and {_SPARE_BYTES} must stay free")
        file, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            os.posix_fallocate(file, 0, size)
            buffer = mmap.mmap(file, size)
            buffer[: len(header)] = header
            writer = cls(buffer, capacity, path)
            writer.inode = os.fstat(file).st_ino
            # a process that did not fail has removed its own file
            with contextlib.suppress(FileNotFoundError):
                path.rename(previous_black_box(path))
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(file)
        return writer

    def add_group(self, name: str, first_rank: int, stride: int, num_ranks: int) -> int:
        """Add a process group to the table, if it is not there yet, and return its number.

        Raises: DataError when the table is full or the name too long.
        """
        key = (name, first_rank, stride, num_ranks)
        if key in self._groups:
            return self._groups[key]
        number = len(self._groups) + 1
        if number >= MAX_GROUPS:
            raise DataError(f"black box: group {name!r} would be number {number}, the table ends at {MAX_GROUPS - 1}")
        entry = encode_group(GroupRecord(number, name, first_rank, stride, num_ranks))
        offset = GROUPS_OFFSET + number * GROUP_BYTES
        # The number makes the entry valid, so it is stored last.
        self.buffer[offset + 4 : offset + GROUP_BYTES] = entry[4:]
        self.buffer[offset : offset + 4] = entry[:4]
        self._groups[key] = number
        return number

    def next_control(self) -> ControlPage | None:
        """Return the control page if it has changed since the last call and no process is writing it."""
        seqlock = self.words[_CONTROL_SEQLOCK_WORD]
        if seqlock == self._seen_control:
            return None
        page = decode_control(self.buffer[CONTROL_OFFSET : CONTROL_OFFSET + CONTROL.size])
        if page is not None and self.words[_CONTROL_SEQLOCK_WORD] == seqlock:
            self._seen_control = seqlock
            return page
        return None

    def close(self, *, keep: bool, has_failed: bool) -> None:
        """Record the end, and remove the file unless `keep` is set. The memory stays usable for late spans."""
        self.words[Word.ENDED_NS] = time.monotonic_ns()
        self.words[Word.STATE] = State.FAILED if has_failed else State.CLOSED
        if self.path is not None and not keep:
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_ino == self.inode:  # otherwise another process uses the name
                    self.path.unlink()


def open_writer(identity: Identity, directory: str, run_key: str, num_records: int) -> BlackBoxWriter:
    """Return the writer of this rank's black box in `directory`; "" means no file. Warns if the directory is not
    usable."""
    if not directory:
        return BlackBoxWriter.anonymous()
    path = black_box_path(Path(directory), identity.job, run_key, identity.branch, identity.round, identity.rank)
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        make_own_directory(path.parent)
        return BlackBoxWriter.create(path, identity, num_records)
    except (OSError, DataError) as error:
        logger.warning(
            "no black box for rank %d, so a crash or hang of this rank leaves no record: %s: %s"
            " (telemetry.black_box_directory=%r)",
            *(identity.rank, path, error, directory),
        )
        return BlackBoxWriter.anonymous()
