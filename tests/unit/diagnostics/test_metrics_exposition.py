"""Names, labels and values of the metrics, read with Prometheus' own parser; their clients exhaust no memory."""

from __future__ import annotations

import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.layout import AXES
from megatrain_diagnostics.metrics import server
from megatrain_diagnostics.metrics.exposition import HostCollector, registry_of
from megatrain_diagnostics.metrics.readings import MAX_PRODUCERS, MAX_SCORES, ProducerReading
from megatrain_diagnostics.metrics.server import MetricsServer, read_token
from megatrain_job.jobs.health import Reason, ReasonCode, health_of
from tests.helpers.metric_readings import (
    DEVICES,
    host_families,
    job_families,
    make_host_reading,
    make_job_reading,
    make_rank_reading,
)
from tests.helpers.slow_peer import is_ended_when_sent
from tests.helpers.waiting import DEADLINE_S, wait_until

LABELS_ALLOWED = {
    *("job_name", "host", "rank", *(axis.name for axis in AXES), "gpu_uuid"),
    *("table", "reason", "kind", "cause", "confidence", "version", "le", "level", "code", "producer"),
    *("gpu", "gpu_name", "link"),
}
MAX_RANK_GAUGES = 18
"""Two of them have series only in some runs: of replaced samples, and of waits for producers of pictures."""


def test_every_name_and_label_follows_the_rules() -> None:
    found = host_families(devices=DEVICES) | job_families()
    for name, family in found.items():
        assert name.startswith("megatrain_")
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= LABELS_ALLOWED, sample
            if family.type == "counter":
                assert sample.name.endswith("_total")
    of_ranks = [family for family in found.values() if any("rank" in one.labels for one in family.samples)]
    assert all(family.type == "gauge" for family in of_ranks)
    assert len(of_ranks) <= MAX_RANK_GAUGES


def test_unknown_value_has_no_sample() -> None:
    silent = make_rank_reading(7)
    silent = replace(silent, step=None, last_step_unix_s=None, step_s=None)
    found = host_families(ranks=(silent,), clock_offset_s=None)
    assert [sample.labels["rank"] for sample in found["megatrain_rank_info"].samples] == ["7"]
    assert found["megatrain_rank_step"].samples == []
    assert "megatrain_clock_offset_seconds" not in found


def test_producers_are_summed_over_the_ranks_of_a_host() -> None:
    """Two ranks asked two producers; a rank without reads in the last step has no part."""
    ranks = (*make_host_reading().ranks, replace(make_rank_reading(2), producers=()))
    found = host_families(ranks=ranks)
    shown = {
        name.removeprefix("megatrain_producer_"): [(one.labels["producer"], one.value) for one in family.samples]
        for name, family in found.items()
        if name.startswith("megatrain_producer_")
    }
    assert shown == {
        "pictures": [("0", 48.0), ("1", 16.0)],
        "answer_seconds": [("0", 0.02), ("1", 0.02)],
        "requests_waiting": [("0", 3.0), ("1", 1.0)],
        "failed_requests": [("0", 0.0), ("1", 2.0)],
    }
    many = replace(make_rank_reading(0), producers=(ProducerReading(1.0, 0.1, 0.0, 0.0),) * (MAX_PRODUCERS + 1))
    assert len(host_families(ranks=(many,))["megatrain_producer_pictures"].samples) == MAX_PRODUCERS
    assert not [name for name in host_families(ranks=ranks[2:]) if name.startswith("megatrain_producer_")]


def test_restart_adds_no_series() -> None:
    def series(reading_step: int) -> set[str]:
        ranks = tuple(replace(rank, step=reading_step) for rank in make_host_reading().ranks)
        text = generate_latest(registry_of(HostCollector(lambda: replace(make_host_reading(), ranks=ranks)))).decode()
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    assert series(10) == series(500)


def test_loss_that_is_nan_is_exposed() -> None:
    assert math.isnan(job_families(loss=math.nan)["megatrain_loss"].samples[0].value)


def test_only_the_worst_hosts_have_a_score() -> None:
    scores = {f"host-{number}": float(number) for number in range(50)}
    found = job_families(straggler_scores=scores)
    shown = {sample.labels["host"]: sample.value for sample in found["megatrain_straggler_score"].samples}
    assert shown == {f"host-{number}": float(number) for number in range(50 - MAX_SCORES, 50)}


def test_health_is_a_level_with_reason_codes() -> None:
    health = health_of([Reason(ReasonCode.RECOVERING, "an incident"), Reason(ReasonCode.SAVES_FAIL, "disk full")])
    found = job_families(health=health)
    assert {sample.labels["level"]: sample.value for sample in found["megatrain_job_health"].samples} == {
        "green": 0, "amber": 0, "red": 1,
    }  # fmt: skip
    reported = {
        (sample.labels["level"], sample.labels["code"]): sample.value
        for sample in found["megatrain_job_health_reasons"].samples
    }
    assert reported == {("red", "saves-fail"): 1, ("amber", "recovering"): 1}
    assert "megatrain_job_health" not in job_families(health=None)


def test_histogram_of_step_times_counts_all_steps() -> None:
    samples = job_families()["megatrain_step_duration_seconds"].samples
    buckets = [sample.value for sample in samples if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == sum(make_job_reading().step_buckets)


@contextmanager
def listening_server(token: str = "", address: str = "127.0.0.1") -> Iterator[MetricsServer]:
    listening = MetricsServer(
        registry_of(HostCollector(make_host_reading)), address, 0, token, key="diagnostics.metrics_port"
    )
    try:
        yield listening
    finally:
        listening.close()


def get(port: int, path: str, token: str | None = None) -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_beyond_the_machine_a_token_is_needed() -> None:
    with (
        pytest.raises(ConfigError, match=r"metrics_address='0.0.0.0' .*metrics_token_file"),
        listening_server(address="0.0.0.0"),
    ):
        pass
    with listening_server("s3cret", address="0.0.0.0") as listening:
        for token in (None, "wrong", "s3cret-and-more"):
            assert get(listening.port, "/metrics", token)[0] == 401, token
        code, body = get(listening.port, "/metrics", "s3cret")
        assert code == 200
        assert b"megatrain_rank_info{" in body
        assert get(listening.port, "/healthz") == (200, b"ok\n")
        assert get(listening.port, "/etc/passwd", "s3cret")[0] == 404
        with pytest.raises(ConfigError, match=f"diagnostics.daemon_metrics_port={listening.port}: cannot listen"):
            MetricsServer(
                registry_of(HostCollector(make_host_reading)), "127.0.0.1", listening.port,
                key="diagnostics.daemon_metrics_port",
            )  # fmt: skip


def test_a_token_file_must_hold_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(path))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="write one token"):
        read_token(str(path))
    path.write_text("abc\n")
    assert read_token(str(path)) == "abc"
    assert read_token("") == ""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listening = MetricsServer(registry_of(HostCollector(make_host_reading)), "127.0.0.1", 0, key="metrics_port")
    yield listening.port
    listening.close()


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        content: bytes = answer.read()
    return content


@pytest.mark.slow
def test_silent_connections_do_not_block_scrapers(port: int) -> None:
    before = threading.active_count()
    with ExitStack() as opened:
        for _ in range(10 * server.MAX_CONNECTIONS):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert b"megatrain_" in scrape(port)
        # a thread whose connection was ended needs a moment to notice
        wait_until(lambda: threading.active_count() - before <= server.MAX_CONNECTIONS + 1, "few threads")


def test_slow_request_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        wait_until(lambda: is_ended_when_sent(slow, b"x"), "the server to end the request")
    assert b"megatrain_" in scrape(port)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /metrics?" + b"x" * 60_000 + b" HTTP/1.1",
        b"GET /metrics HTTP/1.1" + b"".join(b"\r\nX-%d: %b" % (number, b"y" * 60_000) for number in range(90)),
    ],
)
def test_a_long_head_is_not_kept(port: int, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answer:
        with suppress(ConnectionError):
            connection.sendall(head + b"\r\n\r\n")
        with suppress(ConnectionError):
            assert answer.readline().split()[1] not in (b"200", b"404")
    assert b"megatrain_" in scrape(port)
