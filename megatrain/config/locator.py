"""The line of each key of a TOML file, which the standard library's parser does not report.

The scanner walks over text that `tomllib` has accepted, so it only has to find where keys, strings, comments, arrays
and inline tables begin and end; it reports no mistakes.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping

from megatrain.config.tables import numbered_name

Path = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_HEADER_OPENING = re.compile(r"[\[ \t]+")
_HEADER_CLOSING = re.compile(r"[ \t\]]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\]|\\.)*"'
    r"|'[^']*'",
    re.DOTALL,
)


def key_lines(text: str) -> Mapping[Path, int]:
    """Return the line, counted from 1, on which each key and each table of valid TOML first appears.

    The tables of a top-level array, [[name]], are named as by `split_arrays`: name, name-2 and so on.
    """
    scanner = _Scanner(text)
    scanner.scan_document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.lines: dict[Path, int] = {}
        self._num_tables: Counter[str] = Counter()

    def scan_document(self) -> None:
        prefix: Path = ()
        self._take(_BLANK)
        while self._at < len(self._text):
            start = self._at
            if self._next() == "[":
                prefix = self._scan_header()
            else:
                self._scan_pair(prefix)
            self._take(_BLANK)
            assert self._at > start, f"the key locator is stuck at character {start}"

    def _scan_header(self) -> Path:
        start = self._at
        is_of_array = self._take(_HEADER_OPENING).count("[") > 1
        path = self._scan_key()
        if is_of_array and len(path) == 1:
            self._num_tables[path[0]] += 1
            path = (numbered_name(path[0], self._num_tables[path[0]]),)
        self._record((), path, start)
        self._take(_HEADER_CLOSING)
        return path

    def _scan_pair(self, prefix: Path) -> None:
        start = self._at
        path = self._scan_key()
        self._record(prefix, path, start)
        self._take(_EQUALS)
        self._scan_value(prefix + path)

    def _scan_key(self) -> Path:
        parts = [self._scan_key_part()]
        while self._take(_DOT):
            parts.append(self._scan_key_part())
        return tuple(parts)

    def _scan_key_part(self) -> str:
        if self._next() in "\"'":
            # The standard library resolves the escapes of a quoted key.
            return str(tomllib.loads(f"key = {self._take(_STRING)}")["key"])
        return self._take(_BARE_KEY)

    def _scan_value(self, path: Path) -> None:
        opening = self._next()
        if opening in "\"'":
            self._take(_STRING)
        elif opening in "[{":
            self._scan_group(path, is_table=opening == "{")
        else:
            self._take(_SCALAR)

    def _scan_group(self, path: Path, *, is_table: bool) -> None:
        """Skip an array or an inline table; keys of inline tables are recorded."""
        self._at += 1
        self._take(_BLANK)
        while self._next() not in "]}":
            if is_table:
                self._scan_pair(path)
            else:
                self._scan_value(path)
            self._take(_BLANK)
            if self._next() == ",":
                self._at += 1
                self._take(_BLANK)
        self._at += 1

    def _record(self, prefix: Path, path: Path, start: int) -> None:
        line = self._text.count("\n", 0, start) + 1
        for length in range(1, len(path) + 1):
            self.lines.setdefault(prefix + path[:length], line)

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match.group()
