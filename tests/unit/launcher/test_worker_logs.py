"""Logs of workers: bounded files, lines shown to people, verdicts; and no worker ever waits for them."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from megatrain.run_files.run_directory import rank_log_path
from megatrain_job.failures.verdict import Label, Verdict
from megatrain_launcher.logs.files import RotatingFile
from megatrain_launcher.logs.tee import Tee, is_shown
from megatrain_launcher.logs.worker_logs import LogWatch, WorkerLogs
from tests.helpers.waiting import DEADLINE_S, wait_until

OUT_OF_MEMORY = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity\n"
BROKEN_GPU = b"NVRM: Xid (PCI:0000:10:1c): 79, pid=1234, GPU has fallen off the bus.\n"


@pytest.fixture(autouse=True)
def close_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon a stream without a reader soon."""
    monkeypatch.setattr("megatrain_launcher.logs.worker_logs._TEE_CLOSE_S", 0.05)


@contextmanager
def logs_with_pipe(host_logs: Path, **options: object) -> Iterator[tuple[WorkerLogs, int]]:
    """Create logs that show lines in a pipe."""
    shown, show = os.pipe()
    try:
        with WorkerLogs(host_logs, tee_fd=show, **options) as logs:
            yield logs, shown
    finally:
        os.close(show)
        os.close(shown)


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class TestRotatingFile:
    def test_files_have_whole_lines_and_bounds(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "rank.log"
        file = RotatingFile(path, max_bytes=100, num_files=3)
        lines = [b"line %03d\n" % number for number in range(60)]
        for start in range(0, 60, 7):  # 63 bytes at once
            file.write(b"".join(lines[start : start + 7]))
        file.close()
        kept = [path.with_name("rank.log.2"), path.with_name("rank.log.1"), path]
        assert sorted(path.parent.iterdir()) == sorted(kept)
        assert all(part.stat().st_size <= 100 for part in kept)
        text = b"".join(part.read_bytes() for part in kept)
        assert text == b"".join(lines)[-len(text) :]
        assert len(text) > 200

    def test_line_longer_than_a_file_is_cut(self, tmp_path: Path) -> None:
        file = RotatingFile(tmp_path / "rank.log", max_bytes=10, num_files=4)
        file.write(b"x" * 25)
        file.close()
        assert [(tmp_path / name).stat().st_size for name in ("rank.log.2", "rank.log.1", "rank.log")] == [10, 10, 5]

    def test_replaced_log_file_is_not_written(self, tmp_path: Path) -> None:
        """A link could lead anywhere; a pipe without a reader would block all ranks."""
        (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
        os.mkfifo(tmp_path / "pipe.log")
        for name in ("link.log", "pipe.log"):
            file = RotatingFile(tmp_path / name)
            file.write(b"a line\n")
            assert f"{name} cannot be written" in file.problem
            file.close()
        assert not (tmp_path / "elsewhere").exists()

    def test_only_file_starts_again_when_it_is_full(self, tmp_path: Path) -> None:
        file = RotatingFile(tmp_path / "rank.log", max_bytes=10, num_files=1)
        file.write(b"first\nsecond\n")
        file.close()
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("rank.log", b"second\n")]

    def test_existing_log_is_kept(self, tmp_path: Path) -> None:
        for word in (b"one\n", b"two\n"):
            file = RotatingFile(tmp_path / "rank.log")
            file.write(word)
            file.close()
        assert (tmp_path / "rank.log").read_bytes() == b"one\ntwo\n"

    def test_full_disk_is_reported_and_forgotten(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = RotatingFile(tmp_path / "rank.log")
        file.write(b"before\n")
        free_bytes = [3]

        def write_on_full_disk(fd: int, data: bytes) -> int:
            if not free_bytes[0]:
                raise OSError(28, "No space left on device")
            count, free_bytes[0] = min(free_bytes[0], len(data)), 0
            return real(fd, data[:count])

        real = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_on_full_disk)
            file.write(b"abcdef\n")
            file.write(b"lost\n")
            assert "No space left on device" in file.problem
        file.write(b"after\n")
        assert file.problem == ""
        file.close()
        text = (tmp_path / "rank.log").read_text()
        assert text == "before\nabc[megatrain: 9 bytes could not be written here]\nafter\n"


class TestTee:
    def test_choice_of_ranks_whose_lines_are_shown(self) -> None:
        for choice, shown in [("none", []), ("first", [0]), ("all", [0, 1, 2])]:
            assert [rank for rank in range(3) if is_shown(choice, rank)] == shown, (choice, shown)

    def test_lines_are_whole_and_named(self) -> None:
        shown, show = os.pipe()
        tee = Tee(show)
        tee.feed(0, b"he")
        tee.feed(12, b"other\n")
        tee.feed(0, b"llo\nnext\r\nunended")
        tee.end(0)
        assert os.read(shown, 1000) == b"[rank 12] other\n[rank 0] hello\n[rank 0] next\n[rank 0] unended\n"
        os.close(shown)
        os.close(show)

    def test_slow_reader_loses_lines_and_their_number_is_shown(self) -> None:
        shown, show = os.pipe()
        tee = Tee(show)
        line = b"x" * 999 + b"\n"
        for _ in range(3000):
            tee.feed(0, line)
        found = b""
        while tee.has_waiting:
            found += os.read(shown, 1 << 16)
            tee.flush()
        tee.feed(0, b"on\n")
        while not found.endswith(b"on\n"):
            found += os.read(shown, 1 << 16)
            tee.flush()
        left_out = re.search(rb"megatrain: (\d+) lines left out", found)
        assert left_out is not None
        assert found.count(b"[rank 0] x") + int(left_out[1]) == 3000
        assert found.endswith(b"[rank 0] on\n")
        os.close(shown)
        os.close(show)

    def test_closed_reader_is_ignored(self) -> None:
        shown, show = os.pipe()
        os.close(shown)
        tee = Tee(show)
        tee.feed(0, b"one\n")
        tee.feed(0, b"two\n")
        assert not tee.has_waiting
        os.close(show)


class TestLogWatch:
    def test_failure_of_one_rank_is_a_verdict_without_alarm(self) -> None:
        watch = LogWatch(3)
        assert watch.feed(b"all is well\n") is None
        assert watch.verdict is None
        assert watch.feed(OUT_OF_MEMORY[:40]) is None
        assert watch.feed(OUT_OF_MEMORY[40:]) is None
        assert watch.verdict is not None
        assert watch.verdict.label is Label.CUDA_OOM

    def test_broken_host_alarms_once(self) -> None:
        watch = LogWatch(3)
        alarm = watch.feed(BROKEN_GPU)
        assert alarm is not None
        assert alarm.label is Label.GPU_HARDWARE
        assert watch.feed(BROKEN_GPU) is None

    def test_line_without_an_end_counts_at_the_end(self) -> None:
        watch = LogWatch(3)
        watch.feed(OUT_OF_MEMORY.rstrip())
        assert watch.verdict is None
        assert watch.finish() is not None

    def test_failed_classifier_is_reported_and_not_used_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr("megatrain_job.failures.classifier.LogClassifier.feed", fail)
        watch = LogWatch(3)
        assert watch.feed(b"line\n") is None
        assert "ZeroDivisionError: oops" in watch.problem
        assert watch.finish() is None


class TestWorkerLogs:
    def test_each_rank_and_round_has_its_file(self, tmp_path: Path) -> None:
        with logs_with_pipe(tmp_path, tee="all") as (logs, shown):
            for number in (1, 2):
                for rank in (2, 3):
                    fd = logs.open_rank(number, rank)
                    write(fd, b"round %d rank %d\n" % (number, rank))
                    os.close(fd)
                logs.close_round()
            found = sorted(tmp_path.rglob("*.log"))
            assert found == [rank_log_path(tmp_path, number, rank) for number in (1, 2) for rank in (2, 3)]
            assert found[0] == tmp_path / "round-000001" / "rank-00002.log"
            assert found[3].read_text() == "round 2 rank 3\n"
            assert sorted(os.read(shown, 1000).splitlines())[0] == b"[rank 2] round 1 rank 2"

    def test_lines_are_shown_on_standard_output(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        with WorkerLogs(tmp_path) as logs:
            fd = logs.open_rank(1, 0)
            write(fd, b"hello\n")
            os.close(fd)
        assert capfd.readouterr().out == "[rank 0] hello\n"

    def test_verdict_has_all_lines_while_the_pipe_is_open(self, tmp_path: Path) -> None:
        with WorkerLogs(tmp_path, tee="none") as logs:
            fd = logs.open_rank(1, 0)
            for _ in range(50):
                write(fd, b"nothing to see, nothing to see, nothing to see\n" * 1000)
            write(fd, OUT_OF_MEMORY.rstrip())
            verdict = logs.log_verdict_at_end(0)
            assert verdict is not None
            assert (verdict.label, verdict.line) == (Label.CUDA_OOM, OUT_OF_MEMORY.decode().rstrip())
            os.close(fd)

    def test_rank_with_an_empty_log_has_no_verdict(self, tmp_path: Path) -> None:
        with WorkerLogs(tmp_path, tee="none") as logs:
            os.close(logs.open_rank(1, 0))
            assert logs.log_verdict_at_end(0) is None
            assert logs.log_verdict_at_end(7) is None

    def test_worker_that_never_stops_writing_delays_nothing(self, tmp_path: Path) -> None:
        stop = threading.Event()
        file_at = partial(RotatingFile, max_bytes=1 << 16, num_files=2)
        with WorkerLogs(tmp_path, tee="none", file_at=file_at) as logs:
            fd = logs.open_rank(1, 0)

            def flood() -> None:
                while not stop.is_set():
                    try:
                        os.write(fd, b"and on and on it goes for ever\n" * 100)
                    except BrokenPipeError:
                        return

            writer = threading.Thread(target=flood)
            writer.start()
            logs.log_verdict_at_end(0, timeout_s=DEADLINE_S)
            logs.close_round(timeout_s=DEADLINE_S)
            writer.join(DEADLINE_S)
            assert not writer.is_alive()
            os.close(fd)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 2 << 16

    def test_alarm_comes_while_the_worker_runs(self, tmp_path: Path) -> None:
        received: list[tuple[int, int, Verdict]] = []
        with WorkerLogs(tmp_path, tee="none", on_alarm=lambda *arguments: received.append(arguments)) as logs:
            fd = logs.open_rank(4, 9)
            write(fd, BROKEN_GPU)
            wait_until(lambda: bool(received), "the alarm")
            os.close(fd)
        assert [(number, rank, verdict.label) for number, rank, verdict in received] == [(4, 9, Label.GPU_HARDWARE)]

    def test_unwritable_directory_is_reported_and_workers_go_on(self, tmp_path: Path) -> None:
        (tmp_path / "logs").write_text("a file")
        with logs_with_pipe(tmp_path / "logs") as (logs, shown):
            fd = logs.open_rank(1, 0)
            write(fd, b"shown all the same\n" * 20_000)
            wait_until(lambda: "cannot be written" in logs.problem, "the problem")
            write(fd, OUT_OF_MEMORY)
            assert logs.log_verdict_at_end(0, DEADLINE_S) is not None
            assert os.read(shown, 19 + 9) == b"[rank 0] shown all the same\n"
            os.close(fd)

    def test_stopped_reader_stops_no_worker(self, tmp_path: Path) -> None:
        with logs_with_pipe(tmp_path, tee="all") as (logs, _):
            fd = logs.open_rank(1, 0)
            write(fd, b"a line of a worker that talks much\n" * 200_000)  # The terminal is not read.
            logs.close_round(DEADLINE_S)
            os.close(fd)
            assert rank_log_path(tmp_path, 1, 0).stat().st_size == 200_000 * 35

    @pytest.mark.parametrize("writes_on", [True, False])
    def test_removed_logs_are_created_again(self, tmp_path: Path, writes_on: bool) -> None:
        """Also the log of a rank that writes nothing more: no other part would notice."""
        host_logs = tmp_path / "logs" / "host-1"
        with WorkerLogs(host_logs, tee="none") as logs:
            fd = logs.open_rank(1, 0)
            path = rank_log_path(host_logs, 1, 0)
            write(fd, b"before\n")
            wait_until(lambda: path.exists() and path.read_bytes() == b"before\n", "the log")
            shutil.rmtree(tmp_path / "logs")
            if writes_on:
                write(fd, b"after\n")
            wait_until(lambda: bool(logs.problem), "the problem")
            os.close(fd)
            assert re.fullmatch(
                rf"a log in {path.parent} was removed from outside at \d\d:\d\d:\d\d UTC: its earlier lines are lost, "
                "and it is created again",
                logs.problem,
            )
        note = b"[megatrain: this log was removed from outside; its 7 bytes are lost]\n"
        assert path.read_bytes() == note + (b"after\n" if writes_on else b"")
