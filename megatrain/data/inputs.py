"""Find the files of an input: a file, a folder, a pattern, a URL of any of these, or `python-stdlib`.

Each file has a name that does not depend on the location of its input: the path below the folder, or below the part of
a pattern before its first wildcard. The files of a local folder are sorted by name, and come before the files of its
subfolders. All other files, those that match a pattern or are behind a URL, are sorted by their whole path.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.compression import COMPRESSIONS, unreadable
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.url_drivers import driver, reason, split_url
from megatrain.data.columns import read_arrow, read_parquet
from megatrain.data.formats import read_json, read_jsonl, read_txt
from megatrain.data.input_file import InputFile, local_file, url_file

PYTHON_STDLIB = "python-stdlib"
"""The input that stands for the running interpreter's standard library, which is real text on every machine."""

Reader = Callable[[InputFile, str], Iterator[str]]
"""Yields the texts of a file, given the key or column of the text."""
LeftOut = dict[str, list[str]]
"""Files and folders that are not read, by reason."""
_READERS: dict[str, Reader] = {
    ".txt": read_txt,
    ".text": read_txt,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".parq": read_parquet,
    ".pq": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".ipc": read_arrow,
}
KNOWN_KINDS = f"{', '.join(_READERS)}; all of them also as {', '.join(COMPRESSIONS)}"
_INSTALLED_OR_COMPILED = ("site-packages", "dist-packages", "__pycache__")
_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file, its name inside its input, and the reader of its format."""

    file: InputFile
    name: str
    read: Reader


def find_files(source: str, left_out: LeftOut) -> list[FoundFile]:
    """Return the files of one input in order, and add those that are not read to `left_out`.

    Raises: DataError when the input does not exist, cannot be listed, is of another kind, or has no file of a known
    kind.
    """
    if source == PYTHON_STDLIB:
        return _stdlib_files()
    if split_url(source, DataError) is not None:
        return _url_files(source, left_out)
    path = Path(source)
    if path.is_dir():
        listed = ((local_file(file), file.relative_to(path).as_posix()) for file in _walk(path, left_out))
        return _chosen(listed, source, left_out)
    if path.exists():
        return [_named(local_file(path))]
    if _has_wildcard(source):
        root = Path(_before_wildcard(source))
        matches = (Path(match) for match in sorted(glob.glob(source, recursive=True)))
        listed = ((local_file(match), match.relative_to(root).as_posix()) for match in matches if match.is_file())
        return _chosen(listed, source, left_out)
    raise DataError(
        f"{source}: no such file or folder; give files ({KNOWN_KINDS}), folders, patterns, URLs or {PYTHON_STDLIB}"
    )


def reader_of(file: InputFile) -> Reader | None:
    """Return the reader of a file by its suffixes, ignoring case; None for a file of an unknown kind."""
    suffixes = file.suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return _READERS.get(suffixes[-1]) if suffixes else None


def _named(file: InputFile) -> FoundFile:
    """Return a file that is itself the input."""
    reader = reader_of(file)
    if reader is None:
        kind = "".join(file.suffixes[-2:]) or "no suffix"
        raise DataError(f"{file}: unknown kind of file ({kind}); use {KNOWN_KINDS}")
    return FoundFile(file, file.name, reader)


def _chosen(listed: Iterator[tuple[InputFile, str]], source: str, left_out: LeftOut) -> list[FoundFile]:
    """Return the files of a known kind among the listed ones."""
    found = []
    for file, name in listed:
        reader = reader_of(file)
        if reader is not None:
            found.append(FoundFile(file, name, reader))
        else:
            left_out.setdefault(f"files of another kind ({file.suffix or 'no suffix'})", []).append(str(file))
    if not found:
        raise DataError(f"{source}: no documents: no file of a known kind: {KNOWN_KINDS}")
    return found


def _url_files(url: str, left_out: LeftOut) -> list[FoundFile]:
    store = driver(url, DataError)
    try:
        path = str(store._strip_protocol(url))
        if store.isfile(path):
            return [_named(url_file(url, store, path))]
        if _has_wildcard(path):
            root, matches = _before_wildcard(path), store.glob(path)
            paths = [match for match in matches if store.isfile(match)]
        else:
            root, paths = f"{path.rstrip('/')}/", store.find(path)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{url}: cannot be listed: {reason(error)}") from error
    if not paths:
        raise DataError(f"{url}: no such file or folder; give the URL of a file, of a folder, or a pattern")
    return _chosen(((_below(store, file), file.removeprefix(root)) for file in sorted(paths)), url, left_out)


def _below(store: Any, path: str) -> InputFile:
    return url_file(str(store.unstrip_protocol(path)), store, path)


def _stdlib_files() -> list[FoundFile]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, {}, _INSTALLED_OR_COMPILED) if path.suffix == ".py"]
    if not paths:
        raise DataError(f"{root}: no documents: this Python has no .py files of its library; give text files instead")
    return [FoundFile(local_file(path), path.relative_to(root).as_posix(), _read_library_file) for path in paths]


def _has_wildcard(text: str) -> bool:
    return not _WILDCARDS.isdisjoint(text)


def _before_wildcard(pattern: str) -> str:
    """Return the folder before the first part of a pattern that has a wildcard, with a slash; "" for none."""
    first = next(number for number, character in enumerate(pattern) if character in _WILDCARDS)
    return pattern[: pattern.rfind("/", 0, first) + 1]


def _walk(root: Path, left_out: LeftOut, without: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the files of `root` by name, then those of its subfolders by name: the same order on every file system.

    Links to folders are followed, except to a folder that is read already: so no folder is read twice, and a cycle of
    links ends. Folders named in `without` are left out.
    """
    entered = {os.path.realpath(root)}

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        chosen = []
        # a folder comes before links to it, so that it is read under its own name
        for name in sorted(subfolders, key=lambda name: (Path(folder, name).is_symlink(), name)):
            path = Path(folder, name)
            if name in without:
                continue
            if os.path.realpath(path) in entered:
                left_out.setdefault("folders that are read already", []).append(str(path))
                continue
            entered.add(os.path.realpath(path))
            chosen.append(name)
        subfolders[:] = sorted(chosen)
        for name in sorted(names):
            yield Path(folder, name)


def _read_library_file(path: InputFile, text_key: str) -> Iterator[str]:
    """Yield the file's text; nothing for the library's empty files and for its test data in other encodings."""
    try:
        with path.open() as file:
            text = file.read().decode("utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError:
        return
    if text.strip():
        yield text
