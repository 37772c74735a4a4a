"""A corpus: the documents of files, of folders, or of the running Python's own standard library, in a fixed order.

A document's identity is the number of its input, its path inside that input and its record number, never an absolute
path. So the same folder gives the same shuffle and the same split at any location. Documents stream: a `Corpus` only
has the list of its files, and can be read any number of times.
"""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.data.formats import read_jsonl, read_parquet, read_txt, unreadable

PYTHON_STDLIB = "python-stdlib"
"""The name of the input for the running interpreter's own library, which is real text on every machine."""

_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
_KNOWN_KINDS = ", ".join(_READERS)
_INSTALLED_OR_COMPILED = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """One text. `name` and `record` identify it within its corpus."""

    name: str
    record: int
    text: str
    num_bytes: int
    """Length of the text in UTF-8."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus, its name inside the corpus, and the reader of its format."""

    path: Path
    name: str
    read: Callable[[Path, str], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files behind a list of inputs."""

    inputs: tuple[str, ...]
    files: tuple[SourceFile, ...]
    text_key: str

    def documents(self, skipped: Counter[str] | None = None) -> Iterator[CorpusDocument]:
        """Yield every document that has text, in order; count the others in `skipped`, by reason.

        Raises: DataError naming the file and line or row that cannot be used.
        """
        skipped = Counter() if skipped is None else skipped
        for file in self.files:
            num_records = 0
            for text in file.read(file.path, self.text_key):
                if text:
                    yield CorpusDocument(file.name, num_records, text, len(text.encode("utf-8")))
                else:
                    skipped["empty records"] += 1
                num_records += 1
            if num_records == 0:
                skipped["library files without UTF-8 text"] += 1


def open_corpus(inputs: Sequence[str], text_key: str = "text") -> Corpus:
    """Return the corpus of `inputs`: .txt, .jsonl and .parquet files, folders of them, or `python-stdlib`.

    Raises: DataError when an input does not exist, is of another kind, or a folder holds no file of a known kind.
    """
    files: list[SourceFile] = []
    for number, source in enumerate(inputs):
        found = _stdlib_files() if source == PYTHON_STDLIB else _input_files(Path(source))
        files += (SourceFile(path, f"{number}/{name}", read) for path, name, read in found)
    if not files:
        raise DataError(f"no input was given; name files, folders or {PYTHON_STDLIB}")
    return Corpus(tuple(inputs), tuple(files), text_key)


_Found = tuple[Path, str, Callable[[Path, str], Iterator[str]]]


def _input_files(source: Path) -> list[_Found]:
    if not source.is_dir():
        if not source.exists():
            raise DataError(f"{source}: no such file or folder; give {_KNOWN_KINDS} files, folders or {PYTHON_STDLIB}")
        if source.suffix not in _READERS:
            kind = source.suffix or "no suffix"
            raise DataError(f"{source}: unknown kind of file ({kind}); use {_KNOWN_KINDS}")
        return [(source, source.name, _READERS[source.suffix])]
    paths = [path for path in _walk(source) if path.suffix in _READERS]
    if not paths:
        raise DataError(f"{source}: no documents: the folder holds no {_KNOWN_KINDS} file")
    return [(path, path.relative_to(source).as_posix(), _READERS[path.suffix]) for path in paths]


def _stdlib_files() -> list[_Found]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root) if path.suffix == ".py"]
    if not paths:
        raise DataError(f"{root}: no documents: this Python keeps no .py files of its library; give text files instead")
    return [(path, path.relative_to(root).as_posix(), _read_library_file) for path in paths]


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files under `root` in the order of their names, so that the order is the same on every file system."""

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in _INSTALLED_OR_COMPILED)
        for name in sorted(names):
            yield Path(folder, name)


def _read_library_file(path: Path, text_key: str) -> Iterator[str]:
    """Yield the file's text; nothing for the library's empty files and its test data in other encodings."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError:
        return
    if text.strip():
        yield text
