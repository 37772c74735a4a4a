"""A host's streamer on black boxes and logs of this process: the rows that it sends, the problems that it reports."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatrain.telemetry.recorder
import megatrain.telemetry.span_recorder
from megatrain.contracts.black_box.encoding import Word, box_bytes
from megatrain.contracts.black_box.header_encoding import encode_header
from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ClockBase, ControlPage, Identity, read_clock_base
from megatrain.contracts.layout import Layout
from megatrain.fencing.phase_timeouts import PhaseTimeouts
from megatrain.run_files.run_directory import RunDirectory, black_box_path, previous_black_box
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Gpus, LogLines, Ranks, Spans, StepTotals, Values, joined, num_rows
from megatrain_diagnostics.streamer.host_devices import DeviceSource
from megatrain_diagnostics.streamer.rank_tail import HostClock
from megatrain_diagnostics.streamer.settings import StreamerSettings
from megatrain_diagnostics.streamer.silence import HostRanks
from megatrain_diagnostics.streamer.streamer import Streamer
from megatrain_diagnostics.wire.sender import Sender, SenderState
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading
from megatrain_launcher.logs.worker_logs import rank_log_path
from tests.helpers.fixed_daemon import FixedDaemon

PHASE_TIMEOUTS = PhaseTimeouts(
    init_s=30.0, first_step_s=30.0, checkpoint_s=30.0, evaluation_s=30.0, floor_s=30.0, factor=10.0
)
LONG_S = 1000.0
SUMMED = Operation.FORWARD_COMPUTE


@dataclass
class Collected:
    """Replaces the sender."""

    state_now: SenderState
    tables: dict[Any, list[Any]] = field(default_factory=dict)

    def send(self, kind: Any, table: Any) -> None:
        self.tables.setdefault(kind, []).append(table)

    def state(self) -> SenderState:
        return self.state_now

    def all(self, kind: Any) -> Any:
        return joined(kind, self.tables.get(kind, []))


@pytest.fixture(scope="module")
def idle_state() -> SenderState:
    """Return the state of an idle sender."""
    sender = Sender("host-1", FixedDaemon(None), None)
    try:
        return sender.state()
    finally:
        sender.close(0.0)


@dataclass
class StreamedHost:
    """A host whose ranks are this process, with streamers that can be restarted."""

    root: Path
    idle: SenderState
    expected: HostRanks = field(default_factory=lambda: HostRanks(1, range(0), time.monotonic()))
    recorders: list[Recorder] = field(default_factory=list)
    silent: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def settings(self) -> StreamerSettings:
        return StreamerSettings(
            job="demo",
            host="host-1",
            run=str(self.root / "run"),
            host_logs=str(self.root / "logs"),
            black_box_directory=str(self.root / "boxes"),
            spool_bytes=1_000_000,
            phase_timeouts=PHASE_TIMEOUTS,
        )

    def path(self, rank: int, round_number: int = 1) -> Path:
        key = RunDirectory(self.root / "run").key
        return black_box_path(self.root / "boxes", "demo", key, "main", round_number, rank)

    def rank(self, rank: int, host: str = "host-1", pid: int | None = None) -> Recorder:
        identity = Identity("demo", "main", 1, rank, Layout(dp_size=4), pid or os.getpid(), host)
        key = RunDirectory(self.root / "run").key
        recorder = open_recorder(identity, directory=str(self.root / "boxes"), run_key=key, num_records=512)
        self.recorders.append(recorder)
        return recorder

    def streamer(self, devices: DeviceSource | None = None) -> tuple[Streamer, Collected]:
        taken = Collected(self.idle)
        clock = HostClock(read_clock_base())
        return Streamer(self.settings, clock, taken, lambda: self.expected, self.silent.append, devices), taken


@pytest.fixture
def host(tmp_path: Path, idle_state: SenderState) -> Iterator[StreamedHost]:
    (tmp_path / "boxes").mkdir()
    made = StreamedHost(tmp_path, idle_state)
    yield made
    for recorder in made.recorders:
        recorder.close()


def take_steps(recorder: Recorder, steps: range) -> None:
    for step in steps:
        recorder.set_step(step)
        with recorder.span(SUMMED):
            pass
        recorder.complete_step()
        recorder.record_value(StepValue.LOSS, float(step))


def test_rows_and_lines_are_sent_when_many_or_old(host: StreamedHost) -> None:
    first, second = host.rank(0), host.rank(1)
    host.rank(2, host="host-2")
    (host.root / "boxes" / host.path(3).name).write_bytes(b"no black box")
    for rank in (0, 1):
        write_control(host.path(rank), ControlPage(sample_period=5))
    log = rank_log_path(host.root / "logs", 1, 0)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"hello\n")
    streamer, taken = host.streamer()
    take_steps(first, range(3))
    take_steps(second, range(3))
    streamer.poll(now_s=LONG_S)
    assert taken.tables == {}, "neither many nor old rows"
    streamer.poll(now_s=LONG_S + 1.1)
    assert taken.all(Ranks).rank.tolist() == [0, 1], "a machine may be several hosts"
    totals = taken.all(StepTotals)
    assert sorted(zip(totals.rank.tolist(), totals.step.tolist(), strict=True)) == [
        (rank, step) for rank in (0, 1) for step in range(3)
    ]
    assert taken.all(Spans).step.tolist() == [0, 0]
    assert taken.all(LogLines).line.tolist() == ["hello"]
    take_steps(first, range(3, 120))
    streamer.poll(now_s=LONG_S + 1.2)
    assert num_rows(taken.all(Values)) == 6, "fewer than 512 rows, all recent"
    take_steps(second, range(3, 170))
    streamer.poll(now_s=LONG_S + 1.3)
    streamer.poll(now_s=LONG_S + 2.4)
    values = taken.all(Values)
    assert values.value[values.rank == 1].tolist() == [float(step) for step in range(170)]
    reading = streamer.reading()
    assert [(rank.rank, rank.step) for rank in reading.ranks] == [(0, 119), (1, 169)]
    assert reading.rows_sent["values"] == 290
    assert reading.silent_ranks == 0
    streamer.end()


def test_times_are_those_of_the_system_clock(host: StreamedHost) -> None:
    before = time.time_ns()
    take_steps(host.rank(0), range(1))
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    streamer.end()
    tolerance_ns = 50_000_000  # the system's clock may be slewed in between
    for times in (taken.all(Values).at_ns, taken.all(StepTotals).start_ns, taken.all(Spans).start_ns):
        assert ((times > before - tolerance_ns) & (times < time.time_ns() + tolerance_ns)).all()


def test_restarted_streamer_continues_at_its_positions(host: StreamedHost) -> None:
    recorder = host.rank(0)
    take_steps(recorder, range(3))
    open_token = recorder.begin(Operation.CHECKPOINT)
    take_steps(recorder, range(3, 6))
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    streamer.end()
    assert taken.all(Values).step.tolist() == list(range(6))
    recorder.end(open_token)
    take_steps(recorder, range(6, 8))
    again, taken = host.streamer()
    again.poll(LONG_S)
    again.end()
    steps = taken.all(Values).step.tolist()
    assert steps == [3, 4, 5, 6, 7], "from the open span on: repeated records are recognized by their number"
    assert Operation.CHECKPOINT.number in taken.all(Spans).operation
    assert taken.all(Ranks).rank.tolist() == [0]


def test_damaged_positions_only_cost_a_repetition(host: StreamedHost, caplog: pytest.LogCaptureFixture) -> None:
    host.settings.own_directory.mkdir(parents=True)
    (host.settings.own_directory / "positions.json").write_bytes(b'{"schema_version": 1, "boxes": {"x": "y"}}')
    take_steps(host.rank(0), range(2))
    streamer, taken = host.streamer()
    streamer.end()
    assert taken.all(Values).step.tolist() == [0, 1]
    assert "are streamed from their beginning again" in caplog.text


def test_a_rank_that_was_killed_leaves_all_its_newest_spans(host: StreamedHost) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    recorder = host.rank(0, pid=child.pid)
    write_control(host.path(0), ControlPage(sample_period=100))
    take_steps(recorder, range(1, 4))
    recorder.set_step(4)
    recorder.begin(Operation.OPTIMIZER)
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    assert num_rows(taken.all(Spans)) == 0
    child.kill()
    child.wait()
    host.path(0).unlink()  # its executor has copied the file
    streamer.poll(now_s=LONG_S + 1)
    streamer.poll(now_s=LONG_S + 2)
    spans = taken.all(Spans)
    assert spans.step.tolist() == [1, 2, 3, 4]
    assert (spans.operation[spans.duration_ns == -1]).tolist() == [Operation.OPTIMIZER.number]
    reading = streamer.reading()
    assert reading.ranks == ()
    streamer.end()


def test_last_rows_of_an_ended_rank_are_sampled(host: StreamedHost) -> None:
    recorder = host.rank(0)
    write_control(host.path(0), ControlPage(sample_period=3))
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    take_steps(recorder, range(1, 8))
    recorder.close()  # the file is gone before the next poll
    streamer.poll(now_s=LONG_S + 2)
    streamer.end()
    assert taken.all(Values).step.tolist() == list(range(1, 8))
    assert taken.all(Spans).step.tolist() == [3, 6]


def test_silent_ranks_are_named_and_last_spans_are_sent(host: StreamedHost, caplog: pytest.LogCaptureFixture) -> None:
    moving, stuck = host.rank(0), host.rank(1)
    for rank in (0, 1):
        write_control(host.path(rank), ControlPage(sample_period=100))
    take_steps(moving, range(1, 4))
    take_steps(stuck, range(1, 3))
    stuck.set_step(3)
    stuck.begin(Operation.DP_ALL_REDUCE)
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    assert host.silent == []
    now_ns = time.monotonic_ns()
    with pytest.MonkeyPatch.context() as patch:
        # rank 1 did nothing for a minute, in which rank 0 moved
        for module in (time, megatrain.telemetry.recorder, megatrain.telemetry.span_recorder):
            patch.setattr(module, "monotonic_ns", lambda: now_ns + 60_000_000_000)
        take_steps(moving, range(4, 6))
        streamer.poll(now_s=LONG_S + 0.2)
        with caplog.at_level(logging.WARNING):
            streamer.poll(now_s=LONG_S + 1)
            assert host.silent == [], "the machine may have paused: two polls must agree"
            streamer.poll(now_s=LONG_S + 2)
        assert host.silent == [(1,)]
        streamer.poll(now_s=LONG_S + 4)
    assert "rank 1 is silent" in caplog.text
    assert host.silent == [(1,)], "reported once"
    spans = taken.all(Spans)
    assert set(spans.step[spans.rank == 0].tolist()) >= {1, 2, 3, 4, 5}
    is_open = spans.duration_ns == -1
    assert list(zip(spans.rank[is_open].tolist(), spans.operation[is_open].tolist(), strict=True)) == [
        (1, Operation.DP_ALL_REDUCE.number)
    ]
    reading = streamer.reading()
    assert reading.silent_ranks == 1
    streamer.end()


def test_stacks_are_requested_before_patience_is_over(host: StreamedHost) -> None:
    stuck = host.rank(0)
    take_steps(stuck, range(1, 4))
    streamer, _ = host.streamer()
    now_ns = time.monotonic_ns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: now_ns + int(0.4 * PHASE_TIMEOUTS.floor_s * 1e9))
        streamer.poll(now_s=LONG_S)
        streamer.poll(now_s=LONG_S + 1)
        assert host.silent == []
        patch.setattr(time, "monotonic_ns", lambda: now_ns + int(0.6 * PHASE_TIMEOUTS.floor_s * 1e9))
        for turn in range(2, 5):
            streamer.poll(now_s=LONG_S + turn)
    assert host.silent == [(0,)]
    assert streamer.reading().silent_ranks == 0
    streamer.end()


def test_ranks_that_never_wrote_anything_are_silent_too(host: StreamedHost, caplog: pytest.LogCaptureFixture) -> None:
    host.rank(0)
    host.expected = HostRanks(1, range(3), time.monotonic() - PHASE_TIMEOUTS.init_s - 1)
    streamer, _ = host.streamer()
    streamer.poll(now_s=LONG_S)
    streamer.poll(now_s=LONG_S + 1)
    assert host.silent == [(1, 2)]
    assert "ranks 1-2 are silent" in caplog.text
    streamer.end()


def test_copy_of_a_box_makes_no_rank_silent(host: StreamedHost, caplog: pytest.LogCaptureFixture) -> None:
    rank = host.rank(0)
    take_steps(rank, range(3))
    copy = host.path(0).with_name(host.path(0).name.replace("rank-00000", "rank-00000-copy"))
    shutil.copy(host.path(0), copy)
    streamer, taken = host.streamer()
    for at_s in range(3):
        streamer.poll(now_s=LONG_S + at_s)
    streamer.end()
    assert len(streamer.reading().ranks) <= 1
    assert f"{copy}: its name" in caplog.text
    assert taken.all(Values).step.tolist() == [0, 1, 2]


def test_box_that_becomes_invalid_harms_no_other(host: StreamedHost, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = host.rank(0), host.rank(1)
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    take_steps(good, range(2))
    take_steps(bad, range(2))
    with host.path(1).open("r+b") as file:
        file.seek(1024)
        file.write(b"\xfe" * 256)  # the header words, among them the cursor
    streamer.poll(now_s=LONG_S + 2)
    take_steps(good, range(2, 4))
    streamer.end()
    values = taken.all(Values)
    assert values.step[values.rank == 0].tolist() == [0, 1, 2, 3]
    assert not np.isin(1, values.rank)
    assert "rank 1 is no longer streamed" in caplog.text


def test_new_box_with_a_reused_inode_is_followed(host: StreamedHost) -> None:
    host.rank(2, host="host-2")
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    take_steps(host.rank(0), range(3))
    content = host.path(0).read_bytes()
    host.path(2).rename(host.path(0))
    host.path(0).write_bytes(content)
    streamer.poll(now_s=2 * LONG_S)
    streamer.poll(now_s=3 * LONG_S)
    assert taken.all(Ranks).rank.tolist() == [0]
    assert set(taken.all(StepTotals).step.tolist()) == {0, 1, 2}


def test_replaced_box_is_streamed_once(host: StreamedHost) -> None:
    take_steps(host.rank(0), range(3))
    streamer, taken = host.streamer()
    streamer.poll(now_s=LONG_S)
    host.path(0).rename(previous_black_box(host.path(0)))
    take_steps(host.rank(0, pid=os.getppid()), range(3, 5))
    for turn in range(2, 5):
        streamer.poll(now_s=turn * LONG_S)
    assert sorted(taken.all(Ranks).pid.tolist()) == sorted([os.getpid(), os.getppid()])
    assert sorted(taken.all(StepTotals).step[taken.all(StepTotals).operation == SUMMED.number].tolist()) == [*range(5)]


def put_box(
    host: StreamedHost, rank: int = 5, number: int = 1, dp_size: int = 8, at_ns: int = 1, step: int = 0
) -> Path:
    """Write a box of this host under its right name, with a complete header and an empty ring."""
    path = host.path(rank, number)
    image = bytearray(box_bytes(16))
    identity = Identity("demo", "main", number, rank, Layout(dp_size=dp_size), os.getpid(), "host-1")
    header = encode_header(identity, ClockBase(at_ns, time.time_ns(), 1), 16)
    image[: len(header)] = header
    struct.pack_into("<Q", image, 8 * Word.CURRENT_STEP, step)
    path.write_bytes(image)
    return path


@pytest.mark.slow(kept=["{'at_ns': 18446744073709551615}"])
@pytest.mark.parametrize(
    "nonsense",
    [{"dp_size": 2**31}, {"dp_size": 2**32 - 1}, {"at_ns": 2**64 - 1}, {"number": 2**32 - 1}, {"step": 2**63}],
    ids=str,
)
def test_invalid_box_is_named_and_costs_no_other_rank(
    host: StreamedHost, caplog: pytest.LogCaptureFixture, nonsense: dict[str, Any]
) -> None:
    recorder = host.rank(0)
    take_steps(recorder, range(2))
    path = put_box(host, **nonsense)
    streamer, taken = host.streamer(OneReading())
    streamer.poll(now_s=LONG_S)
    take_steps(recorder, range(2, 4))
    streamer.poll(now_s=LONG_S + 2)
    streamer.end()
    assert taken.all(Ranks).rank.tolist() == [0]
    assert taken.all(Values).step.tolist() == [0, 1, 2, 3]
    assert caplog.text.count(str(path)) == 1


def test_box_of_an_unstarted_round_hides_no_stalled_rank(host: StreamedHost) -> None:
    stuck = host.rank(0)
    take_steps(stuck, range(1, 4))
    host.expected = HostRanks(1, range(1), time.monotonic())
    put_box(host, rank=1, number=9, dp_size=2, at_ns=time.monotonic_ns())
    streamer, _ = host.streamer()
    now_ns = time.monotonic_ns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: now_ns + 60_000_000_000)
        for turn in range(3):
            streamer.poll(now_s=LONG_S + turn)
    assert host.silent == [(0,)]
    assert [(rank.rank, rank.step) for rank in streamer.reading().ranks] == [(0, 3)]
    streamer.end()


class OneReading:
    """A device source with one reading of two GPUs."""

    problem = ""

    def __init__(self) -> None:
        gpus = (GpuReading(0, "GPU-a", temperature_c=62.0), GpuReading(1, "GPU-b"))
        self.newest = HostSample(time.time(), 0.0, DriverReading("nvml", gpus=gpus))
        self._left = [self.newest]

    def take(self) -> list[HostSample]:
        taken, self._left = self._left, []
        return taken


def test_devices_are_sent_with_their_ranks(host: StreamedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    recorder = host.rank(3)
    take_steps(recorder, range(8))
    streamer, taken = host.streamer(OneReading())
    streamer.poll(now_s=LONG_S)
    assert [rank.gpu_uuid for rank in streamer.reading().ranks] == ["GPU-b"]
    assert streamer.reading().devices is not None
    streamer.end()
    gpus = taken.all(Gpus)
    assert (gpus.uuid.tolist(), gpus.rank.tolist()) == (["GPU-a", "GPU-b"], [-1, 3])
    assert (gpus.round.tolist(), gpus.step.tolist()) == ([1, 1], [7, 7])
