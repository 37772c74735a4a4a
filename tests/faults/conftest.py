"""Fixtures of the tests that break launched jobs."""

from __future__ import annotations

import pytest

from tests.helpers.recovery_checks import running_job


@pytest.fixture(scope="session")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of every step of the launched job that nothing happens to."""
    with running_job(tmp_path_factory.mktemp("undisturbed"), pace_s=0.0) as running:
        assert running.finish() == 0
        assert running.view.incidents() == []
        losses = running.launched.losses()
        running.check_nothing_left()
    return losses
