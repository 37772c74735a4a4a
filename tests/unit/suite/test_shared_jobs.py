"""One job for several tests, and the tests that stay together in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.shared_jobs import SharedJobs
from tests.helpers.side_by_side import SHARED_JOBS, next_scope, scope_of
from tests.helpers.source_tree import ROOT


class Launches:
    """Jobs that are numbers, and the end of each of them."""

    def __init__(self) -> None:
        self.ends: dict[int, str] = {}
        self.shared = SharedJobs(lambda: Path(str(len(self.ends))))

    @contextmanager
    def launch(self, root: Path) -> Iterator[int]:
        number = int(root.name)
        self.ends[number] = "runs"
        try:
            yield number
            self.ends[number] = "in order"
        except ValueError as error:
            self.ends[number] = str(error)
            raise

    def use(self, kind: str = "one", *, is_spent: bool = False) -> int:
        with self.shared.borrowed(kind, self.launch, is_spent=is_spent) as number:
            return number

    def fail(self) -> None:
        with self.shared.borrowed("one", self.launch):
            raise ValueError("a failed check")


def test_tests_of_one_kind_share_a_job_until_the_end() -> None:
    launches = Launches()

    with launches.shared:
        assert [launches.use(), launches.use()] == [0, 0]
        assert launches.ends == {0: "runs"}

    assert launches.ends == {0: "in order"}


def test_failed_test_ends_its_job_and_the_next_has_another() -> None:
    launches = Launches()

    with launches.shared:
        launches.use()
        with pytest.raises(ValueError, match="a failed check"):
            launches.fail()
        assert launches.ends == {0: "a failed check"}
        assert launches.use() == 1


def test_job_of_another_kind_or_a_spent_one_is_not_shared() -> None:
    launches = Launches()

    with launches.shared:
        assert [launches.use(), launches.use("other"), launches.use("other", is_spent=True)] == [0, 1, 1]
        assert launches.ends == {0: "in order", 1: "in order"}
        assert launches.use("other") == 2


RANKS, MORE_RANKS = "tests/dist/test_overlap.py", "tests/dist/test_resume.py"
FORKS = "tests/unit/checkpoint/test_writer.py"
PLAIN, OTHER = "tests/unit/suite/test_shared_jobs.py", "tests/unit/suite/test_stages.py"


def scopes(pattern: str) -> Counter[str]:
    return Counter(scope_of(f"{path.relative_to(ROOT)}::test") for path in ROOT.glob(pattern))


def test_conventions_stay_together_and_others_do_not() -> None:
    assert len(scopes("tests/unit/conventions/test_*.py")) == 1
    for pattern in ("tests/unit/suite/test_*.py", "tests/dist/test_*.py"):
        assert set(scopes(pattern).values()) == {1}
    assert scope_of(f"{PLAIN}::test_one") == scope_of(f"{PLAIN}::test_two[case]") == PLAIN


def test_ranks_and_forks_are_run_by_one_process_at_first() -> None:
    waiting = [PLAIN, MORE_RANKS, FORKS, OTHER]
    # the process that has them, then another one, then any while none has them
    assert next_scope(waiting, own=[PLAIN, RANKS], of_others=[]) == MORE_RANKS
    assert next_scope(waiting[2:], own=[RANKS], of_others=[OTHER]) == FORKS
    assert next_scope([OTHER], own=[RANKS], of_others=[]) == OTHER
    assert next_scope(waiting[1:], own=[PLAIN], of_others=[RANKS]) == OTHER
    assert next_scope([MORE_RANKS, FORKS], own=[PLAIN], of_others=[RANKS]) == MORE_RANKS
    assert next_scope(waiting[1:], own=[], of_others=[PLAIN]) == MORE_RANKS


def test_transformers_are_loaded_by_one_process_at_first() -> None:
    first, second = "tests/unit/hf/test_hf_export.py", "tests/unit/model/test_frequencies.py"
    assert next_scope([OTHER, second], own=[first], of_others=[]) == second
    assert next_scope([second, OTHER], own=[], of_others=[first]) == OTHER
    assert next_scope([second], own=[], of_others=[first]) == second
    assert next_scope([MORE_RANKS, second, OTHER], own=[], of_others=[first, RANKS]) == OTHER


def test_launched_jobs_are_run_by_every_process() -> None:
    jobs = ["tests/faults/ranks/test_killed_rank.py::test_one", SHARED_JOBS[0]]
    assert next_scope(jobs, own=[], of_others=jobs) == jobs[0]


def test_tests_of_launched_jobs_stay_together_if_they_share_one() -> None:
    files = [path for path in ROOT.glob("tests/faults/*/test_*.py") if "shared_jobs" in path.read_text()]

    assert sorted(str(path.relative_to(ROOT)) for path in files) == sorted(SHARED_JOBS)
    assert scope_of(f"{SHARED_JOBS[0]}::test_one") == scope_of(f"{SHARED_JOBS[0]}::test_two")
    other = "tests/faults/ranks/test_rank_faults.py"
    assert scope_of(f"{other}::test_one") != scope_of(f"{other}::test_two")
