"""Concurrent requests: results in order, errors of a request, and a machine without threads."""

from __future__ import annotations

import threading

import pytest

from megatrain.data.side_by_side import side_by_side


def test_requests_have_their_results_in_order() -> None:
    meeting = threading.Barrier(3)

    def request(item: int) -> int:
        meeting.wait()  # Each request needs the others to run.
        return item * item

    assert side_by_side(request, [3, 1, 2]) == [9, 1, 4]
    assert side_by_side(abs, [-4]) == [4]
    assert side_by_side(abs, []) == []


def test_requests_that_fail_are_not_repeated() -> None:
    called: list[int] = []

    def request(item: int) -> int:
        called.append(item)
        raise RuntimeError(f"request {item} failed")

    with pytest.raises(RuntimeError, match="request 1 failed"):
        side_by_side(request, [1, 2])
    assert sorted(called) == [1, 2]


def test_requests_run_one_by_one_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert side_by_side(abs, [-1, -2, -3]) == [1, 2, 3]
