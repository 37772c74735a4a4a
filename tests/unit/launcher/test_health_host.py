"""Disk, shared memory, memory, limits, network and clock: each check on machines with and without problems."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from megatrain.contracts.records.host_records import CheckOutcome
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.health import clock, limits, memory, network, storage
from megatrain_launcher.health.child import ProbeEnd
from megatrain_launcher.health.history import HealthHistory
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.health_contexts import health_context
from tests.helpers.ports import free_ports

GB, MIB, GIB = 10**9, 1 << 20, 1 << 30
EMPTY = HealthHistory()


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


# disk


def test_outcome_of_each_disk_reading() -> None:
    for changes, outcome, detail in [
        ({}, "passed", "100.0 of 200.0 GB"),
        ({"free_bytes": 4 * GB}, "failed", "min_free_disk_gb=5"),
        ({"free_files": 10}, "failed", "10 more files"),
        ({"free_files": None}, "passed", ""),
        ({"write_s": 9.0}, "warning", "9.0 s"),
        ({"error": "Read-only file system"}, "failed", "Read-only"),
    ]:
        answer = {"free_bytes": 100 * GB, "total_bytes": 200 * GB, "free_files": 10**6, "write_s": 0.01, **changes}
        finding = storage.judge_disk(answer, "run directory runs/x", 5.0)
        assert finding.outcome == outcome, changes
        assert detail in finding.detail, changes


def test_the_disk_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "new"
    (finding,) = storage.check_disk(health_context(tmp_path, run_directory=directory), HealthHistory())
    assert finding.outcome in ("passed", "failed")  # with the space of this machine
    assert finding.value is not None
    assert list(directory.iterdir()) == []


def test_run_directory_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = storage.check_disk(health_context(tmp_path, run_directory=tmp_path / "file" / "run"), HealthHistory())
    assert finding.outcome is CheckOutcome.FAILED
    assert "Not a directory" in finding.detail


def test_disk_without_an_answer_fails(tmp_path: Path) -> None:
    def probe(name, arguments, *, environment, deadline_s):
        assert (name, arguments) == ("disk_probe", [str(tmp_path)])
        return ProbeEnd(None, "", "", deadline_s)

    (finding,) = storage.check_disk(health_context(tmp_path, probe=probe), HealthHistory())
    assert finding.outcome is CheckOutcome.FAILED
    assert "its probe did not end within 15 s" in finding.detail


# shared memory


def test_outcome_of_free_shared_memory() -> None:
    for free, outcome, detail in [
        (500 * MIB, "passed", "500 MiB free"),
        (130 * MIB, "warning", "NCCL"),
        (99 * MIB, "failed", "--shm-size"),
        ("No such file or directory", "failed", "black_box_directory"),
    ]:
        finding = storage.judge_shared_memory(Path("/dev/shm"), 100 * MIB, free)
        assert finding.outcome == outcome, free
        assert detail in finding.detail, free


def test_shared_memory_of_this_machine(tmp_path: Path) -> None:
    def check(**changes) -> CheckOutcome:
        return storage.check_shared_memory(health_context(tmp_path, **changes), HealthHistory())[0].outcome

    assert check() is CheckOutcome.SKIPPED
    assert check(shared_memory=tmp_path / "none") is CheckOutcome.FAILED
    assert check(shared_memory=tmp_path, shared_memory_bytes=1 << 60) is CheckOutcome.FAILED
    assert check(shared_memory=tmp_path, shared_memory_bytes=1) in (CheckOutcome.PASSED, CheckOutcome.WARNING)


# memory


def test_lost_or_little_memory_is_found(tmp_path: Path) -> None:
    def check(total_gib: int, available_gib: int, history: HealthHistory = EMPTY):
        kib = 1 << 20
        meminfo = f"MemTotal: {total_gib * kib} kB\nMemFree: 1 kB\nMemAvailable: {available_gib * kib} kB"
        write_tree(tmp_path, {"proc/meminfo": meminfo})
        return memory.check_memory(health_context(tmp_path), history)[0]

    first = check(512, 400)
    assert first.outcome is CheckOutcome.PASSED
    assert first.value == 400
    history = HealthHistory().with_findings([first])
    assert check(511, 400, history).outcome is CheckOutcome.PASSED
    lost = check(496, 400, history)
    assert lost.outcome is CheckOutcome.FAILED
    assert "had 512.0 GiB before" in lost.detail
    assert history.with_findings([lost]) == history
    assert check(512, 10).outcome is CheckOutcome.WARNING
    (tmp_path / "proc/meminfo").write_text("nonsense")
    assert memory.check_memory(health_context(tmp_path), history)[0].outcome is CheckOutcome.SKIPPED


def test_new_memory_errors_are_found(tmp_path: Path) -> None:
    def check(history: HealthHistory = EMPTY):
        return memory.check_memory(health_context(tmp_path), history)[1]

    assert check().outcome is CheckOutcome.SKIPPED
    mc = "sys/devices/system/edac/mc"
    write_tree(tmp_path, {f"{mc}/mc0/ce_count": "3", f"{mc}/mc1/ce_count": "0", f"{mc}/mc0/ue_count": "0"})
    first = check()
    assert first.outcome is CheckOutcome.PASSED
    history = HealthHistory().with_findings([first])
    assert check(history).outcome is CheckOutcome.PASSED
    write_tree(tmp_path, {f"{mc}/mc1/ce_count": "5"})
    more = check(history)
    assert more.outcome is CheckOutcome.WARNING
    assert "5 more corrected" in more.detail
    write_tree(tmp_path, {f"{mc}/mc0/ue_count": "1"})
    assert check(history).outcome is CheckOutcome.FAILED


# limits


def test_outcome_of_the_limit_of_open_files() -> None:
    for limit, outcome in [(resource.RLIM_INFINITY, "passed"), (65536, "passed"), (1024, "warning"), (100, "failed")]:
        assert limits.judge_open_files(limit).outcome == outcome, limit


def test_outcome_of_the_limit_of_locked_memory(tmp_path: Path) -> None:
    # the limits of this process
    findings = limits.check_limits(health_context(tmp_path), HealthHistory())
    assert [finding.name for finding in findings] == list(limits.NAMES)
    for limit, has_rdma, outcome in [
        (65536, False, "skipped"),
        (resource.RLIM_INFINITY, True, "passed"),
        (65536, True, "failed"),
        (64 * GIB, True, "warning"),
    ]:
        assert limits.judge_locked_memory(limit, has_rdma).outcome == outcome, (limit, has_rdma)


# network


def interface(name: str, state: str = "up", speed: str = "100000", changes: str = "2") -> dict[str, str]:
    base = f"sys/class/net/{name}"
    files = {f"{base}/operstate": state, f"{base}/speed": speed, f"{base}/carrier_changes": changes}
    return files | {f"{base}/device/vendor": "0x15b3"}


def port(name: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", downs: str = "0") -> dict[str, str]:
    base = f"sys/class/infiniband/{name}/ports/1"
    return {
        f"{base}/state": state,
        f"{base}/phys_state": "5: LinkUp",
        f"{base}/rate": rate,
        f"{base}/counters/link_downed": downs,
    }


def network_findings(tmp_path: Path, files: dict[str, str], history: HealthHistory, chosen: str = ""):
    write_tree(tmp_path, files)
    return network.check_network(health_context(tmp_path, network_interface=chosen), history)


def test_host_without_network_passes_as_the_only_one(tmp_path: Path) -> None:
    first, second = network_findings(tmp_path, {"sys/class/net/lo/operstate": "unknown"}, HealthHistory())
    assert first.outcome is CheckOutcome.PASSED
    assert second.outcome is CheckOutcome.SKIPPED
    # The history is a file with names and plain numbers.
    findings = network_findings(tmp_path, interface("eth0") | port("mlx5_0"), HealthHistory())
    assert json.loads(json.dumps([dict(finding.seen) for finding in findings]))


def test_outcome_of_interfaces_without_history(tmp_path: Path) -> None:
    cases = [
        (interface("eth0"), "", "passed", "eth0 up 100 Gbit/s"),
        (interface("eth0", speed="-1"), "eth0", "passed", "eth0 up"),
        (interface("eth0"), "eth1", "failed", "'eth1' does not exist; the interfaces are: eth0"),
        (interface("eth0", "down"), "eth0", "failed", "is down"),
        (interface("eth0", "down"), "", "warning", "no interface is up"),
        (interface("eth0", "down") | interface("eth1"), "", "passed", "eth0 down"),
        (interface("eth0", "down"), "lo", "passed", "one host"),
        (interface("tun0", "unknown", "") | {"sys/class/net/tun0/carrier": "1"}, "tun0", "passed", "tun0 up"),
    ]
    for number, (files, chosen, outcome, detail) in enumerate(cases):
        finding = network_findings(tmp_path / str(number), files, HealthHistory(), chosen)[0]
        assert finding.outcome == outcome, (files, chosen)
        assert detail in finding.detail, (files, chosen)


def test_outcome_of_interfaces_against_their_history(tmp_path: Path) -> None:
    cases = [
        (interface("eth0"), "", "passed", ""),
        (interface("eth0", speed="1000"), "", "warning", "at 1 Gbit/s, down from 100 Gbit/s"),
        (interface("eth0", speed="1000"), "eth0", "failed", "at 1 Gbit/s, down from 100 Gbit/s"),
        (interface("eth0", "down"), "", "warning", "it was up before"),
        (interface("eth0", changes="5"), "", "passed", ""),
        (interface("eth0", changes="6"), "", "warning", "changed 4 times"),
        (interface("eth0", changes="0"), "", "passed", ""),
    ]
    before = interface("eth0") | interface("eth1")
    for number, (now, chosen, outcome, detail) in enumerate(cases):
        root = tmp_path / str(number)
        history = HealthHistory().with_findings(network_findings(root, before, HealthHistory()))
        finding = network_findings(root, now, history, chosen)[0]
        assert finding.outcome == outcome, (now, chosen)
        assert detail in finding.detail, (now, chosen)


def test_outcome_of_rdma_ports_against_their_history(tmp_path: Path) -> None:
    """A port that was never up is not in use; one that was up is missing until it returns."""
    cases = [
        ({}, "passed", "mlx5_0:1 up 400 Gbit/s, mlx5_1:1 DOWN"),
        (port("mlx5_0", "1: DOWN"), "failed", "mlx5_0:1 is DOWN"),
        (port("mlx5_0", rate="100 Gb/sec (4X EDR)"), "failed", "100 Gbit/s, down from 400 Gbit/s"),
        (port("mlx5_0", downs="9"), "warning", "changed 9 times"),
        (port("mlx5_1", "4: ACTIVE"), "passed", "mlx5_1:1 up"),
    ]
    before = port("mlx5_0") | port("mlx5_1", "1: DOWN", "")
    for number, (now, outcome, detail) in enumerate(cases):
        root = tmp_path / str(number)
        history = HealthHistory().with_findings(network_findings(root, before, HealthHistory()))
        findings = network_findings(root, now, history)
        assert findings[1].outcome == outcome, now
        assert detail in findings[1].detail, now
        if outcome == "failed":
            history = history.with_findings(findings)
            assert network_findings(root, {}, history)[1].outcome == "failed", now
            assert network_findings(root, before, history)[1].outcome == "passed", now


# clock


class Server:
    """Answers with a Date that is wrong by some seconds; None: without a Date."""

    def __init__(self, off_s: float | None) -> None:
        server = self
        self.num_asked = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.num_asked += 1
                self.send_response_only(200)
                if off_s is not None:
                    self.send_header("Date", formatdate(time.time() + off_s, usegmt=True))
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *arguments) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@contextmanager
def servers(*off_s: float | None) -> Iterator[list[Server]]:
    some = [Server(each) for each in off_s]
    threads = [threading.Thread(target=server.http.serve_forever, args=(0.02,)) for server in some]
    for thread in threads:
        thread.start()
    try:
        yield some
    finally:
        for server in some:
            server.http.shutdown()
            server.http.server_close()
        for thread in threads:
            thread.join()


def test_outcome_of_clocks_against_etcd(tmp_path: Path) -> None:
    cases: list[tuple[tuple[float | None, ...], str, str]] = [
        ((0.0,), "passed", "etcd (+/- "),
        ((60.0,), "failed", "s behind etcd"),
        ((-60.0,), "failed", "s ahead of etcd"),
        ((0.0, 60.0, 0.0), "warning", "1 of 3"),
        ((60.0, 60.0, 0.0), "failed", "max_clock_offset_s=2"),
        ((None,), "warning", "not compared"),
    ]
    for off_s, outcome, detail in cases:
        with servers(*off_s) as some:
            etcd = EtcdSettings.of([server.url for server in some])
            (finding,) = clock.check_clock(health_context(tmp_path, etcd=etcd), HealthHistory())
            assert finding.outcome == outcome, off_s
            assert detail in finding.detail, off_s
            assert [server.num_asked for server in some] == [1] * len(some), "one answer is sufficient"


def test_clock_without_an_answer_of_etcd_is_not_judged(tmp_path: Path) -> None:
    (finding,) = clock.check_clock(health_context(tmp_path), HealthHistory())
    assert finding.outcome is CheckOutcome.SKIPPED
    etcd = EtcdSettings.of(f"127.0.0.1:{free_ports(1)[0]}")
    (finding,) = clock.check_clock(health_context(tmp_path, etcd=etcd), HealthHistory())
    assert finding.outcome is CheckOutcome.WARNING


def test_clock_of_a_real_etcd(etcd: EtcdServers, tmp_path: Path) -> None:
    (finding,) = clock.check_clock(health_context(tmp_path, etcd=EtcdSettings.of(etcd.urls)), HealthHistory())
    assert finding.outcome is CheckOutcome.PASSED
    assert finding.value is not None
    assert abs(finding.value) < 0.8


def test_true_clock_offset_is_within_the_bounds() -> None:
    """For any fraction of a second, delay, and true offset."""
    for true in (-3.0, -0.4, 0.0, 0.31, 2.7):
        for start in range(0, 100, 7):
            sent = 1000 + start / 100
            for there, back in ((0.0, 0.0), (0.1, 0.02), (0.0, 0.4)):
                date = int(sent + there + true)
                offset = clock.offset_of(date, sent, sent + there + back)
                assert offset.least - 1e-9 <= true <= offset.most + 1e-9
                assert offset.error <= 0.5 + (there + back) / 2 + 1e-9


def test_more_answers_make_an_unclear_offset_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.time, "sleep", lambda seconds: None)
    answers = iter([clock.Offset(1.5, 2.5), clock.Offset(1.2, 2.2), clock.Offset(0.9, 1.9)])
    offset = clock.measured_offset(2.0, lambda: next(answers))
    assert offset == clock.Offset(1.5, 1.9)
    assert offset.is_within(2.0) is True
    # An unclear offset is taken from the middle of its bounds, after a bounded number of answers.
    unclear = clock.measured_offset(2.0, lambda: clock.Offset(1.9, 2.3))
    assert clock.judge_clock([unclear], 2.0).outcome is CheckOutcome.FAILED
    # A clock that is set meanwhile leaves no overlap: the newer answer counts.
    answers = iter([clock.Offset(1.5, 2.5), clock.Offset(-0.5, 0.5)])
    assert clock.measured_offset(2.0, lambda: next(answers)) == clock.Offset(-0.5, 0.5)
