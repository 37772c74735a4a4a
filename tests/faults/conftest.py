"""Fixtures of the tests that break launched jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.shared_jobs import SharedJobs
from tests.helpers.undisturbed_run import undisturbed_losses_of


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory that all processes of this run share: under xdist each process has a separate one below it."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory, shared_directory: Path) -> dict[int, float]:
    """The losses of the launched job without a fault, with one rank on each host."""
    return undisturbed_losses_of(1, tmp_path_factory.mktemp("undisturbed"), shared_directory)


@pytest.fixture(scope="module")
def shared_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedJobs]:
    """The job that the tests of a module use one after another. A file that uses it is in `SHARED_JOBS`."""
    with SharedJobs(lambda: tmp_path_factory.mktemp("shared")) as jobs:
        yield jobs
