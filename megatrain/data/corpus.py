"""A corpus: the documents of files, of folders, or of the running Python's own standard library, in a fixed order.

A document's identity is the number of its input, its path inside that input and its record number, never an absolute
path. So the same folder gives the same shuffle and the same split at any location. Documents are streamed: a `Corpus`
only has the list of its files, and can be read any number of times, from any record on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain.data.inputs import KNOWN_KINDS, PYTHON_STDLIB, FoundFile, LeftOut, find_files
from megatrain.formatting import names_text

_NUM_EXAMPLES = 4


@dataclass(frozen=True, slots=True)
class CorpusPosition:
    """A position between two records of a corpus: before record `record` of its file `file`."""

    file: int
    record: int


START = CorpusPosition(0, 0)


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """One text. `name` and `record` identify it within its corpus; `file` is the number of its file in the corpus."""

    name: str
    record: int
    text: str
    num_bytes: int
    """Length of the text in UTF-8."""
    file: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files that a list of inputs refers to. `left_out`: files and folders that are not read, by reason."""

    inputs: tuple[str, ...]
    files: tuple[FoundFile, ...]
    text_key: str
    left_out: Mapping[str, Sequence[str]]

    def documents(self, skipped: Counter[str] | None = None, first: CorpusPosition = START) -> Iterator[CorpusDocument]:
        """Yield every document that has text, in order from `first` on.

        `skipped` counts, by reason, the records without text and the library files without UTF-8 text, both from
        `first` on. If `first` is START, it also counts the files and folders that are left out.
        Raises: DataError naming the file and line or row that cannot be used.
        """
        skipped = Counter() if skipped is None else skipped
        if first == START:
            skipped.update({reason: len(paths) for reason, paths in self.left_out.items()})
        for number in range(first.file, len(self.files)):
            found = self.files[number]
            start = first.record if number == first.file else 0
            num_records = 0
            for text in found.read(found.file, self.text_key):
                record = num_records
                num_records += 1
                if record < start:
                    continue
                if text:
                    yield CorpusDocument(found.name, record, text, len(text.encode("utf-8")), number)
                else:
                    skipped["empty records"] += 1
            if num_records == 0:
                skipped["library files without UTF-8 text"] += 1

    def check_complete(self) -> None:
        """Raise DataError if any file is left out; the error names files of the first reason."""
        for reason, paths in self.left_out.items():
            raise DataError(
                f"{names_text(paths, _NUM_EXAMPLES)}: {reason}; known kinds: {KNOWN_KINDS}. Convert or remove them, or "
                "build without --strict"
            )


def open_corpus(inputs: Sequence[str], text_key: str = "text") -> Corpus:
    """Return the corpus of `inputs`: files of known kinds, folders of them, patterns, URLs, or `python-stdlib`.

    Raises: DataError when there is no input, or an input does not exist, cannot be listed, is of another kind, or has
    no file of a known kind.
    """
    files: list[FoundFile] = []
    left_out: LeftOut = {}
    for number, source in enumerate(inputs):
        files += (FoundFile(found.file, f"{number}/{found.name}", found.read) for found in find_files(source, left_out))
    if not files:
        raise DataError(f"no input was given; name files, folders or {PYTHON_STDLIB}")
    return Corpus(tuple(inputs), tuple(files), text_key, left_out)
