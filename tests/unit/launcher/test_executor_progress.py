"""An executor's readings of real black boxes: progress, milestones, evidence, commands; and its evidence of a
crash."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatrain.contracts.black_box.encoding import box_bytes
from megatrain.contracts.black_box.header_encoding import encode_header
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.black_box.values import ALL_OPERATIONS, ClockBase, Command, Identity, Phase
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.host_records import HangEvidence, RankEvidence
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Round, RoundDeadlines, RoundHost
from megatrain.fencing.phase_timeouts import PhaseTimeouts, find_stall
from megatrain.programs.processes import process_state
from megatrain.run_files.run_directory import RunDirectory, own_box_directory, own_box_paths
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain_launcher.executor.control_pages import ControlPages
from megatrain_launcher.executor.crash_evidence import BoxPaths, CrashEvidence
from megatrain_launcher.executor.evidence import hang_evidence
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.order_state import OrdersView
from megatrain_launcher.executor.progress import HostProgress, RankWatch, RoundProgress, host_progress
from megatrain_launcher.executor.round_follower import unfinished
from megatrain_launcher.executor.worker_events import WorkerEvents
from megatrain_launcher.interfaces import Assignment, WorkerEnd

UNUSED_PID = 2**22 + 1
"""Above the largest process number that Linux gives."""
NOW_S = 1_700_000_000.0


@dataclass
class Boxes:
    """The black boxes of a tiny job in which this process acts as every rank."""

    places: BoxPaths

    @property
    def directory(self) -> Path:
        assert self.places.directory is not None
        return self.places.directory

    def open(self, rank: int, round_number: int = 3, pid: int | None = None) -> Recorder:
        identity = Identity(
            self.places.job, "main", round_number, rank, Layout(dp_size=4), pid or os.getpid(), "host-1"
        )
        return open_recorder(identity, directory=str(self.directory), run_key=self.places.run.key, num_records=256)

    def paths(self, round_number: int = 3) -> dict[int, Path]:
        return self.places.paths(round_number, range(2, 4))

    def watch(self, rank: int) -> RankWatch:
        return RankWatch(self.paths()[rank], rank, os.getpid())


@pytest.fixture
def boxes(tmp_path: Path) -> Boxes:
    (tmp_path / "boxes").mkdir()
    run = RunDirectory(tmp_path / "run")
    run.create()
    return Boxes(BoxPaths(tmp_path / "boxes", "demo", run))


@pytest.fixture
def crash(boxes: Boxes) -> Iterator[Callable[..., CrashEvidence]]:
    opened: list[CrashEvidence] = []

    def make(num_ranks: int = 4) -> CrashEvidence:
        opened.append(CrashEvidence(boxes.places, num_ranks))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def take_steps(recorder: Recorder, *steps: int) -> None:
    for step in steps:
        recorder.set_step(step)
        with recorder.span(Operation.STEP):
            pass
        recorder.complete_step()


def load(recorder: Recorder) -> None:
    with recorder.span(Operation.INIT):
        pass
    recorder.set_phase(Phase.CHECKPOINT)
    with recorder.span(Operation.CHECKPOINT_LOAD):
        pass


def test_slowest_rank_decides_progress_and_milestones(boxes: Boxes) -> None:
    first, second = boxes.open(2), boxes.open(3)
    round_progress = RoundProgress(boxes.paths(), {2: os.getpid(), 3: os.getpid()}, 100.0)

    def progress() -> HostProgress:
        return host_progress(round_progress.poll(), 2, 100.0)

    began = time.time()
    load(first)
    found = progress()
    assert found.milestones.joined_unix_s is None  # The other rank has not reached that step.
    assert found.step_phase == "init"
    load(second)
    take_steps(first, 10, 11)
    found = progress()
    assert found.milestones.joined_unix_s is not None
    assert began <= found.milestones.joined_unix_s <= time.time()
    assert (found.milestones.started_unix_s, found.milestones.loaded_unix_s) == (100.0, None)
    assert (found.min_step, found.max_step, found.resumed_step, found.has_stepped) == (None, 12, 10, False)
    take_steps(second, 10)
    found = progress()
    milestones = found.milestones
    assert milestones.loaded_unix_s is not None
    assert milestones.first_step_unix_s is not None
    assert milestones.joined_unix_s <= milestones.loaded_unix_s <= milestones.first_step_unix_s <= time.time()
    assert (found.min_step, found.max_step, found.has_stepped, found.step_phase) == (11, 12, True, "first-step")
    assert found.last_step_unix_s == pytest.approx(milestones.first_step_unix_s, abs=1.0)
    take_steps(second, 11, 12)
    found = progress()
    assert (found.min_step, found.max_step, found.milestones) == (12, 13, milestones)
    assert (found.median_step_s is not None, found.save_interval_s) == (True, None)
    first.set_save_interval(900.0)
    assert progress().save_interval_s == 900.0
    second.set_completed_command(5)
    assert progress().completed_command == 0
    first.set_completed_command(7)
    assert progress().completed_command == 5
    first.close()
    ended = round_progress.poll()
    assert (ended[2].is_closed, ended[3].is_closed) == (True, False)
    assert ended[2].progress.completed_step == 11  # Its last progress stays known.
    round_progress.close()
    second.close()


def test_unread_milestones_are_found_in_the_spans(boxes: Boxes) -> None:
    recorder = boxes.open(2)
    load(recorder)
    take_steps(recorder, 0, 1, 2, 3)
    watch = boxes.watch(2)
    found = watch.poll()
    assert found is not None
    spans = read_black_box(watch.path)
    first = next(record for record in spans.records if record.operation == Operation.STEP)
    assert first.duration_ns is not None
    assert found.moments.first_step == spans.clock.unix_of(first.start_ns + first.duration_ns) / 1_000_000_000
    assert found.moments.resumed_step == 0
    watch.close()
    recorder.close()


def test_black_box_of_another_process_is_not_read(boxes: Boxes) -> None:
    left = boxes.open(2, pid=UNUSED_PID)
    watch = boxes.watch(2)
    assert watch.poll() is None
    recorder = boxes.open(2)  # Sets the other box aside, as a worker does.
    found = watch.poll()
    assert found is not None
    assert found.progress.phase is Phase.INIT
    watch.close()
    recorder.close()
    left.close()


def test_evidence_has_positions_and_process_states(boxes: Boxes) -> None:
    recorder = boxes.open(2)
    group = recorder.add_group("dp", [0, 2])
    recorder.add_group("odd", [0, 1, 5])
    recorder.set_step(4)
    recorder.begin(Operation.STEP)
    with recorder.span(Operation.DP_ALL_REDUCE, group=group):
        pass
    token = recorder.begin(Operation.DP_ALL_REDUCE, group=group)
    watches = {2: boxes.watch(2), 3: boxes.watch(3)}
    for watch in watches.values():
        watch.poll()
    found = hang_evidence("a", "1", 3, watches, 50.0)
    assert (found.silent, dict(found.groups)) == ((3,), {"dp:0+2x2": (0, 2, 2)})
    (rank,) = found.ranks
    assert (rank.rank, rank.step, rank.phase, rank.in_flight) == (2, 4, "first-step", "dp-all-reduce")
    assert (rank.positions["dp:0+2x2"].entered, rank.positions["dp:0+2x2"].left) == (2, 1)
    assert (rank.awaited_group, rank.awaited, rank.is_at_storage) == ("", 0, False)
    recorder.await_end(token)
    recorder.set_step(5)
    with recorder.span(Operation.DATA_WAIT):
        recorder.show_liveness()
        (rank,) = hang_evidence("a", "1", 3, {2: watches[2]}, 50.0).ranks
    assert (rank.in_flight, rank.is_at_storage) == ("data-wait", True)
    recorder.set_phase(Phase.CHECKPOINT)
    (rank,) = hang_evidence("a", "1", 3, {2: watches[2]}, 50.0).ranks
    assert (rank.awaited_group, rank.awaited, rank.is_at_storage) == ("dp:0+2x2", 2, True)
    assert rank.process_state in ("R", "S")
    assert rank.newest_unix_s <= time.time()
    assert process_state(UNUSED_PID) == ""
    for watch in watches.values():
        watch.close()
    recorder.close()


def test_evidence_of_a_group_of_thousands_is_small(boxes: Boxes) -> None:
    recorder = boxes.open(2)
    recorder.add_group("dp", list(range(2, 80_002, 8)))
    watch = boxes.watch(2)
    watch.poll()
    found = hang_evidence("a", "1", 3, {2: watch}, 50.0)
    assert dict(found.groups) == {"dp:2+10000x8": (2, 10_000, 8)}
    assert len(encode(found)) < 1000  # Each host writes one record, and the driver keeps the records of all hosts.
    watch.close()
    recorder.close()


def test_process_without_a_black_box_may_hang_at_its_end(boxes: Boxes) -> None:
    recorder = boxes.open(2)
    take_steps(recorder, 0, 1, 2)
    progress = RoundProgress({2: boxes.paths()[2]}, {2: os.getpid()}, 100.0)
    ranks = progress.poll()
    assert unfinished(ranks, progress) == {2: ranks[2].progress}
    recorder.close()
    ranks = progress.poll()
    assert ranks[2].is_closed
    (left,) = unfinished(ranks, progress).values()
    assert left.phase is Phase.STOPPING
    phase_timeouts = PhaseTimeouts(init_s=1, first_step_s=1, checkpoint_s=60, evaluation_s=1, floor_s=1, factor=2)
    now_ns = time.monotonic_ns()
    assert find_stall({2: left}, phase_timeouts, now_ns + 50 * 10**9, 0.0) is None
    assert find_stall({2: left}, phase_timeouts, now_ns + 70 * 10**9, 0.0) is not None
    progress.watches[2].pid = UNUSED_PID
    assert unfinished(ranks, progress) == {}
    progress.close()


def test_last_steps_are_reported_after_the_workers_end(boxes: Boxes, crash: Callable[..., CrashEvidence]) -> None:
    parts = (RoundHost("host-1", "1", "127.0.0.1", 2, 2),)
    assignment = Assignment(Round(3, 4, parts, "127.0.0.1", 1, "a test", "d", 0.0), parts[0])
    state, recorders = HostStatusBuilder("host-1"), [boxes.open(2), boxes.open(3)]
    events = WorkerEvents("host-1", state, crash(), lambda: "1")
    events.workers_started(assignment, {0: os.getpid(), 1: os.getpid()})
    events.worker_ended(assignment, WorkerEnd(0, 2, os.getpid(), -9, time.time(), None))
    events.workers_stopping(assignment)
    for recorder in recorders:  # before they are killed
        take_steps(recorder, 0, 1, 2)
    events.workers_stopped(assignment)
    found = state.status("1", OrdersView(3, assignment.round, 3, 3, None), "")
    assert (found.min_step, found.max_step) == (3, 3)
    for recorder in recorders:
        recorder.close()


def test_control_pages_are_written_when_something_changed(boxes: Boxes) -> None:
    recorder = boxes.open(2)
    paths = {2: boxes.paths()[2]}
    pages = ControlPages(3)
    pages.write(paths, 10 * 10**9, NOW_S)
    page = recorder.read_control()
    assert (page.round, page.lease_ok_until_ns, page.command) == (3, 10 * 10**9, Command.NONE)
    pages.write(paths, 10 * 10**9 + 1000, NOW_S)  # the same lease, read twice with two clocks
    assert recorder.read_control() is page
    pages.command_checkpoint(4)
    pages.write(paths, 10 * 10**9, NOW_S)
    page = recorder.read_control()
    assert (page.command, page.command_number) == (Command.CHECKPOINT, 4)
    pages.set_deadlines(RoundDeadlines(3, interval_s=2.0, stop_s=90.0))
    pages.write(paths, 10 * 10**9, NOW_S)
    page = recorder.read_control()
    assert (page.interval_ns, page.stop_ns) == (2 * 10**9, 90 * 10**9)
    pages.write(paths, 13 * 10**9, NOW_S)
    assert recorder.read_control().lease_ok_until_ns == 13 * 10**9
    recorder.close()
    pages.write(paths, 16 * 10**9, NOW_S)  # The rank has ended: there is nothing to report.


def test_control_page_switches_recording_and_bursts_end(boxes: Boxes) -> None:
    recorders = {rank: boxes.open(rank) for rank in (2, 3)}
    paths = boxes.paths()
    pages = ControlPages(3)

    def recording(rank: int) -> tuple[int, int]:
        page = recorders[rank].read_control()
        return page.span_mask, page.sample_period

    pages.set_recording(DiagSettings(sample_period=7, full_until_unix_s=NOW_S + 5))
    pages.write({2: paths[2]}, 10 * 10**9, NOW_S)
    assert recording(2) == (ALL_OPERATIONS, 1)
    pages.write(paths, 10 * 10**9, NOW_S + 4)  # Rank 3 has started meanwhile.
    assert recording(3) == (ALL_OPERATIONS, 1)
    pages.write(paths, 10 * 10**9, NOW_S + 6)
    assert recording(2) == recording(3) == (ALL_OPERATIONS, 7)
    pages.set_recording(DiagSettings(sample_period=2**40, off_operations=("gc", "no-such")))
    pages.write(paths, 10 * 10**9, NOW_S + 6)
    assert recording(2) == (ALL_OPERATIONS & ~(1 << Operation.GC.number), 2**31 - 1), "the page has 32 bits for it"
    pages.set_recording(DiagSettings(is_on=False))
    pages.write(paths, 10 * 10**9, NOW_S + 6)
    assert recording(2) == recording(3) == (0, 10)
    for recorder in recorders.values():
        recorder.close()


def test_a_broken_rounds_boxes_are_kept_and_their_memory_freed(
    boxes: Boxes, crash: Callable[..., CrashEvidence]
) -> None:
    recorder = boxes.open(2)
    take_steps(recorder, 6)
    recorder.close(keep=True, has_failed=True)
    keeper = crash()
    evidence = HangEvidence("host-1", "1", 3, 1.0, {}, ())
    keeper.keep_positions(evidence)
    keeper.keep_boxes(3, boxes.paths())  # Rank 3 never had one.
    keeper.close()
    directory = boxes.places.run.incidents / "round-000003"
    assert sorted(path.name for path in directory.iterdir()) == ["host-1.json", "rank-00002.blackbox"]
    assert read_black_box(directory / "rank-00002.blackbox").progress.completed_step == 6
    assert decode(HangEvidence, (directory / "host-1.json").read_bytes(), "file") == evidence
    assert own_box_paths(boxes.directory) == []


def test_positions_from_before_the_halt_are_kept(boxes: Boxes, crash: Callable[..., CrashEvidence]) -> None:
    def evidence(at_s: float, *states: str, step: int = 7, number: int = 3, is_late: bool = False) -> HangEvidence:
        ranks = tuple(RankEvidence(rank, {}, state, step, "step", 0.0) for rank, state in enumerate(states))
        return HangEvidence("host-1", "1", number, at_s, {}, ranks, is_after_halt=is_late)

    first, newer = evidence(1.0, "S", "T"), evidence(2.0, "D", "T")
    # The ranks are still alive, but some have left the collective in which they waited.
    late = evidence(3.0, "S", "S", is_late=True)
    dead = evidence(4.0, "Z", "", is_late=True)
    stepped = evidence(5.0, "S", "S", step=8, is_late=True)
    other = evidence(6.0, "S", "S", number=2, is_late=True)
    for reported, kept in (
        ((first, newer), newer),
        ((first, newer, late), newer),
        ((first, dead), first),
        ((late,), late),
        ((late, dead), late),
        ((late, first), first),
        ((first, stepped), stepped),
        ((other, late), late),
    ):
        keeper = crash()
        for one in reported:
            keeper.keep_positions(one)
        keeper.close()
        path = boxes.places.run.incidents / "round-000003" / "host-1.json"
        assert decode(HangEvidence, path.read_bytes(), "file") == kept, reported


def test_black_boxes_of_own_dead_processes_are_removed(boxes: Boxes, crash: Callable[..., CrashEvidence]) -> None:
    living, dead = boxes.open(2), boxes.open(3, round_number=2, pid=UNUSED_PID)
    dead.close(keep=True)
    foreign = own_box_directory(boxes.directory) / "megatrain.another.12345678.main.000001.rank-00000.blackbox"
    foreign.write_bytes(b"not ours")
    elsewhere = boxes.paths(1)[3]
    other_boot = ClockBase(time.monotonic_ns() + 60 * 10**9, time.time_ns(), 0)
    identity = Identity("demo", "main", 1, 3, Layout(dp_size=4), UNUSED_PID, "host-2")
    elsewhere.write_bytes(encode_header(identity, other_boot, 1).ljust(box_bytes(1), b"\0"))
    damaged = boxes.paths(1)[2]
    damaged.write_bytes(b"cut short")
    keeper = crash()
    keeper.sweep()
    keeper.close()
    assert own_box_paths(boxes.directory) == sorted([foreign, elsewhere, boxes.paths()[2]])
    assert (boxes.places.run.incidents / "round-000002" / "rank-00003.blackbox").exists()
    living.close()


def test_evidence_is_not_written_through_links(
    boxes: Boxes, crash: Callable[..., CrashEvidence], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    boxes.open(3).close(keep=True)
    boxes.paths()[2].symlink_to(mine)
    directory = boxes.places.run.incidents / "round-000003"
    directory.mkdir()
    for name in ("rank-00003.blackbox", "host-1.json"):
        (directory / name).symlink_to(mine)
    keeper = crash()
    keeper.keep_positions(HangEvidence("host-1", "1", 3, 1.0, {}, ()))
    keeper.keep_boxes(3, boxes.paths())
    keeper.close()
    assert mine.read_text() == "precious"
    assert [(path.name, path.is_symlink()) for path in sorted(directory.iterdir())] == [
        ("host-1.json", False),
        ("rank-00003.blackbox", False),
    ]


@pytest.mark.parametrize(("num_ranks", "oldest"), [(4, 6), (128, 16), (12_288, 24)])
def test_only_the_newest_broken_rounds_are_kept(
    boxes: Boxes, crash: Callable[..., CrashEvidence], num_ranks: int, oldest: int
) -> None:
    for number in range(1, 25):
        (boxes.places.run.incidents / f"round-{number:06d}").mkdir()
    keeper = crash(num_ranks)
    boxes.open(2, round_number=25, pid=UNUSED_PID).close(keep=True)
    keeper.keep_boxes(25, boxes.paths(25))
    keeper.close()
    kept = sorted(path.name for path in boxes.places.run.incidents.iterdir())
    assert kept == [f"round-{number:06d}" for number in range(oldest, 26)]


def test_missing_black_boxes_are_no_problem(tmp_path: Path) -> None:
    places = BoxPaths(None, "demo", RunDirectory(tmp_path))
    assert places.paths(1, range(2)) == {}
    assert places.leftovers() == []
    found = host_progress({}, 2, 5.0)
    assert (found.milestones.started_unix_s, found.min_step, found.has_stepped) == (5.0, None, False)
