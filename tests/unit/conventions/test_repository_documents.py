"""Decision records, the security document, and the runner of documents; targets of CI require every part."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.helpers.markdown import anchors, fenced_blocks, link_targets
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

DOCUMENT = """# A `name`, and more

Text with [a link](other.md#part "title") and `[no](link)`.

```console
$ megatrain train a.toml \\
    --train.steps=3
step 1
$ make help
```

<!-- not run: needs 8 GPUs -->

```console
$ torchrun x.py
```

```python
# not a heading
print("[no](link)")
```
"""


def test_fenced_blocks_have_their_commands() -> None:
    console, skipped, python = fenced_blocks(DOCUMENT)

    assert (console.language, console.line, console.skip_reason) == ("console", 5, "")
    assert console.commands == ["megatrain train a.toml --train.steps=3", "make help"]
    assert skipped.skip_reason == "needs 8 GPUs"
    assert (python.language, python.skip_reason) == ("python", "")
    assert python.text.startswith("# not a heading")


def test_reason_belongs_to_the_block_that_follows_it_at_once() -> None:
    text = "<!-- not run: a reason -->\nwords between\n```console\n$ make help\n```\n"
    assert fenced_blocks(text)[0].skip_reason == ""


def test_links_and_anchors_are_found() -> None:
    assert link_targets(DOCUMENT) == ["other.md#part"]
    assert anchors(DOCUMENT) == {"a-name-and-more"}


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


SHOWN = """include Makefile
{target}: stop
.PHONY: stop
stop: ; @echo "[$${{MEGATRAIN_REQUIRE-}}]"; exit 9
"""


@pytest.mark.parametrize(
    ("target", "requirement"), [("gate", "all"), ("ci-nightly", "all"), ("test", ""), ("test-faults-pace", "")]
)
def test_only_the_targets_of_ci_require_all_parts(target: str, requirement: str) -> None:
    """A prerequisite has the variables of its target; this one prints the variable and ends make."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MEGATRAIN_", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", "--no-print-directory", "--old-file=venv", "--file=-", target],
        input=SHOWN.format(target=target), cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (f"[{requirement}]\n", 2), done.stderr
