"""At which pictures producers have ended: files in memory that outlive a producer, so that the picture becomes known.

A producer notes the pictures of a request before it works on them. If a signal kills it during this work, the program
that restarts it adds the end to a list that all its producers read; from then on, they work on each of these pictures
alone. A picture is given up when producers have ended at it alone twice in a row; a success in between clears the
count. So a single kill by something else costs no picture; two kills in a row at the same picture alone do. If the
decoder crashes at the same pictures each time, these are given up, whichever producers work on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from megatrain.contracts.errors import DataError
from megatrain.data.pictures.protocol import REQUEST_PICTURES
from megatrain.formatting import ranges_text
from megatrain.programs.supervisor import WorkAtEnd

_MAX_ENDS = 2
_MAX_ENDS_IN_A_ROW = 1 + _MAX_ENDS * REQUEST_PICTURES
"""The most ends in a row, without a result, that pictures can explain: one at a whole request, then two at each of its
pictures alone. After more, the decoder is at fault."""
_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class PicturePart:
    """Samples that a producer works on together. given_up: how producers ended at the only sample, which is not tried
    again; empty: the samples are tried."""

    numbers: tuple[int, ...]
    given_up: str = ""


@dataclass(frozen=True, slots=True)
class _Work:
    """Samples that a producer worked on. num_ends: the known ends at it, if it is one sample. is_first: the producer
    had finished no work before. end: how the producer ended there; empty: it did not."""

    data: str
    numbers: tuple[int, ...]
    num_ends: int
    is_first: bool
    end: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> _Work:
        """Raises: ValueError, KeyError or TypeError when the content is not whole."""
        values = json.loads(content)
        numbers = tuple(int(number) for number in values["numbers"])
        return cls(str(values["data"]), numbers, int(values["num_ends"]), bool(values["is_first"]), str(values["end"]))


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
        self._has_finished = False
        self._num_ends_in_a_row = 0
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
        """Note samples during the block. If a signal kills the process in the block, it has ended at them."""
        suspect = self._suspects.get((data, numbers[0])) if len(numbers) == 1 else None
        work = _Work(data, numbers, (suspect or _UNKNOWN).num_ends, not self._has_finished)
        os.pwrite(self._note, work.encode(), 0)
        try:
            yield
        except DataError:
            self._finish()  # it is an answer: the producer goes on
            raise
        self._finish()
        if suspect is not None:
            self._append(work)

    def add_end(self, code: int, end: str) -> WorkAtEnd | None:
        """Add the end of the producer if a signal killed it while it worked on samples. For a supervisor.

        code: negative for a signal. end: as the end of a sentence about the process. Returns the samples.
        """
        content = os.pread(self._note, os.fstat(self._note).st_size, 0)
        self._clear()
        if code >= 0:  # an error of the program: its text explains more than the samples, and restarts need pauses
            return None
        try:
            work = replace(_Work.decode(content), end=end)
        except (ValueError, KeyError, TypeError):  # it had no work, or was killed while it noted the samples
            return None
        self._append(work)
        self._num_ends_in_a_row = self._num_ends_in_a_row + 1 if work.is_first else 1
        subject = "sample" if len(work.numbers) == 1 else "samples"
        text = f"{subject} {ranges_text(work.numbers)} of {work.data[:_SHOWN_DIGITS]}..."
        return WorkAtEnd(text, self._num_ends_in_a_row, self._num_ends_in_a_row > _MAX_ENDS_IN_A_ROW)

    def _given_up(self, data: str, number: int) -> str:
        suspect = self._suspects[data, number]
        return suspect.end if suspect.num_ends >= _MAX_ENDS else ""

    def _read_ends(self) -> None:
        """Count what was appended since the last call."""
        new = os.pread(self._ends, os.fstat(self._ends).st_size - self._num_bytes, self._num_bytes)
        # the file grows page by page during a write: the rest of the last line may follow later
        num_whole = new.rfind(b"\n") + 1
        self._num_bytes += num_whole
        for line in new[:num_whole].split(b"\n"):
            with suppress(ValueError, KeyError, TypeError):  # blank, or cut off because its writer was killed
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
                # otherwise another producer ended at it at the same time: both count as one end
                self._suspects[sample] = _Suspect(work.num_ends + 1, work.end)

    def _append(self, work: _Work) -> None:
        # the first newline ends what a process that was killed in its write has left
        os.write(self._ends, b"\n" + work.encode() + b"\n")

    def _finish(self) -> None:
        self._has_finished = True
        self._clear()

    def _clear(self) -> None:
        os.ftruncate(self._note, 0)
