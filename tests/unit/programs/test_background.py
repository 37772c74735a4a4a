"""The priority of programs and threads beside training, and the one setting that limits it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.programs.background import NICENESS_VARIABLE, background_niceness, lower_thread_priority
from tests.helpers.refusals import refusal
from tests.helpers.waiting import DEADLINE_S

LOWERED = """
import os
from megatrain.programs.background import lower_process_priority
lower_process_priority(10)
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_the_setting_is_an_upper_limit() -> None:
    limited = {"": 10, "19": 10, "10": 10, "4": 4, "0": 0}
    assert {value: background_niceness(10, {NICENESS_VARIABLE: value}) for value in limited} == limited
    assert background_niceness(10, {}) == 10


def test_anything_but_a_niceness_is_refused() -> None:
    for value in ("20", "-1", "1.5", "low", "\N{SUPERSCRIPT TWO}"):
        reason = refusal(ConfigError, background_niceness, 19, {NICENESS_VARIABLE: value})
        assert f"{NICENESS_VARIABLE}=" in reason, value
        assert "must be a whole number from 0 to 19; unset it" in reason, value


@pytest.mark.slow(kept=["3-3"])
@pytest.mark.parametrize(("value", "lowered"), [("19", 10), ("3", 3), ("0", 0)])
def test_a_program_lowers_its_priority_relative_to_its_parent(value: str, lowered: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOWERED],
        env={**os.environ, NICENESS_VARIABLE: value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + lowered)


@pytest.mark.parametrize(("value", "niceness"), [("19", 19), ("0", None)])
def test_only_the_thread_that_asks_gives_way(monkeypatch: pytest.MonkeyPatch, value: str, niceness: int | None) -> None:
    monkeypatch.setenv(NICENESS_VARIABLE, value)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found: queue.Queue[int] = queue.Queue()

    def ask() -> None:
        lower_thread_priority()
        found.put(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(DEADLINE_S)
    assert found.get_nowait() == (before if niceness is None else niceness)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
