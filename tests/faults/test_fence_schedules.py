"""The model of fencing over many more schedules than `make test` has time for."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.unit.launcher.test_fence_model import Fencing, TestFencing

NUM_SCHEDULES = 2000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class ManySchedules(Fencing):
    """As `Fencing`: another name begins elsewhere among the schedules."""


ManySchedules.TestCase.settings = settings(TestFencing.settings, max_examples=NUM_SCHEDULES)
TestManySchedules = ManySchedules.TestCase
del TestFencing
