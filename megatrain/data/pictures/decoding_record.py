"""At which pictures producers have ended: files in memory that outlive a producer, so that the picture becomes known.

A producer notes the pictures of a request before it works on them. If it ends there, the program that starts it again
adds the end to a list that all its producers read, and they work on each of these pictures alone. A picture is given up
when producers have ended at it alone twice, one after the other; a success in between forgets it. So a producer that
something else kills costs no picture, and which pictures are given up does not depend on who works on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from megatrain.contracts.errors import DataError
from megatrain.formatting import ranges_text

_MAX_ENDS = 2
_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class PicturePart:
    """Samples that a producer works on together. given_up: how producers ended at the only one; empty: it is tried."""

    numbers: tuple[int, ...]
    given_up: str = ""


@dataclass(frozen=True, slots=True)
class _Work:
    """Samples that a producer worked on. num_ends: the known ends at it, if it is one sample. end: how the producer
    ended there; empty: it did not."""

    data: str
    numbers: tuple[int, ...]
    num_ends: int
    end: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> _Work:
        """Raises: ValueError, KeyError or TypeError when the content is not whole."""
        values = json.loads(content)
        numbers = tuple(int(number) for number in values["numbers"])
        return cls(str(values["data"]), numbers, int(values["num_ends"]), str(values["end"]))


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A sample at which producers have ended. num_ends: how often at it alone. end: the last of these ends."""

    num_ends: int = 0
    end: str = ""


_UNKNOWN = _Suspect()


class DecodingRecord:
    """What one producer works on, and the ends of all producers that a program starts.

    note, ends: descriptors of two files in memory. The producer writes the note; the program and all its producers
    append to `ends`, which must be open with O_APPEND.
    """

    def __init__(self, note: int, ends: int) -> None:
        self._note = note
        self._ends = ends
        self._num_bytes = 0
        self._suspects: dict[tuple[str, int], _Suspect] = {}

    def parts(self, data: str, numbers: Sequence[int]) -> list[PicturePart]:
        """Divide the samples of a request, in their order. data: the digest of the index. For the producer."""
        self._read_ends()
        found: list[PicturePart] = []
        for is_suspect, group in groupby(numbers, lambda number: (data, number) in self._suspects):
            if is_suspect:
                found += [PicturePart((number,), self._given_up(data, number)) for number in group]
            else:
                found.append(PicturePart(tuple(group)))
        return found

    @contextmanager
    def working(self, data: str, numbers: tuple[int, ...]) -> Iterator[None]:
        """Note samples during the block. If the process ends in it, or by its exception, it has ended at them."""
        suspect = self._suspects.get((data, numbers[0])) if len(numbers) == 1 else None
        work = _Work(data, numbers, (suspect or _UNKNOWN).num_ends)
        os.pwrite(self._note, work.encode(), 0)
        try:
            yield
        except DataError:
            self._clear()  # it is an answer: the producer goes on
            raise
        self._clear()
        if suspect is not None:
            self._append(work)

    def add_end(self, end: str) -> str:
        """Add the end of the producer if it worked on samples. For the program that starts it again.

        end: as the end of a sentence about the process. Returns the samples for a message; empty if there are none.
        """
        content = os.pread(self._note, os.fstat(self._note).st_size, 0)
        self._clear()
        try:
            work = replace(_Work.decode(content), end=end)
        except (ValueError, KeyError, TypeError):  # it did not work, or was killed when it noted the samples
            return ""
        self._append(work)
        subject = "sample" if len(work.numbers) == 1 else "samples"
        return f"{subject} {ranges_text(work.numbers)} of {work.data[:_SHOWN_DIGITS]}..."

    def _given_up(self, data: str, number: int) -> str:
        suspect = self._suspects[data, number]
        return suspect.end if suspect.num_ends >= _MAX_ENDS else ""

    def _read_ends(self) -> None:
        """Count what was appended since the last call."""
        new = os.pread(self._ends, os.fstat(self._ends).st_size - self._num_bytes, self._num_bytes)
        self._num_bytes += len(new)
        for line in new.splitlines():
            self._count(_Work.decode(line))

    def _count(self, work: _Work) -> None:
        for number in work.numbers:
            sample = (work.data, number)
            before = self._suspects.get(sample, _UNKNOWN)
            if not work.end:
                self._suspects.pop(sample, None)
            elif len(work.numbers) > 1:
                self._suspects[sample] = before
            elif work.num_ends >= before.num_ends:
                # otherwise another producer ended at it at the same time, which is one end
                self._suspects[sample] = _Suspect(work.num_ends + 1, work.end)

    def _append(self, work: _Work) -> None:
        # one write, so a reader sees whole lines
        os.write(self._ends, work.encode() + b"\n")

    def _clear(self) -> None:
        os.ftruncate(self._note, 0)
