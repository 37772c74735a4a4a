"""Batches that wait on a host: order, limits, the spool, and that every lost batch is counted."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_diagnostics.wire.outbox import Outbox
from megatrain_diagnostics.wire.spool import Spool

WINDOW = 10_000


def put(outbox: Outbox, *sizes: int) -> None:
    for size in sizes:
        outbox.put("spans", 1, 5, pa.py_buffer(bytes(size)))


def take_all(outbox: Outbox, window: int = WINDOW) -> list[int]:
    numbers = []
    while (batch := outbox.take(0.0, window)) is not None:
        numbers.append(batch.number)
    return numbers


def test_batches_are_sent_until_they_are_acknowledged() -> None:
    outbox = Outbox(1000)
    put(outbox, 10, 10, 10)
    assert take_all(outbox) == [0, 1, 2]
    outbox.acknowledge(0)
    outbox.rewind()
    put(outbox, 10)
    assert take_all(outbox) == [1, 2, 3]
    outbox.acknowledge(3)
    outbox.rewind()
    assert take_all(outbox) == []
    state = outbox.state()
    assert (state.num_batches, state.memory_bytes, state.in_flight_bytes, state.acknowledged_rows) == (0, 0, 0, 4)


def test_batches_in_flight_stay_within_the_window() -> None:
    outbox = Outbox(1000)
    put(outbox, 60, 60, 300)
    assert take_all(outbox, 100) == [0]
    outbox.acknowledge(0)
    assert take_all(outbox, 100) == [1]
    outbox.acknowledge(1)
    assert take_all(outbox, 100) == [2]


def test_without_a_spool_the_oldest_is_dropped_and_counted() -> None:
    outbox = Outbox(100)
    put(outbox, 60, 60, 30)
    assert take_all(outbox) == [1, 2]
    state = outbox.state()
    assert (state.dropped_rows, state.num_batches) == (1, 2)
    outbox = Outbox(100)
    put(outbox, 90)
    assert take_all(outbox) == [0]
    put(outbox, 90)
    assert outbox.state().dropped_rows == 0, "a batch in flight is not dropped"


def test_the_spool_takes_the_oldest_and_gives_it_back_first(tmp_path: Path) -> None:
    outbox = Outbox(100, Spool(tmp_path), 10_000)
    put(outbox, 60, 61, 62)
    assert outbox.wait_for_spill(0.0)
    outbox.spill()
    state = outbox.state()
    assert (state.memory_bytes, state.spooled_bytes) == (62, 121)
    assert [path.stat().st_size for path in sorted(tmp_path.iterdir())] == [60, 61]
    assert take_all(outbox) == [0, 1, 2]
    outbox.acknowledge(2)
    assert list(tmp_path.iterdir()) == []
    assert outbox.state().spooled_bytes == 0


def test_a_full_spool_drops_its_oldest(tmp_path: Path) -> None:
    outbox = Outbox(10, Spool(tmp_path), 100)
    put(outbox, 60)
    outbox.spill()
    put(outbox, 61)
    outbox.spill()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [61]
    assert outbox.state().dropped_rows == 1
    assert take_all(outbox) == [1]


def test_restarted_outbox_takes_up_spooled_batches(tmp_path: Path) -> None:
    first = Outbox(50, Spool(tmp_path), 1000)
    put(first, 20, 21)
    first.spill(keep_bytes=0)
    (tmp_path / ".half.0123abcd.tmp").write_bytes(b"half a batch")
    (tmp_path / "foreign.txt").write_text("not ours")
    second = Outbox(1000, Spool(tmp_path), 1000)
    put(second, 22)
    batches = [second.take(0.0, WINDOW) for _ in range(3)]
    assert [batch.num_bytes for batch in batches if batch is not None] == [20, 21, 22]
    assert {path.name for path in tmp_path.iterdir()} >= {"foreign.txt"}
    assert not (tmp_path / ".half.0123abcd.tmp").exists()


def test_full_disk_costs_only_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox(10, Spool(tmp_path), 1000)

    def no_space(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    put(outbox, 8, 9)
    with pytest.raises(OSError, match="No space left"):
        outbox.spill()
    assert outbox.state().dropped_rows == 1
    assert list(tmp_path.iterdir()) == []
    assert take_all(outbox) == [1]


def test_vanished_spool_file_is_counted(tmp_path: Path) -> None:
    outbox = Outbox(50, Spool(tmp_path), 1000)
    put(outbox, 20, 21)
    outbox.spill(keep_bytes=0)
    sorted(tmp_path.iterdir())[0].unlink()
    assert outbox.take(0.0, WINDOW) is None
    assert take_all(outbox) == [1]
    assert outbox.state().dropped_rows == 1
    assert outbox.state().in_flight_bytes == 21


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 60)),
        st.tuples(st.sampled_from(["take", "spill", "rewind"]), st.just(0)),
        st.tuples(st.just("acknowledge"), st.integers(0, 40)),
    ),
    max_size=60,
)


@settings(max_examples=50)
@given(STEPS)
def test_every_batch_is_acknowledged_dropped_or_still_there(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        outbox = Outbox(20, Spool(Path(directory)), 150)
        num_put = sent_through = 0
        for step, value in steps:
            if step == "put":
                put(outbox, value)
                num_put += 1
            elif step == "take" and (batch := outbox.take(0.0, 120)) is not None:
                sent_through = max(sent_through, batch.number + 1)
            elif step == "spill":
                outbox.spill()
            elif step == "rewind":
                outbox.rewind()
            elif step == "acknowledge" and value < sent_through:
                outbox.acknowledge(value)
            state = outbox.state()
            assert state.acknowledged_rows + state.dropped_rows + state.num_batches == num_put
            # batches in flight return to memory after a rewind, until the next batch or the spool frees space
            assert 0 <= state.memory_bytes <= 160 + 120
            assert 0 <= state.spooled_bytes <= 150
            assert state.in_flight_bytes >= 0
            on_disk = sum(path.stat().st_size for path in Path(directory).iterdir())
            assert on_disk == state.spooled_bytes
        outbox.rewind()
        rest = take_all(outbox, 10**9)
        assert len(rest) == outbox.state().num_batches
        assert rest == sorted(rest)
        outbox.acknowledge(10**9)
        state = outbox.state()
        assert (state.memory_bytes, state.spooled_bytes, state.in_flight_bytes, state.num_batches) == (0, 0, 0, 0)
