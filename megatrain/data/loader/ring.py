"""The ring of a host's data loader: its words, which synchronize the loader and the ranks without messages.

Only one process at a time stores to a word, and a store is one instruction. The loader fills a slot only when all
readers of the share have stored that they are done with the slot's previous step. The loader stores 0 in the slot's
word first and the step's number plus 1 last, so a slot whose word names a step is complete, even if a loader was killed
at any moment. A reader does not store that it is done while it uses the slot. So a slot does not change while a reader
uses it.

This needs a processor on which other cores see the stores of a core in their order, and which loads in order: x86-64
(Intel SDM vol. 3A, sec. "Memory Ordering"). Other processors need memory barriers, which Python lacks, so
`store_order_problem` refuses them.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import CheckpointError, DataError, UnreachableError
from megatrain.contracts.step_plan import StepPlan
from megatrain.data.cache_use import CacheUse
from megatrain.data.loader.ring_layout import PRODUCER_WORDS, RingLayout
from megatrain.data.loader.slot_content import SlotContent
from megatrain.data.loader_report import LoaderRead
from megatrain.data.producer_work import ProducerWork
from megatrain.data.step_batch import StepBatch

_ORDERED_MACHINES = ("x86_64", "AMD64")


@dataclass(frozen=True, slots=True)
class RingState:
    """The words of a ring. done: by reader. filled: by share and slot; see RingLayout."""

    done: tuple[int, ...]
    filled: tuple[tuple[int, ...], ...]


class Ring:
    """A ring in a writable buffer, which is all zero when it is new."""

    def __init__(self, buffer: Any, layout: RingLayout) -> None:
        self._buffer = buffer
        self._layout = layout
        self._words: NDArray[np.int64] = np.frombuffer(buffer, np.int64, layout.num_words)

    def state(self) -> RingState:
        """Return the words that determine what the loader does next."""
        layout, words = self._layout, self._words
        return RingState(
            tuple(int(words[layout.done(reader)]) for reader in range(layout.num_readers)),
            tuple(
                tuple(int(words[layout.filled(share, slot)]) for slot in range(layout.depth))
                for share in range(layout.num_shares)
            ),
        )

    def set_done(self, reader: int, num_steps: int) -> None:
        """Store that a rank does not need the first `num_steps` steps any more."""
        self._words[self._layout.done(reader)] = num_steps

    def is_filled(self, share: int, step: int) -> bool:
        """Return whether a step of a share can be read."""
        return bool(self._words[self._layout.filled(share, step % self._layout.depth)] == step + 1)

    def begin(self, share: int, step: int) -> None:
        """Store that the slot of a step is being written."""
        self._words[self._layout.filled(share, step % self._layout.depth)] = 0

    def put(self, share: int, step: int, content: StepBatch | DataError) -> None:
        """Store a batch, or the error of its read, in a slot that `begin` has marked."""
        slot, found = step % self._layout.depth, self._content(share, step)
        if isinstance(content, DataError):
            count = found.put_error(str(content))
            self._words[self._layout.exit_code(share, slot)] = content.exit_code
        else:
            count = found.put(content)
        self._words[self._layout.count(share, slot)] = count

    def put_read(self, share: int, step: int, read: LoaderRead) -> None:
        """Store how the step in a slot was read, before `publish`. For a read that failed, the numbers of producers are
        0."""
        layout, slot = self._layout, step % self._layout.depth
        self._words[layout.read(share, slot)] = read.start_ns, read.duration_ns, read.num_bytes
        works = read.producers or (ProducerWork(),) * layout.num_producers
        self._words[layout.producers(share, slot)] = [number for work in works for number in astuple(work)]

    @property
    def cache_use(self) -> CacheUse:
        """What the loaders of this round read through the cache of remote data."""
        return CacheUse(*self._words[self._layout.CACHE_USE].tolist())

    def put_cache_use(self, use: CacheUse) -> None:
        """Store what the loaders of this round read through the cache of remote data."""
        self._words[self._layout.CACHE_USE] = use

    def publish(self, share: int, step: int) -> None:
        """Store that the slot of a step is complete."""
        self._words[self._layout.FILLS] += 1
        self._words[self._layout.filled(share, step % self._layout.depth)] = step + 1

    def read(
        self, share: int, step: int, plan: StepPlan, source_names: tuple[str, ...], *, has_patches: bool = True
    ) -> StepBatch:
        """Return a step that is filled. Its tokens and patches are those of the ring: valid until `set_done` includes
        the step. has_patches: see BatchReader.read_step.

        Raises: DataError with the text of the loader's error, UnreachableError if it was one.
        """
        slot, found = step % self._layout.depth, self._content(share, step)
        count = int(self._words[self._layout.count(share, slot)])
        if count < 0:
            code = self._words[self._layout.exit_code(share, slot)]
            raise (UnreachableError if code == UnreachableError.exit_code else DataError)(found.error(count))
        return found.batch(count, plan, source_names, has_patches=has_patches)

    def read_of(self, share: int, step: int) -> LoaderRead:
        """Return how a step that is filled was read."""
        layout, slot = self._layout, step % self._layout.depth
        works = self._words[layout.producers(share, slot)].reshape(layout.num_producers, PRODUCER_WORDS)
        start_ns, duration_ns, num_bytes = self._words[layout.read(share, slot)].tolist()
        return LoaderRead(start_ns, duration_ns, num_bytes, tuple(ProducerWork(*work) for work in works.tolist()))

    def num_ready(self, share: int, step: int) -> int:
        """Return how many steps from `step` on are filled without a gap."""
        depth = self._layout.depth
        return next((number for number in range(depth) if not self.is_filled(share, step + number)), depth)

    @property
    def num_starts(self) -> int:
        """How often ranks have started a loader in this round."""
        return int(self._words[self._layout.ALL_STARTS])

    def count_start(self) -> int:
        """Count a start of a loader; return the starts since a slot was filled. The caller has the loader's lock."""
        layout, words = self._layout, self._words
        fills = int(words[layout.FILLS])
        words[layout.STARTS] = words[layout.STARTS] + 1 if fills == words[layout.FILLS_AT_START] else 1
        words[layout.FILLS_AT_START] = fills
        words[layout.ALL_STARTS] += 1
        return int(words[layout.STARTS])

    def _content(self, share: int, step: int) -> SlotContent:
        return SlotContent(self._buffer, self._layout.content(share, step % self._layout.depth), self._layout)


def create_ring(path: Path, layout: RingLayout) -> None:
    """Create the file of a ring, and reserve its memory: a store into a full tmpfs would kill the process.

    Raises: CheckpointError naming the file, and the missing memory.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, layout.num_bytes)
        finally:
            os.close(file)
    except OSError as error:
        with suppress(OSError):  # on a read-only file system, unlink fails even if there is no file
            path.unlink()
        if error.errno != errno.ENOSPC:
            raise CheckpointError(f"{path}: the ring cannot be created: {error.strerror}") from error
        raise CheckpointError(
            f"{path}: {path.parent.parent} has no space for a ring of {layout.num_bytes} bytes; use a smaller "
            'data.prefetch, more memory, another checkpoint.arena_directory, or data.loader="thread"'
        ) from error


def open_ring(path: Path) -> int:
    """Open the file of a ring and return its descriptor, which the caller closes.

    Raises: CheckpointError when it cannot be opened.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(f"{path}: the ring cannot be opened: {error.strerror}") from error


def map_ring(file: int, layout: RingLayout) -> Ring:
    """Map the ring of an open file. The mapping remains when the descriptor is closed and when the file is removed.

    Raises: CheckpointError when it has another size, or cannot be mapped.
    """
    try:
        found = os.fstat(file).st_size
        if found != layout.num_bytes:
            raise CheckpointError(
                f"the ring of the data loader has {found} bytes, expected {layout.num_bytes}: it is of another plan"
            )
        return Ring(mmap.mmap(file, found), layout)
    except OSError as error:
        raise CheckpointError(f"the ring of the data loader cannot be mapped: {error.strerror}") from error


def store_order_problem(machine: str) -> str:
    """Return why processes cannot share a ring on a machine, by its name in `uname -m`; empty if they can."""
    if machine in _ORDERED_MACHINES:
        return ""
    return (
        f'data.loader="host": this host is {machine}, and a ring needs the order of stores of x86_64; use '
        'data.loader="thread"'
    )
