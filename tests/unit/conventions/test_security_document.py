"""docs/security.md: the tests that it names exist, so each guarantee has its test."""

from __future__ import annotations

import re

from tests.helpers.source_tree import ROOT

PAGE = ROOT / "docs" / "security.md"
_NAMED = re.compile(r"`(?P<file>tests/[\w/]+\.py)?(::(?P<name>test_\w+))?`")


def named_tests() -> list[tuple[str, str]]:
    """Return (file, function) of each named test; a function without a file belongs to the previous file."""
    found: list[tuple[str, str]] = []
    for match in _NAMED.finditer(PAGE.read_text()):
        if match["file"] or match["name"]:
            found.append((match["file"] or found[-1][0], match["name"] or ""))
    return found


def test_the_tests_that_are_named_exist() -> None:
    named = named_tests()
    assert len(named) > 30
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_socket_and_file_names_its_test_or_none() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line.count(" | ") in (3, 4)]
    for row in rows:
        if not row.startswith(("| socket", "| file", "| who")):
            assert "`tests/" in row or "out of scope" in row, row
