"""One job for several tests: which tests share a job, and what a failing test leaves to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.shared_jobs import SharedJobs


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
