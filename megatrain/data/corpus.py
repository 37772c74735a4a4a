"""A corpus: the documents of files, of folders, or of the running Python's own standard library, in a fixed order.

A document's identity is the number of its input, its path inside that input and its record number, never an absolute
path. So the same folder gives the same shuffle and the same split at any location. Documents stream: a `Corpus` only
has the list of its files, and can be read any number of times.
"""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.compression import COMPRESSIONS, unreadable
from megatrain.contracts.errors import DataError
from megatrain.data.formats import read_json, read_jsonl, read_parquet, read_txt

PYTHON_STDLIB = "python-stdlib"
"""The name of the input for the running interpreter's own library, which is real text on every machine."""

_Reader = Callable[[Path, str], Iterator[str]]
_READERS: dict[str, _Reader] = {
    ".txt": read_txt,
    ".text": read_txt,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".parq": read_parquet,
    ".pq": read_parquet,
}
KNOWN_KINDS = f"{', '.join(_READERS)}; the ones of text also as {', '.join(COMPRESSIONS)}"
_INSTALLED_OR_COMPILED = ("site-packages", "dist-packages", "__pycache__")
_NUM_EXAMPLES = 3


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
    """The files behind a list of inputs. `left_out`: the files of folders that are not read, by reason."""

    inputs: tuple[str, ...]
    files: tuple[SourceFile, ...]
    text_key: str
    left_out: Mapping[str, Sequence[Path]]

    def documents(self, skipped: Counter[str] | None = None) -> Iterator[CorpusDocument]:
        """Yield every document that has text, in order; count in `skipped`, by reason, the others and files left out.

        Raises: DataError naming the file and line or row that cannot be used.
        """
        skipped = Counter() if skipped is None else skipped
        skipped.update({reason: len(paths) for reason, paths in self.left_out.items()})
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

    def check_complete(self) -> None:
        """Raise DataError naming files that are left out, if there are any."""
        for reason, paths in self.left_out.items():
            more = f" and {len(paths) - _NUM_EXAMPLES} more" if len(paths) > _NUM_EXAMPLES else ""
            examples = ", ".join(map(str, paths[:_NUM_EXAMPLES]))
            raise DataError(
                f"{examples}{more}: {reason}; known kinds: {KNOWN_KINDS}. Convert or remove them, or build "
                "without --strict"
            )


def open_corpus(inputs: Sequence[str], text_key: str = "text") -> Corpus:
    """Return the corpus of `inputs`: files of known kinds, folders of them, or `python-stdlib`.

    Raises: DataError when an input does not exist, is of another kind, or a folder holds no file of a known kind.
    """
    files: list[SourceFile] = []
    left_out: dict[str, list[Path]] = {}
    for number, source in enumerate(inputs):
        found = _stdlib_files() if source == PYTHON_STDLIB else _input_files(Path(source), left_out)
        files += (SourceFile(path, f"{number}/{name}", read) for path, name, read in found)
    if not files:
        raise DataError(f"no input was given; name files, folders or {PYTHON_STDLIB}")
    return Corpus(tuple(inputs), tuple(files), text_key, left_out)


_Found = tuple[Path, str, _Reader]


def _reader_of(path: Path) -> _Reader | None:
    """Return the reader of a file by its suffixes, in whatever case; None for a file of another kind."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if not suffixes or suffixes[-1] not in COMPRESSIONS:
        return _READERS.get(suffixes[-1]) if suffixes else None
    reader = _READERS.get(suffixes[-2]) if len(suffixes) > 1 else None
    return None if reader is read_parquet else reader


def _input_files(source: Path, left_out: dict[str, list[Path]]) -> list[_Found]:
    if not source.is_dir():
        if not source.exists():
            raise DataError(f"{source}: no such file or folder; give files ({KNOWN_KINDS}), folders or {PYTHON_STDLIB}")
        reader = _reader_of(source)
        if reader is None:
            kind = "".join(source.suffixes[-2:]) or "no suffix"
            raise DataError(f"{source}: unknown kind of file ({kind}); use {KNOWN_KINDS}")
        return [(source, source.name, reader)]
    found: list[_Found] = []
    for path in _walk(source, left_out):
        reader = _reader_of(path)
        if reader is not None:
            found.append((path, path.relative_to(source).as_posix(), reader))
        else:
            kind = path.suffix.lower() or "no suffix"
            left_out.setdefault(f"files of another kind ({kind})", []).append(path)
    if not found:
        raise DataError(f"{source}: no documents: the folder holds no file of a known kind: {KNOWN_KINDS}")
    return found


def _stdlib_files() -> list[_Found]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, {}, _INSTALLED_OR_COMPILED) if path.suffix == ".py"]
    if not paths:
        raise DataError(f"{root}: no documents: this Python keeps no .py files of its library; give text files instead")
    return [(path, path.relative_to(root).as_posix(), _read_library_file) for path in paths]


def _walk(root: Path, left_out: dict[str, list[Path]], without: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the files under `root` in the order of their names, so that the order is the same on every file system.

    Links to folders are followed, except to one that is read already, so that no document comes twice and no ring of
    links is endless. Folders named in `without` are left out.
    """
    entered = {os.path.realpath(root)}

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        chosen = []
        # a folder before a link to it, so that it is read under its own name
        for name in sorted(subfolders, key=lambda name: (Path(folder, name).is_symlink(), name)):
            path = Path(folder, name)
            if name in without:
                continue
            if os.path.realpath(path) in entered:
                left_out.setdefault("folders that are read already", []).append(path)
                continue
            entered.add(os.path.realpath(path))
            chosen.append(name)
        subfolders[:] = sorted(chosen)
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
