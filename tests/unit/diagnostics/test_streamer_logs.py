"""A streamer follows logs: each line once, despite rotation and restarts; its options, and a disk that is read-only."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatrain.contracts.errors import DataError
from megatrain.contracts.records.record import decode
from megatrain.data.export import write_records
from megatrain_diagnostics.events.tables import LogLines
from megatrain_diagnostics.launched import streamer_command
from megatrain_diagnostics.streamer.log_tail import HostLogs, LogPosition, LogTail
from megatrain_diagnostics.streamer.settings import StreamerSettings
from megatrain_diagnostics.streamer.streamer import Positions, write_positions
from megatrain_diagnostics.wire.spool import Spool
from megatrain_launcher.logs.files import RotatingFile
from megatrain_launcher.logs.worker_logs import rank_log_path
from tests.helpers.fake_nvml import fake_nvml
from tests.helpers.forked_program import forked_program
from tests.helpers.ports import free_ports
from tests.helpers.single_rank import make_config
from tests.helpers.small_disk import small_disk
from tests.helpers.waiting import wait_until


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
    assert lines_of(tail.poll(at_ns=5)) == []
    append(path, b"one\ntwo\r\n\nhal")
    found = tail.poll(at_ns=5)
    assert lines_of(found) == [(4, "one"), (9, "two")]
    assert (found.host.tolist(), found.rank.tolist(), found.round.tolist()) == (["host-1"] * 2, [7, 7], [3, 3])
    assert found.at_ns.tolist() == [5, 5]
    append(path, b"f \xff\n")
    assert lines_of(tail.poll(at_ns=6)) == [(17, "half \ufffd")]
    assert lines_of(tail.poll(at_ns=7)) == []
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


NO_ETCD = ["--rdzv-endpoint=http://127.0.0.1:1"]
MB = 1_000_000


class Page:
    """The metrics of a streamer."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def values(self, name: str, label: str = "host") -> dict[str, float] | None:
        """Return the values of a metric by a label, None while there is no page."""
        try:
            with urllib.request.urlopen(self._url) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return {one.labels[label]: one.value for one in samples if one.name == name}

    def first_values(self, name: str, label: str = "host") -> dict[str, float]:
        wait_until(lambda: self.values(name, label) is not None, "the page")
        found = self.values(name, label)
        assert found is not None
        return found


def settings_of(directory: Path, **diagnostics: Any) -> list[str]:
    config = make_config(
        job={"name": "demo"}, telemetry={"black_box_directory": ""}, diagnostics={"metrics_port": 0, **diagnostics}
    )
    return streamer_command(config=config, run=directory, host="h", logs=directory / "logs", etcd=NO_ETCD)


@contextmanager
def streamer(directory: Path, **diagnostics: Any) -> Iterator[Page]:
    """Run a streamer of a host with two GPUs, whose daemon is never found."""
    (port,) = free_ports(1)
    _, *words = settings_of(directory, metrics_port=port, **diagnostics)
    environment = {**os.environ, **fake_nvml(directory).environment}
    with forked_program(words, environment=environment):
        yield Page(port)


@pytest.mark.slow
def test_devices_are_read_at_the_interval_and_never_at_0(tmp_path: Path) -> None:
    with streamer(tmp_path, telemetry_interval_s=1.0) as page:
        wait_until(
            lambda: (page.values("megatrain_events_sent_total", "table") or {}).get("gpus", 0) >= 4, "two readings"
        )
    with streamer(tmp_path, telemetry_interval_s=0.0) as page:
        assert page.first_values("megatrain_telemetry_up") == {}


@pytest.mark.parametrize(("spool_mb", "kept"), [(2, 3), (1, 1)])
def test_a_spool_above_its_size_loses_the_oldest(tmp_path: Path, spool_mb: int, kept: int) -> None:
    arguments = settings_of(tmp_path)
    own = decode(StreamerSettings, arguments[4], "--settings").own_directory
    spool = Spool(own / "spool")
    for number in range(3):
        spool.write(pa.py_buffer(bytes(6 * MB // 10)), "values", number, 10, number)
    with streamer(tmp_path, spool_mb=spool_mb, telemetry_interval_s=0.0) as page:
        assert page.first_values("megatrain_spool_bytes") == {"h": kept * 6 * MB // 10}
        dropped = page.first_values("megatrain_events_dropped_total", "reason")
    assert dropped["spool-full"] == 10 * (3 - kept)
    assert [batch.made_unix_ns for batch in spool.found()] == list(range(3 - kept, 3))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        disk.make_read_only()
        yield disk.seen


def test_the_streamer_goes_on_without_its_positions(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        write_positions(place / "positions.json", Positions())
    (record,) = caplog.records
    assert "positions.json cannot be written: [Errno 30] Read-only file system" in record.getMessage()


def test_an_export_is_refused_with_its_file(place: Path) -> None:
    with pytest.raises(DataError, match=r"out\.jsonl: cannot be written: Read-only file system; choose another"):
        write_records(iter(()), "text", place / "out.jsonl")
