"""Which tests stay together in one process."""

from __future__ import annotations

from collections import Counter

from tests.helpers.side_by_side import SHARED_JOBS, scope_of
from tests.helpers.source_tree import ROOT


def scopes(pattern: str) -> Counter[str]:
    return Counter(scope_of(f"{path.relative_to(ROOT)}::test") for path in ROOT.glob(pattern))


def test_ranks_and_conventions_stay_together_and_others_do_not() -> None:
    assert len(scopes("tests/dist/test_*.py")) == 1
    assert scope_of("tests/unit/checkpoint/test_writer.py::test_one") in scopes("tests/dist/test_*.py")
    assert len(scopes("tests/unit/conventions/test_*.py")) == 1
    assert scope_of("tests/unit/model/test_frequencies.py::test_one") in scopes("tests/unit/hf/test_hf_export.py")
    assert set(scopes("tests/unit/suite/test_*.py").values()) == {1}
    file = "tests/unit/suite/test_side_by_side.py"
    assert scope_of(f"{file}::test_one") == scope_of(f"{file}::test_two[case]") == file


def test_tests_of_launched_jobs_stay_together_if_they_share_one() -> None:
    files = [path for path in ROOT.glob("tests/faults/*/test_*.py") if "shared_jobs" in path.read_text()]

    assert sorted(str(path.relative_to(ROOT)) for path in files) == sorted(SHARED_JOBS)
    assert scope_of(f"{SHARED_JOBS[0]}::test_one") == scope_of(f"{SHARED_JOBS[0]}::test_two")
    other = "tests/faults/ranks/test_rank_faults.py"
    assert scope_of(f"{other}::test_one") != scope_of(f"{other}::test_two")
