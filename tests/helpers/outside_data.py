"""Real data outside the repository: its location, and a line at the end of the run if it is absent.

No machine must have it, so MEGATRAIN_REQUIRE fails no test without it. Its absence would be easy to overlook, so the
run ends with a section that names the skipped tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.source_tree import ROOT

_ABSENT = "data outside the repository is absent: "


def outside_data(variable: str, default: str, what: str) -> Path:
    """Return the location of `what`: the path in the environment variable, else `default` beside the repository.

    Skips the test (or the module's tests) where it is absent.
    """
    path = Path(os.environ.get(variable, ROOT.parent / default))
    if not path.exists():
        pytest.skip(f"{_ABSENT}{what} ({variable} names its place, now {path})")
    return path


def absent_data(skipped: Sequence[pytest.TestReport]) -> list[str]:
    """Return a line for each part that skipped tests because such data is absent."""
    reasons = [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]
    found = [reason.partition(_ABSENT)[2] for reason in reasons if _ABSENT in reason]
    return [f"{part}: {found.count(part)} of the tests did not run" for part in sorted(set(found))]
