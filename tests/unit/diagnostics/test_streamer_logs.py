"""Following logs: each line once with its offset, despite rotation, restarts, floods and unfinished lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_diagnostics.events.tables import LogLines
from megatrain_diagnostics.streamer.log_tail import HostLogs, LogPosition, LogTail
from megatrain_launcher.logs.files import RotatingFile
from megatrain_launcher.logs.worker_logs import rank_log_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = rank_log_path(tmp_path / "host-1", 3, 7)
    place.parent.mkdir(parents=True)
    return place


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def lines_of(table: LogLines) -> list[tuple[int, str]]:
    return list(zip(table.sequence.tolist(), table.line.tolist(), strict=True))


def test_lines_come_once_with_the_offset_of_their_end(path: Path) -> None:
    tail = LogTail(path, "host-1", 3, 7)
    assert lines_of(tail.poll(5)) == []
    append(path, b"one\ntwo\r\n\nhal")
    found = tail.poll(5)
    assert lines_of(found) == [(4, "one"), (9, "two")]
    assert (found.host.tolist(), found.rank.tolist(), found.round.tolist()) == (["host-1"] * 2, [7, 7], [3, 3])
    assert found.at_ns.tolist() == [5, 5]
    append(path, b"f \xff\n")
    assert lines_of(tail.poll(6)) == [(17, "half \ufffd")]
    assert lines_of(tail.poll(7)) == []
    tail.close()


def test_rotated_log_is_followed(path: Path) -> None:
    file = RotatingFile(path, max_bytes=40, num_files=3)
    tail = LogTail(path, "host-1", 3, 7)
    written, seen = [], []
    end = 0
    for number in range(12):
        line = f"line {number:04d}"
        end += len(line) + 1
        written.append((end, line))
        file.write(f"{line}\n".encode())
        seen += lines_of(tail.poll(0))
    assert path.with_name(f"{path.name}.1").exists()
    assert seen == written
    tail.close()
    file.close()


def test_restarted_tail_continues_at_its_position(path: Path) -> None:
    append(path, b"one\ntwo\nhal")
    tail = LogTail(path, "host-1", 3, 7)
    tail.poll(0)
    kept = tail.position
    tail.close()
    append(path, b"f\n")
    path.rename(path.with_name(f"{path.name}.1"))
    append(path, b"new\n")
    again = LogTail(path, "host-1", 3, 7, kept)
    assert lines_of(again.poll(0)) + lines_of(again.poll(0)) == [(13, "half"), (17, "new")]
    again.close()
    gone = LogTail(path, "host-1", 3, 7, LogPosition(inode=12345, offset=10, before=100))
    assert lines_of(gone.poll(0)) == [(114, "new")], "offsets continue although the file is gone"
    gone.close()


def test_flood_of_lines_is_read_in_bounded_parts(path: Path) -> None:
    append(path, b"x" * (3 << 20) + b"\nlast\n")
    tail = LogTail(path, "host-1", 3, 7)
    lines = [line for _ in range(6) for _, line in lines_of(tail.poll(0))]
    assert lines[-1] == "last"
    assert all(len(line) <= 4096 for line in lines)
    assert len(lines) <= 5
    tail.close()


def test_only_logs_of_the_newest_rounds_are_followed(tmp_path: Path) -> None:
    directory = tmp_path / "host-1"
    for number in (1, 2, 3):
        place = rank_log_path(directory, number, 0)
        place.parent.mkdir(parents=True)
        place.write_bytes(f"round {number}\n".encode())
    (directory / "round-000003" / "rank-00001.log").symlink_to("/etc/passwd")
    (directory / "round-000003" / "notes.txt").write_text("no log")
    logs = HostLogs(directory, "host-1", lambda name: None)
    logs.find()
    assert lines_of(logs.poll(0)) == [(8, "round 2"), (8, "round 3")]
    assert set(logs.positions()) == {"2/0", "3/0", "3/1"}
    rank_log_path(directory, 4, 0).parent.mkdir()
    rank_log_path(directory, 4, 0).write_bytes(b"round 4\n")
    logs.find()
    assert lines_of(logs.poll(0)) == [(8, "round 4")]
    logs.close()
    missing = HostLogs(tmp_path / "none", "host-1", lambda name: None)
    missing.find()
    assert lines_of(missing.poll(0)) == [], "the directory may be created later"
