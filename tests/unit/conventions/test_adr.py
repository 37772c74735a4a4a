"""Decision records stay short, have the three parts, and are all in the index."""

from __future__ import annotations

import re

from tests.helpers.source_tree import ROOT

ADR_DIRECTORY = ROOT / "docs" / "adr"
RECORDS = sorted(ADR_DIRECTORY.glob("[0-9]*.md"))
MAX_LINES = 80


def test_records_are_one_page_with_the_three_parts() -> None:
    for path in RECORDS:
        lines = path.read_text().splitlines()
        headings = [line for line in lines if line.startswith("## ")]
        assert len(lines) <= MAX_LINES, path.name
        assert lines[0].startswith(f"# {path.name[:4]}: "), path.name
        assert headings == ["## Context", "## Decision", "## Consequences"], path.name


def test_numbers_are_used_once_and_without_gaps() -> None:
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))


def test_index_lists_every_record() -> None:
    listed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", (ADR_DIRECTORY / "README.md").read_text())
    assert listed == [path.name for path in RECORDS]
