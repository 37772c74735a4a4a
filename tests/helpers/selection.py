"""Selects the tests that `make test` leaves to `make test-all`, and `make test-faults-short` to `make test-faults`.

@pytest.mark.slow                          the whole test
@pytest.mark.slow(kept=["tp2-pp2-dp2"])    all its cases but these, by id
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import pytest


def quick_and_slow(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that `make test` runs, and those that it leaves out.

    Ends the session if a mark keeps a case that does not exist: otherwise no case of that test might be run.
    """
    quick, slow = [], []
    missing: dict[str, set[str]] = defaultdict(set)
    found: dict[str, set[str]] = defaultdict(set)
    for item in items:
        marker = item.get_closest_marker("slow")
        if marker is None:
            quick.append(item)
            continue
        test, _, case = item.nodeid.partition("[")
        kept = marker.kwargs.get("kept", ())
        missing[test] |= set(kept)
        found[test].add(case.removesuffix("]"))
        (quick if case.removesuffix("]") in kept else slow).append(item)
    for test, cases in missing.items():
        if absent := cases - found[test]:
            problem = f"{test}: the mark `slow` keeps {sorted(absent)}, which are no cases of it"
            if capture := items[0].config.pluginmanager.getplugin("capturemanager"):
                capture.suspend_global_capture()  # A worker process shows only what it prints to the terminal itself.
            print(problem, file=sys.stderr, flush=True)
            pytest.exit(problem, returncode=4)
    return quick, slow
