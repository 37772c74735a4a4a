"""Real data that is not part of the repository: where it is, and a word at the end of the run when it is absent.

No machine is required to have it, so MEGATRAIN_REQUIRE fails no test without it. That makes its absence easy to
overlook: the run ends with a section that names what was not tested.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.source_tree import ROOT

_ABSENT = "data outside the repository is absent: "


def outside_data(variable: str, default: str, what: str) -> Path:
    """Return where `what` is: the place that the environment variable names, else `default` beside the repository.

    Skips the test (or the module's tests) where it is absent.
    """
    path = Path(os.environ.get(variable, ROOT.parent / default))
    if not path.exists():
        pytest.skip(f"{_ABSENT}{what} ({variable} names its place, now {path})")
    return path


def absent_data(skipped: Sequence[pytest.TestReport]) -> list[str]:
    """Return a line for each part that skipped tests for want of such data."""
    reasons = [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]
    found = [reason.partition(_ABSENT)[2] for reason in reasons if _ABSENT in reason]
    return [f"{part}: {found.count(part)} of the tests did not run" for part in sorted(set(found))]
