"""Launched jobs that several tests use one after another: starting a job costs more than most faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from megatrain.contracts.closable import Closable

JobType = TypeVar("JobType")


class SharedJobs(Closable):
    """Has one job at a time. `make_directory` returns a directory for each."""

    def __init__(self, make_directory: Callable[[], Path]) -> None:
        self._make_directory = make_directory
        self._stack = ExitStack()
        self._kind = ""
        self._job: Any = None

    @contextmanager
    def borrowed(
        self, kind: str, launch: Callable[[Path], AbstractContextManager[JobType]], *, is_spent: bool = False
    ) -> Iterator[JobType]:
        """Yield a job of that kind that the previous test left intact, else launch one.

        After an exception, or if the block spends the job, the next test gets another one.
        """
        if self._job is None or kind != self._kind:
            self.close()
            self._job, self._kind = self._stack.enter_context(launch(self._make_directory())), kind
        try:
            yield self._job
        except BaseException as error:
            # The job's own context receives the exception too, and skips its checks.
            self._job = None
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        if is_spent:
            self.close()

    def close(self) -> None:
        """End the job, if there is one."""
        self._job = None
        self._stack.close()
